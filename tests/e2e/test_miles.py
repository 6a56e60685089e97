"""miles' own rollout function and engine class, from its repository, on a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script
from tests.support.frameworks.slime import LONGEST
from tests.support.serving import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    """What miles' samples have."""
    assert OWN["miles"].folder.is_dir(), "run `make test-frameworks`"
    folders = [checkpoint(seed, layers=4) for seed in range(2)]
    with Server(folders[0]) as server:
        server.post("/update_weight_version", {"new_version": "old"})
        return run_script(
            "miles", server.url, *folders, room="tests.support.frameworks"
        )


def test_samples_live_through_an_update_by_the_calls_of_miles_engine_class(
    seen: dict[str, Any],
) -> None:
    assert seen["healthy"]
    assert (seen["whole"]["versions"], seen["after"]["versions"]) == (["old"], ["new"])
    assert seen["whole"]["tokens"] != seen["after"]["tokens"]
    assert seen["version"] == "new"
    for sample in seen["through the update"]:
        assert (sample["status"], sample["length"]) == ("truncated", LONGEST)
        assert len(sample["logprobs"]) == LONGEST
        assert sample["versions"] == ["new"]  # of the last token, as SGLang says


def test_an_aborted_sample_goes_on_where_it_was(seen: dict[str, Any]) -> None:
    partial, finished = seen["partial"], seen["finished"]
    assert partial["status"] == "aborted" and 0 < partial["length"] < LONGEST
    assert (finished["status"], finished["length"]) == ("truncated", LONGEST)
    assert finished["tokens"][: len(partial["tokens"])] == partial["tokens"]
    assert finished["versions"] == ["new", "new"]
