"""An engine whose updates are one call each: opened, received and committed by it."""

import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.probe import GREEDY, greedy, outputs_during
from vllm.inflight.errors import (
    BaseMismatch,
    InflightError,
    Malformed,
    UpdateBusy,
    WeightsMismatch,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start(old, weight_transfer_config=WeightTransferConfig(backend="local"))


def chunk(folder: Path) -> dict[str, Any]:
    return {"update_info": {"path": str(folder)}}


def test_one_call_opens_receives_and_commits_while_requests_run(
    llm: Any, new: Path, fresh: list[list[int]]
) -> None:
    assert greedy(llm) != fresh
    reply: dict[str, Any] = {}

    def work() -> None:
        start = {"update_id": "one", "weight_version": "v1"}
        reply.update(llm.update_weights(chunk(new), start=start, finish={}))

    outputs = outputs_during(work, llm, 4, repeat(GREEDY))
    assert outputs
    assert reply["weight_version"] == llm.get_weight_version() == "v1"
    assert {"epoch", "digest", "gap_ms", "seconds"} <= reply.keys()
    assert greedy(llm) == fresh
    start = {"update_id": "one", "weight_version": "v1"}
    assert llm.update_weights(chunk(new), start=start, finish={}) == reply
    assert llm.weight_info()["epoch"] == reply["epoch"]


def test_a_start_that_is_rejected_leaves_nothing_open(llm: Any, new: Path) -> None:
    before = greedy(llm)
    manifest = {
        "format": 1,
        "base": "0" * 32,
        "tensors": [
            {"name": "lm_head.weight", "shape": [4], "dtype": "bfloat16"}
            | {"digest": "0" * 32}
        ],
    }
    for start, kind in (
        ({"manifest": manifest}, BaseMismatch),
        ({"base_version": "served by nobody"}, InflightError),
        ({"deadline_s": -1}, Malformed),
    ):
        with pytest.raises(kind):
            llm.update_weights(chunk(new), start=start, finish={})
        assert llm.weight_update_status()["active"] is None
    with pytest.raises(Malformed, match="unknown field 'weightversion'"):
        llm.update_weights(chunk(new), start={"weightversion": "v"})
    llm.start_weight_update(update_id="theirs")
    with pytest.raises(UpdateBusy):
        llm.update_weights(chunk(new), start={}, finish={})
    assert llm.weight_update_status()["active"]["update_id"] == "theirs"
    llm.abort_weight_update()
    assert greedy(llm) == before


def test_tensors_that_are_rejected_leave_nothing_open(
    llm: Any, new: Path, fresh: list[list[int]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    before = greedy(llm)
    tensors = load_file(new / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    began = time.monotonic()
    with pytest.raises(WeightsMismatch) as raised:
        llm.update_weights(chunk(tmp_path), start={}, finish={})
    assert raised.value.tensors == ["model.norm.weight"]
    with pytest.raises(InflightError):
        llm.update_weights(chunk(tmp_path / "nowhere"), start={}, finish={})
    assert time.monotonic() - began < 30, "it waited for a deadline"
    assert llm.weight_update_status()["active"] is None
    assert greedy(llm) == before
    llm.update_weights(chunk(new), start={}, finish={})
    assert greedy(llm) == fresh


def test_an_update_that_a_call_has_opened_goes_on_with_others(
    llm: Any, new: Path, fresh: list[list[int]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = list(load_file(new / "model.safetensors").items())
    halves = []
    for number, part in enumerate((tensors[::2], tensors[1::2])):
        halves.append(tmp_path / f"{number}.safetensors")
        save_file(dict(part), halves[-1])
    reply = llm.update_weights(chunk(halves[0]), start={"update_id": "both"})
    assert (reply["update_id"], reply["phase"]) == ("both", "staging")
    reply = llm.update_weights(chunk(halves[1]), chunk=1, finish={"mode": "retract"})
    assert reply["update_id"] == "both"
    assert greedy(llm) == fresh
