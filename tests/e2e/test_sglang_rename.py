"""SGLang's renames of what is served, and what becomes of the requests that run."""

from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.engines.core_door import Door
from vllm.inflight.engine.pause.sleep import Sleep

pytestmark = pytest.mark.engine


def test_a_rename_aborts_no_request_unless_asked_to(door: Door) -> None:
    add(door.core, "r", prompt(6))
    streams = Streams(door.core).step(5)
    reply = door.post("/update_weight_version", new_version="best")
    assert (reply["success"], reply["new_version"]) == (True, "best")
    streams.run()
    assert streams.stamps["r"] == ["old"] * 5 + ["best"] * 35
    add(door.core, "s", prompt(6))
    door.post("/update_weight_version", new_version="b", abort_all_requests=True)
    assert not door.core.scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("weights", "label", "status"),
    [("live", "", 400), ("live", "x" * 100_000, 400), ("live", 3, 400)]
    + [(state, "best", 409) for state in ("asleep", "gone")],
)
def test_a_rejected_rename_aborts_no_request(
    door: Door, monkeypatch: pytest.MonkeyPatch, weights: str, label: Any, status: int
) -> None:
    add(door.core, "r", prompt(6))
    Streams(door.core).step(5)
    monkeypatch.setattr(Sleep, "weights", weights)
    body = {"new_version": label, "abort_all_requests": True}
    assert door.refused("/update_weight_version", **body)[0] == status
    assert door.core.scheduler.has_unfinished_requests()
    assert door.label == "old"
