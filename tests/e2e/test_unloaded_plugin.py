"""Workers that did not load the plugin: the engine does not start, and says why."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.plugins import load_general_plugins
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tests.support.engines.script import OPTIONS
from vllm.inflight.errors import UpstreamChanged

pytestmark = pytest.mark.engine


@pytest.fixture
def ended() -> Iterator[None]:
    """After the test there is no executor. Upstream's is one until the process ends."""
    yield
    for each in gc.get_objects():
        if isinstance(each, MultiprocExecutor):
            each.shutdown()


@pytest.mark.usefixtures("ended")
def test_an_engine_whose_workers_lack_the_plugin_says_what_to_check(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import LLM

    load_general_plugins()  # here, and not in the worker that is spawned
    monkeypatch.setenv("VLLM_PLUGINS", "")
    with pytest.raises(UpstreamChanged) as error:
        LLM(str(old), distributed_executor_backend="mp", **OPTIONS)
    told = str(error.value)
    assert "a worker process did not load the plugin of vllm-inflight" in told
    assert "Run `vllm-inflight doctor` in the environment of each worker" in told
    assert "VLLM_PLUGINS has to be unset or to name inflight" in told
