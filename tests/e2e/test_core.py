"""EngineCore and Scheduler alone: no LLM, no AsyncLLM, no server in front.

Pause, retract and commit are theirs, so they work for whoever drives a core.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt, publish, stage
from tests.support.engines.reference import Reference
from tests.support.waiting import until
from vllm.inflight.transport.files.receiver_engine import LocalEngine
from vllm.inflight.worker.shadow.flip import Exchange
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.loader import UpdateLoader
from vllm.inflight.worker.staging.throttle import Throttle

pytestmark = pytest.mark.engine

JOB = "inflight-stage"
"""The threads that updates are staged in."""


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Reference:
    return Reference(folders, torch.float32)


def assert_replays(
    reference: Reference, streams: Streams, name: str, tokens: list[int]
) -> None:
    """Each token is the most likely one of the version that its step was stamped."""
    steps = reference.replay(tokens, streams.tokens[name], streams.stamps[name])
    for index, logprobs in enumerate(steps):
        best = logprobs[streams.stamps[name][index]].argmax().item()
        assert best == streams.tokens[name][index], f"token {index} of {name}"


def test_a_commit_between_two_steps_splits_a_running_stream(
    core: EngineCore, folders: dict[str, Path], reference: Reference
) -> None:
    add(core, "r", prompt(1))
    streams = Streams(core).step(10)
    publish(core, folders["new"], "new")
    streams.run()
    assert streams.stamps["r"] == ["old"] * 10 + ["new"] * 30
    assert_replays(reference, streams, "r", prompt(1))


def test_label_and_weights_agree_after_ctrl_c_twice_during_a_flip(
    core: EngineCore,
    folders: dict[str, Path],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flip = Exchange.__call__

    def flip_under_ctrl_c(self: Exchange) -> float:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        seconds = flip(self)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return seconds

    stage(core, folders["new"])
    turns, usual = core.vllm_inflight.step_queue, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "__call__", flip_under_ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                turns.run(lambda: core.inflight("commit", {"weight_version": "new"}))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert call(core, "info")["weight_version"] == "new"
    add(core, "r", prompt(1))
    streams = Streams(core).run()
    assert set(streams.stamps["r"]) == {"new"}
    assert_replays(reference, streams, "r", prompt(1))


def test_staging_without_a_commit_changes_no_token(
    core: EngineCore, folders: dict[str, Path], reference: Reference
) -> None:
    add(core, "r", prompt(2))
    streams = Streams(core).step(5)
    stage(core, folders["new"])
    streams.run()
    assert set(streams.stamps["r"]) == {"old"}
    assert_replays(reference, streams, "r", prompt(2))


def test_a_paused_core_decodes_nothing_and_goes_on_where_it_was(
    core: EngineCore, reference: Reference
) -> None:
    add(core, "r", prompt(3))
    streams = Streams(core).step(5)
    reply = call(core, "pause", mode="in_place")
    assert (reply["paused"], reply["mode"], reply["num_running"]) == (
        True,
        "in_place",
        1,
    )
    streams.step(3)
    assert len(streams.tokens["r"]) == 5
    add(core, "late", prompt(4))
    streams.step(3)
    assert "late" not in streams.tokens
    assert call(core, "resume")["paused"] is False
    assert call(core, "resume")["paused"] is False
    streams.run()
    assert_replays(reference, streams, "r", prompt(3))
    assert_replays(reference, streams, "late", prompt(4))


def test_retraction_keeps_order_and_tokens_and_prefills_under_the_new_weights(
    core: EngineCore, folders: dict[str, Path], reference: Reference
) -> None:
    names = ["a", "b", "c"]
    for seed, name in enumerate(names):
        add(core, name, prompt(seed + 5), max_tokens=20)
    add(core, "waiting", prompt(20), max_tokens=20)
    add(core, "last", prompt(21), max_tokens=20)
    streams = Streams(core).step(6)
    sampled = {name: list(streams.tokens[name]) for name in names}
    reply = publish(core, folders["new"], "new", mode="retract")
    assert reply["num_retracted"] == 4
    queue = [request.request_id for request in core.scheduler.waiting]
    assert queue == ["a", "b", "c", "waiting", "last"]
    streams.run()
    for name in names:
        assert streams.tokens[name][: len(sampled[name])] == sampled[name]
        assert len(streams.tokens[name]) == 20
        # After a retraction nothing of the old KV is left: the rest is what
        # the new weights alone say about prompt and tokens.
        kept = len(sampled[name])
        text = prompt(names.index(name) + 5) + sampled[name]
        rest = streams.tokens[name][kept:]
        steps = reference.replay(text, rest, ["new"] * len(rest))
        assert [s["new"].argmax().item() for s in steps] == rest


def test_a_pause_that_retracts_frees_the_kv(core: EngineCore) -> None:
    add(core, "r", prompt(9))
    Streams(core).step(5)
    reply = call(core, "pause", mode="retract", flush_cache=True)
    assert (reply["num_running"], reply["num_waiting"]) == (0, 1)
    assert core.scheduler.get_kv_cache_usage() == 0
    call(core, "resume")
    streams = Streams(core).run()
    assert len(streams.tokens["r"]) == 35


def test_an_aborting_commit_ends_what_runs_and_serves_on(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    add(core, "r", prompt(10))
    Streams(core).step(5)
    assert publish(core, folders["new"], "new", mode="abort")["num_aborted"] == 1
    assert not core.scheduler.has_unfinished_requests()
    add(core, "next", prompt(10))
    assert set(Streams(core).run().stamps["next"]) == {"new"}


def test_a_commit_under_a_pause_leaves_the_pause(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    add(core, "r", prompt(11))
    streams = Streams(core).step(5)
    call(core, "pause", mode="in_place")
    publish(core, folders["new"], "new")
    assert call(core, "paused")["is_paused"] is True
    streams.step(2)
    assert len(streams.tokens["r"]) == 5
    call(core, "resume")
    assert streams.run().stamps["r"][5:] == ["new"] * 35


def test_a_pause_may_become_stricter_but_not_looser(core: EngineCore) -> None:
    add(core, "r", prompt(12))
    Streams(core).step(3)
    call(core, "pause", mode="in_place")
    call(core, "pause", mode="retract")
    refused = core.inflight("pause", {"mode": "in_place"})
    assert refused["error"]["code"] == "pause_conflict"
    call(core, "pause", mode="abort")
    assert not core.scheduler.requests


def test_frozen_requests_cannot_lose_their_kv(core: EngineCore) -> None:
    add(core, "r", prompt(13))
    Streams(core).step(3)
    refused = core.inflight("pause", {"mode": "in_place", "flush_cache": True})
    assert "retract" in refused["error"]["message"]
    assert call(core, "paused")["is_paused"] is False


def test_an_update_begins_only_after_all_earlier_transfers_have_ended(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told, seen = threading.Event(), threading.Event(), []
    prepare, receive = ShadowModel.prepare, LocalEngine.receive_weights
    settled = Throttle.settled

    def settle_and_note(self: Throttle) -> Any:
        seen.append("settles")
        return settled(self)

    def prepare_and_note(self: ShadowModel) -> None:
        seen.append("begins")
        prepare(self)

    def receive_and_stand(self: LocalEngine, info: Any) -> None:
        begun.set()
        assert told.wait(30)
        seen.append("lets go")
        receive(self, info)

    monkeypatch.setattr(Throttle, "settled", settle_and_note)
    monkeypatch.setattr(ShadowModel, "prepare", prepare_and_note)
    monkeypatch.setattr(LocalEngine, "receive_weights", receive_and_stand)
    call(core, "start", transport="local")
    core.inflight("receive", {"update_info": {"path": str(folders["old"])}})
    assert begun.wait(30)
    monkeypatch.setattr(LocalEngine, "receive_weights", receive)
    call(core, "abort")
    # One more, which is given up while it waits for the first and ends before it.
    call(core, "start", transport="local")
    call(core, "abort")
    until(lambda: len([t for t in threading.enumerate() if t.name == JOB]) == 1)
    call(core, "start", transport="local")
    threading.Timer(0.3, told.set).start()
    until(lambda: len(seen) == 5)
    # Settling looks for cores that nobody is bound to, not even another transfer.
    assert seen == ["settles", "begins", "lets go", "settles", "begins"]
    call(core, "receive", update_info={"path": str(folders["new"])})
    call(core, "prepare")
    call(core, "commit", weight_version="new")
    add(core, "r", prompt(14))
    assert set(Streams(core).run().stamps["r"]) == {"new"}


def test_an_update_that_waits_for_a_thread_that_does_not_end_tells_where_that_stands(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in a call that nothing interrupts, as one of CUDA."""
    begun, goes_on = threading.Event(), threading.Event()
    receive = LocalEngine.receive_weights

    def stands_still(self: LocalEngine, info: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        receive(self, info)

    monkeypatch.setattr(LocalEngine, "receive_weights", stands_still)
    call(core, "start", transport="local")
    received = core.inflight("receive", {"update_info": {"path": str(folders["old"])}})
    assert begun.wait(30)
    call(core, "abort")
    assert "error" in received.result(timeout=30)
    told = call(core, "start", transport="local", deadline_s=600)

    def held_by(update_id: str) -> list[str]:
        ranks = call(core, "status", update_id=update_id)["ranks"]
        return [status["held_by"] for status in ranks if "held_by" in status]

    until(lambda: any("stands_still" in at for at in held_by(told["update_id"])))
    answer = core.inflight("prepare", {})
    core.vllm_inflight.updates.ledger.active.deadline = 0.0
    prepared = answer.result(timeout=30)["error"]
    assert prepared["code"] == "deadline_exceeded"
    assert "rank 0 waits for the thread of an aborted update" in prepared["message"]
    assert "stands_still" in prepared["message"]
    goes_on.set()
    monkeypatch.setattr(LocalEngine, "receive_weights", receive)
    told = call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folders["new"])})
    assert held_by(told["update_id"]) == []
    call(core, "prepare")
    call(core, "commit", weight_version="new")


def test_a_failure_too_large_for_the_status_board_is_reported_without_delay(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = UpdateLoader.verdict

    def verdict_of_a_stage(self: UpdateLoader) -> Any:
        content = verdict(self)
        self.written_digest = os.urandom(48 * 9216).hex()
        return content

    monkeypatch.setattr(UpdateLoader, "verdict", verdict_of_a_stage)
    call(core, "start", transport="local", deadline_s=600)
    call(core, "receive", update_info={"path": str(folders["new"])})
    sealing = core.inflight("prepare", {})
    refused = sealing.result(timeout=30)
    assert refused["error"]["code"] == "engine_fault"
    assert "does not fit the board" in refused["error"]["message"]
    monkeypatch.setattr(UpdateLoader, "verdict", verdict)
    publish(core, folders["new"], "new")
