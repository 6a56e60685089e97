"""TRL's own code for an engine of its process, unmodified, sends new weights to it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script
from vllm.inflight.config import CONFIG_ENV

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("adopt", "sleeps"), [("direct", ""), ("on", ""), ("on", "asleep")]
)
def test_what_trl_loads_is_served_and_a_version_if_it_is_adopted(
    checkpoint: Callable[..., Path],
    adopt: str,
    sleeps: str,
    record_property: Callable[[str, object], None],
) -> None:
    assert OWN["trl"].folder.is_dir(), "run `make test-frameworks`"
    seen = run_script(
        "trl",
        *("colocated", sleeps, checkpoint(0), checkpoint(1)),
        room="tests.support.frameworks",
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        | ({CONFIG_ENV: '{"adopt": "direct"}'} if adopt == "direct" else {}),
    )
    assert seen["is new"]
    if adopt == "direct":
        assert seen["label"] == f"update-{seen['epoch']}"
        assert seen["digest"] == seen["digest of files"]
        record_property("digest", "equal")
    else:
        assert seen["label"] == f"untracked-{seen['epoch']}"
        assert seen["digest"] is None
