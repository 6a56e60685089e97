"""Every family's loaders on the receiving path of a GPU, with every tensor in place."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engines.in_place import RESULTS
from tests.support.engines.script import LONGEST_S
from tests.support.models.families import FAMILIES, WANT_TORCHVISION
from tests.support.models.families_seen import HOST, record
from tests.support.preloaded_process import run

pytestmark = pytest.mark.engine

QUICK = ("gpt2:768", "phi3", "granite_moe_hybrid", "mixtral", "llama")
"""The first transposes tensors of more than 1 MiB, which a GPU receives in place."""
HIDDEN = {"gpt2": 768}
UNPLAYED = ("bert", "bloom", "nemotron_h_moe", *WANT_TORCHVISION)
"""The first two are not updated, the third has no kernel; the others want more."""


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Plays families in a process of its own; what it tells of each."""

    def play(*asked: str) -> list[Any]:
        folder = tmp_path_factory.mktemp("played")
        module = "tests.support.engines.in_place"
        done = run(module, str(folder), *asked, timeout_s=LONGEST_S)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = (folder / RESULTS).read_text().splitlines()
        return [json.loads(line) for line in lines]

    return play


def check(told: dict[str, Any]) -> None:
    """What is served was a fresh load after every flip, and much of it in place."""
    assert "error" not in told, told
    assert told["wrong"] == []
    assert told["refused"] == []
    assert told["num_at_start"] == told["num_proved"] == told["num_recorded"]
    assert told["num_in_place"] > told["num_tensors"] / 2
    record(
        told["family"],
        HOST,
        "eager",
        result="equal",
        hidden=told["hidden"],
        tensors=told["num_tensors"],
        in_place=told["num_in_place"],
    )


def test_weights_received_in_place_equal_a_fresh_load(play):
    told = play(*QUICK)
    assert [each["family"] for each in told] == [q.partition(":")[0] for q in QUICK]
    for each in told:
        check(each)


@pytest.mark.slow
def test_every_familys_weights_received_in_place_equal_a_fresh_load(play):
    names = [name for name in FAMILIES if name not in UNPLAYED]
    told = play(*(f"{n}:{HIDDEN.get(n, 128)}" for n in names))
    assert [each["family"] for each in told] == names
    for each in told:
        check(each)
