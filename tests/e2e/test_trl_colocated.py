"""TRL's own code for an engine of its process, unmodified, sends new weights to it.

`VLLMGeneration` is what `GRPOTrainer` and others send with. `OnlineDPOTrainer` has code
of its own, and trains here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script
from vllm.inflight.config import CONFIG_ENV

pytestmark = pytest.mark.engine


ADOPTED = pytest.mark.parametrize(
    ("adopt", "sleeps"),
    [
        ("direct", ""),
        pytest.param("on", "", marks=pytest.mark.slow),
        pytest.param("on", "asleep", marks=pytest.mark.slow),
    ],
)


@ADOPTED
def test_what_trl_loads_is_served_and_a_version_if_it_is_adopted(
    checkpoint: Callable[..., Path],
    adopt: str,
    sleeps: str,
    record_property: Callable[[str, object], None],
) -> None:
    seen = loaded("colocated", adopt, sleeps, checkpoint(0), checkpoint(1))
    check(seen, adopt, record_property)


@pytest.mark.slow
@ADOPTED
def test_each_rollout_of_online_dpo_is_of_the_weights_that_it_has_trained_so_far(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    adopt: str,
    sleeps: str,
    record_property: Callable[[str, object], None],
) -> None:
    seen = loaded("online_dpo", adopt, sleeps, checkpoint(0), tmp_path)
    check(seen, adopt, record_property)
    word = KIND[adopt]
    assert seen["rollouts"] == [[f"{word}-{number}"] for number in (1, 2, 3)]


KIND = {"direct": "update", "on": "untracked"}


def loaded(what: str, adopt: str, *arguments: Any) -> dict[str, Any]:
    assert OWN["trl"].folder.is_dir(), "run `make test-frameworks`"
    return run_script(
        "trl",
        what,
        *arguments,
        room="tests.support.frameworks",
        spawned=True,  # transformers looks for accelerate once, where it is imported
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        | ({CONFIG_ENV: '{"adopt": "direct"}'} if adopt == "direct" else {}),
    )


def check(
    seen: dict[str, Any], adopt: str, record_property: Callable[[str, object], None]
) -> None:
    """Fail unless what is served is the new weights, with the label that it gets."""
    assert seen["is new"]
    assert seen["weight_version"] == f"{KIND[adopt]}-{seen['epoch']}"
    if adopt == "direct":
        assert seen["digest"] == seen["digest of files"]
        record_property("digest", "equal")
    else:
        assert seen["digest"] is None
