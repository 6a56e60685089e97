"""Several engines behind one door: what is told of all of them together."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vllm.inflight.api.control.control import Control, merged
from vllm.inflight.calls import Call, MissBroadcast
from vllm.inflight.errors import UnknownUpdate, UpdateBusy

PAUSED = {
    "paused": True,
    "mode": "retract",
    "num_running": 0,
    "num_waiting": 5,
    "num_aborted": 0,
    "num_retracted": 3,
    "seconds": 0.5,
    "owner": None,
    "dropped": {"blocks": 4, "connector": None, "encoder_outputs": 1},
}
RECEIVED = {
    "update_id": "u",
    "phase": "staging",
    "bytes": 100,
    "parameters": {"total": 7, "begun": 6, "complete": 5},
}


class Two:
    """A door to two engines, which answer what they were given."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies = replies
        self.num_engines = len(replies)

    async def call(self, asked: Call) -> list[dict[str, Any]]:
        return [{"ok": reply} for reply in self.replies]


async def test_requests_of_all_engines_are_counted():
    second = PAUSED | {"num_waiting": 7, "num_retracted": 6, "seconds": 0.25}
    second["dropped"] = {"blocks": 2, "connector": None, "encoder_outputs": 0}
    reply = await Control(Two(PAUSED, second)).pause("retract")
    assert reply["engines"] == [PAUSED, second]
    assert (reply["num_waiting"], reply["num_retracted"]) == (12, 9)
    assert (reply["num_running"], reply["num_aborted"]) == (0, 0)
    assert reply["dropped"] == {"blocks": 6, "connector": None, "encoder_outputs": 1}
    # No counts: the first engine's.
    assert (reply["paused"], reply["seconds"], reply["owner"]) == (True, 0.5, None)


async def test_a_pause_of_all_engines_does_not_report_a_flush_that_one_engine_skipped():
    for replies in ((PAUSED, PAUSED | {"dropped": None}), (PAUSED, PAUSED)):
        reply = await Control(Two(*replies)).pause("retract")
        assert (reply["dropped"] is None) == (replies[1]["dropped"] is None)
        reply = await Control(Two(*reversed(replies))).pause("retract")
        assert (reply["dropped"] is None) == (replies[1]["dropped"] is None)


async def test_received_bytes_of_all_engines_are_added_up():
    reply = await Control(Two(RECEIVED, RECEIVED)).update({})
    assert reply["bytes"] == 200
    assert reply["parameters"] == {"total": 14, "begun": 12, "complete": 10}
    assert (reply["update_id"], reply["phase"]) == ("u", "staging")


async def test_a_field_that_one_engine_omits_is_taken_from_the_first_engine():
    over = {"update_id": "u", "phase": "aborted"}
    reply = await Control(Two(RECEIVED, over)).update({})
    assert reply["bytes"] == 100
    assert reply["engines"] == [RECEIVED, over]


async def test_the_reply_of_a_single_engine_is_returned_unchanged():
    assert await Control(Two(PAUSED)).pause("retract") == PAUSED


async def test_expired_leases_and_epochs_are_not_summed_over_engines():
    state = {"is_paused": False, "leases_expired": 1, "epoch": 4}
    reply = await Control(Two(state, state)).paused()
    assert (reply["leases_expired"], reply["epoch"]) == (1, 4)


async def test_a_rejected_announcement_is_reported_to_the_engines_with_its_age():
    class Heard(Two):
        async def call(self, asked: Call) -> list[dict[str, Any]]:
            heard.append(asked)
            return await super().call(asked)

    heard: list[Call] = []
    began = time.monotonic()
    with pytest.raises(UpdateBusy, match=r"is staging; unless all .* left group 'g'"):
        async with Control(Heard({})).announced("g") as announcement:
            time.sleep(0.01)
            raise UpdateBusy("update 'u' is staging")
    (missed,) = heard
    assert 0.01 <= missed.age_s <= time.monotonic() - began
    assert missed == MissBroadcast("g", announcement, missed.age_s)


async def test_an_error_names_its_engine_in_its_text():
    refusal = {"error": UnknownUpdate("there is none").to_dict()}
    with pytest.raises(UnknownUpdate, match=r"^engine 1 of 2: there is none$"):
        merged([{"ok": PAUSED}, refusal])
