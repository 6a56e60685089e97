"""SGLang's `keep_pause`: an update from disk after which the engine stands still."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.engines.core_door import Door
from vllm.inflight.api.control.control import Control
from vllm.inflight.errors import Malformed

pytestmark = pytest.mark.engine


def test_keep_pause_leaves_the_engine_paused_and_counts_what_is_frozen(
    door: Door, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(4))
    streams = Streams(door.core).step(5)
    path = str(folders["new"])
    reply = door.post("/update_weights_from_disk", model_path=path, keep_pause=True)
    assert reply["num_paused_requests"] == 1
    assert door.get("/is_paused")["is_paused"] is True
    assert len(streams.step(3).tokens["r"]) == 5
    status, _ = door.refused(
        "/update_weights_from_disk", model_path="/nowhere", keep_pause=True
    )
    assert (status, door.get("/is_paused")["is_paused"]) == (400, True)
    door.post("/continue_generation")
    assert len(streams.run().tokens["r"]) == 40


def test_decoding_goes_on_while_a_version_that_is_paused_for_is_staged(
    door: Door, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    def noting(name: str) -> None:
        usual = getattr(Control, name)

        async def noted(self: Control, *args: Any, **named: Any) -> Any:
            seen.append((name, call(door.core, "paused")["is_paused"]))
            reply = await usual(self, *args, **named)
            seen.append((name, call(door.core, "paused")["is_paused"]))
            return reply

        monkeypatch.setattr(Control, name, noted)

    for name in ("update", "finish"):
        noting(name)
    path = str(folders["new"])
    door.post("/update_weights_from_disk", model_path=path, keep_pause=True)
    assert seen == [
        *[("update", False)] * 2,
        *[("finish", True)] * 2,
    ]
    door.post("/continue_generation")


@pytest.mark.parametrize("is_received", [False, True])
def test_the_pause_of_a_failed_keep_pause_update_is_ended(
    door: Door, folders: dict[str, Path], is_received: bool
) -> None:
    path = str(folders["new"]) if is_received else "/nowhere"
    body = {"keep_pause": True, "expect_digest": "0" * 32}
    door.refused("/update_weights_from_disk", model_path=path, **body)
    assert door.get("/is_paused")["is_paused"] is False


@pytest.mark.parametrize(
    "others",
    [{"mode": "in_place", "owner": "another"}, {"mode": "abort"}],
    ids=["renewed", "stricter"],
)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_pause_that_another_has_made_outlives_an_update_that_fails(
    door: Door,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    others: dict[str, str],
    is_before: bool,
) -> None:
    async def failing(*_: Any, **__: Any) -> Any:
        if not is_before:
            call(door.core, "pause", **others)
        raise Malformed("the test says so")

    if is_before:
        call(door.core, "pause", **others)
    monkeypatch.setattr(Control, "finish", failing)
    path = str(folders["new"])
    door.refused("/update_weights_from_disk", model_path=path, keep_pause=True)
    state = door.get("/is_paused")
    assert (state["is_paused"], state["mode"]) == (True, others["mode"])
    assert state["owner"] == others.get("owner")
    door.post("/continue_generation")
