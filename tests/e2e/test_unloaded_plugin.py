"""Workers that did not load the plugin: the engine does not start, and says why."""

from pathlib import Path

import pytest

from tests.support.preloaded_process import run

pytestmark = pytest.mark.engine

START = """if True:
    import os, sys
    from vllm import LLM
    from vllm.plugins import load_general_plugins
    from tests.support.engines.script import OPTIONS

    load_general_plugins()  # here, and not in the workers that are spawned
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    LLM(sys.argv[1], tensor_parallel_size=2, **OPTIONS)
"""


def test_an_engine_whose_workers_lack_the_plugin_says_what_to_check(old: Path) -> None:
    done = run("-c", START, str(old), spawned=True)
    assert done.returncode == 1
    (told,) = (
        line
        for line in done.stderr.splitlines()
        if line.startswith("vllm.inflight.errors.UpstreamChanged: ")
    )
    assert "a worker process did not load the plugin of vllm-inflight" in told
    assert "Run `vllm-inflight doctor` in the environment of each worker" in told
    assert "VLLM_PLUGINS has to be unset or to name inflight" in told
