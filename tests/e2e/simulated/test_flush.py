"""Dropping the caches: what was in them, and what is refused."""

from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, call, prompt, request
from tests.support.simulated.core import (
    assert_told_truly,
    publish_weights,
    stage_weights,
)
from tests.support.simulated.load import LABELS, answered, ask, code, started

pytestmark = pytest.mark.engine


class Tier:
    """A connector's cache that answers as it is told."""

    def __init__(self, answer: bool | None) -> None:
        self.answer, self.times = answer, 0

    def reset_cache(self) -> bool | None:
        self.times += 1
        return self.answer

    def has_pending_push_work(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["retract", "abort", "wait"])
def test_a_flush_reports_what_it_dropped(
    make: Callable[..., EngineCore], mode: str
) -> None:
    core = make()
    streams = started(core)
    paused = ask(core, "pause", mode=mode, flush_cache=True)
    streams.step(60)
    dropped = answered(paused)["ok"]["dropped"]
    assert dropped["blocks"] >= 6  # 40 tokens of prompt are two whole blocks
    assert (dropped["connector"], dropped["encoder_outputs"]) == (None, 0)
    assert call(core, "flush")["dropped"]["blocks"] == 0


def test_a_flush_is_rejected_while_requests_stay_in_place(core: EngineCore) -> None:
    streams = started(core)
    for method, body in (
        ("pause", {"mode": "in_place", "flush_cache": True}),
        ("flush", {}),
    ):
        refused = core.inflight(method, body)["error"]
        assert "3 requests" in refused["message"]
        assert "retract" in refused["message"]
    assert call(core, "paused")["is_paused"] is False
    streams.run()
    assert call(core, "flush")["dropped"]["blocks"] > 0


def test_a_commit_with_a_flush_retracts_requests_and_rejects_mode_in_place(
    make: Callable[..., EngineCore],
) -> None:
    core = make()
    streams = started(core)
    reply = publish_weights(core, 1, "one", flush_cache=True)
    assert reply["num_retracted"] == 3
    assert reply["dropped"]["blocks"] >= 6
    assert_told_truly(core, streams.run(), LABELS.get)
    stage_weights(core, 2)
    streams = started(core, count=1)
    refused = core.inflight("commit", {"mode": "in_place", "flush_cache": True})
    assert code(refused) == "pause_conflict"


def session(core: EngineCore) -> Streams:
    """A streaming session that waits for more input, and holds its KV."""
    made = request("session", prompt(5), max_tokens=3)
    made.resumable = True
    core.add_request(*core.preprocess_add_request(made))
    streams = Streams(core).step(12)
    assert core.scheduler.vllm_inflight.waiting.holding_kv()
    return streams


def test_only_a_pause_that_ends_the_session_holding_kv_can_flush_the_cache(
    core: EngineCore,
) -> None:
    streams = session(core)
    for mode in ("in_place", "abort"):
        flushed = ask(core, "pause", mode=mode, flush_cache=True)
        streams.step(3)
        if mode == "in_place":
            assert "streaming session" in answered(flushed)["error"]["message"]
            assert call(core, "paused")["is_paused"] is False
    assert answered(flushed)["ok"]["dropped"]["blocks"] > 0


def test_a_pause_drops_kv_that_a_step_in_flight_still_holds(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.scheduler, "defer_block_free", True)  # as with a connector
    streams = started(core)
    core.abort_requests(["r0"])
    assert core.scheduler.deferred_frees
    flushed = ask(core, "pause", mode="retract", flush_cache=True)
    streams.step(3)
    assert answered(flushed)["ok"]["dropped"]["blocks"] >= 6
    call(core, "resume")
    streams.run().step(3)


@pytest.mark.parametrize(("answer", "told"), [(True, True), (None, False)])
def test_a_flush_tells_whether_the_connector_has_dropped_its_cache(
    make: Callable[..., EngineCore], answer: bool | None, told: bool
) -> None:
    core = make()
    core.scheduler.connector = Tier(answer)
    assert call(core, "flush")["dropped"]["connector"] is told
    assert core.scheduler.connector.times == 1


def test_a_connector_that_cannot_drop_its_cache_is_named(
    make: Callable[..., EngineCore],
) -> None:
    core = make()
    core.scheduler.connector = Tier(False)
    assert "Tier" in core.inflight("flush", {})["error"]["message"]


def test_a_pause_reports_that_the_caches_could_not_be_dropped(
    make: Callable[..., EngineCore], core: EngineCore
) -> None:
    streams = session(core)
    paused = ask(core, "pause", mode="wait", flush_cache=True)
    streams.step(3)
    told = answered(paused)["ok"]
    assert (told["paused"], told["dropped"]) == (True, None)
    assert "blocks in use" in told["not_dropped"]
    bare = make()
    bare.scheduler.connector = Tier(False)
    told = call(bare, "pause", mode="retract", flush_cache=True)
    assert (told["paused"], told["dropped"]) == (True, None)
    assert "Tier" in told["not_dropped"]
