"""Ranks: a flip that fails on one of them, and what they wait for."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight.engine.executors import Kind
from vllm.inflight.engine.update.ranks import Ranks, agree, verdict
from vllm.inflight.errors import (
    CAUSES,
    ArenaTorn,
    Cause,
    ChangeLogFull,
    ConfigError,
    EngineFault,
    InflightError,
    OutOfDeviceMemory,
    StagingUnavailable,
    WeightsMismatch,
)
from vllm.inflight.messages import Init, Prepare, Status
from vllm.inflight.patch import worker
from vllm.inflight.patch.sleep import inflight_prepare_sleep
from vllm.inflight.patch.worker_rpc import inflight_attach, inflight_flip
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.verify.checks import rejection
from vllm.inflight.worker.worker_state import WorkerState

ATTACHED = {"ok": {"reason": None, "bytes": 1, "is_reversible": True}}
GOOD, BAD = {"ok": 0.001}, {"error": "RuntimeError: no"}
LOST = {"code": "arena_torn", "message": "lost", "remedy": ArenaTorn.remedy}
TORN = {"error": "lost", "torn": True, "described": LOST}


class Executor:
    """Two ranks whose answers to flips are given."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.flips = []

    def collective_rpc(self, method, args=(), **_):
        if method == "inflight_attach":
            return [ATTACHED, ATTACHED]
        if method == "inflight_overwrite":
            return [{"ok": None}, {"ok": None}]
        self.flips.append(args)
        return self.answers.pop(0)


def flip(*answers):
    executor = Executor(*answers)
    ranks = Ranks(executor, 2)
    try:
        return ranks.flip(), executor.flips
    finally:
        ranks.close()


def test_a_flip_of_all_ranks_is_one_call():
    assert flip([GOOD, GOOD]) == (0.001, [(None, "next")])


def test_the_ranks_that_flipped_flip_back():
    executor = Executor([GOOD, BAD], [GOOD, GOOD])
    ranks = Ranks(executor, 2)
    with pytest.raises(EngineFault, match="failed on rank 1: RuntimeError: no"):
        ranks.flip("before")
    ranks.close()
    assert executor.flips == [(None, "before"), ([0], "undo")]


def test_a_cancellation_by_a_rank_is_not_a_cancellation_by_the_engine():
    ranks = Ranks(Executor(), 2)
    ranks.cancel(2)
    ranks._board.cancel(3)
    assert [ranks.has_given_up(serial) for serial in (1, 2, 3)] == [True, True, False]
    ranks.close()


def test_a_failed_flip_that_ranks_cannot_undo_stops_the_engine():
    with pytest.raises(SystemExit, match="may mix two versions"):
        flip([GOOD, BAD], [BAD, GOOD])


def test_a_rank_that_lost_its_weights_stops_the_engine():
    with pytest.raises(SystemExit, match="lost"):
        flip([TORN, TORN])


def test_a_rank_that_does_not_answer_stops_the_engine():
    class Silent(Executor):
        def collective_rpc(self, method, args=(), timeout=None, **_):
            if method == "inflight_flip":
                assert timeout is not None, "it would wait for ever"
                raise TimeoutError("RPC call to inflight_flip timed out.")
            return super().collective_rpc(method, args)

    ranks = Ranks(Silent(), 2)
    with pytest.raises(SystemExit, match="timed out"):
        ranks.flip()
    ranks.close()


def test_giving_up_the_wait_for_a_rank_stops_the_engine():
    class Interrupted(Executor):
        def collective_rpc(self, method, args=(), **_):
            if method == "inflight_flip":
                raise KeyboardInterrupt
            return super().collective_rpc(method, args)

    ranks = Ranks(Interrupted(), 2)
    with pytest.raises(SystemExit, match="KeyboardInterrupt"):
        ranks.flip()
    ranks.close()


def test_an_engine_that_was_shut_down_begins_no_update():
    ranks = Ranks(Executor(), 2)
    ranks.require_staging()
    ranks.close()
    with pytest.raises(StagingUnavailable, match="has been shut down"):
        ranks.require_staging()


def test_a_rank_on_another_host_keeps_updates_out_and_not_the_engine(tmp_path):
    class Far(Executor):
        """Its second rank has another /dev/shm."""

        def collective_rpc(self, method, args=(), **_):
            near, num_ranks = args
            far = str(tmp_path / Path(near).name)
            return [
                inflight_attach(worker, path, num_ranks)
                for worker, path in zip(workers, (near, far), strict=True)
            ]

    def attach(path, num_ranks):
        StatusBoard(path, num_ranks).close()
        return ATTACHED["ok"]

    stager = SimpleNamespace(attach=attach)
    workers = [
        SimpleNamespace(vllm_inflight=WorkerState(stager=stager)) for _ in range(2)
    ]
    ranks = Ranks(Far(), 2)
    for call in (ranks.require_staging, lambda: ranks.command(1, Init({}))):
        with pytest.raises(StagingUnavailable, match=r"rank 1 .*on one host"):
            call()
    assert ranks.statuses() == [Status(), Status()]
    ranks.close()


@pytest.mark.parametrize("kind", [Kind(), Kind(is_ordered=False)])
def test_commands_are_sent_although_their_replies_are_not_read(kind):
    class Reply:
        """Upstream's under Ray is never done, and reads no list."""

        def done(self):
            return kind.is_ordered

        def result(self):
            raise AttributeError("'list' object has no attribute 'logprobs'")

    class Deaf(Executor):
        def collective_rpc(self, method, args=(), non_block=False, **_):
            return Reply() if non_block else super().collective_rpc(method, args)

    ranks = Ranks(Deaf(), 2, kind)
    for serial in range(20):
        ranks.command(serial, Prepare())
    ranks.close()


@pytest.mark.parametrize("has", ["has_drafter", "has_mtp"])
@pytest.mark.parametrize(
    ("is_ordered", "num_ranks", "is_refused"),
    [(True, 2, False), (False, 1, False), (False, 2, True)],
)
def test_a_drafter_that_reads_weights_out_of_order_blocks_updates(
    has, is_ordered, num_ranks, is_refused
):
    class Drafting(Executor):
        def collective_rpc(self, method, args=(), **_):
            return [{"ok": ATTACHED["ok"] | {has: True}}] * num_ranks

    ranks = Ranks(Drafting(), num_ranks, Kind(is_ordered=is_ordered))
    assert (ranks.reason is not None) is is_refused
    assert not is_refused or "drafters read weights" in ranks.reason
    ranks.close()


def test_a_worker_distinguishes_lost_weights_from_a_flip_that_changed_nothing():
    class Stager:
        error: Exception = ArenaTorn("lost")

        def flip(self, to):
            raise self.error

    stager = Stager()
    worker = SimpleNamespace(vllm_inflight=WorkerState(stager=stager))
    assert inflight_flip(worker) == TORN
    stager.error = RuntimeError("no")
    assert inflight_flip(worker) == BAD


def stream(waited: list[str], name: str) -> Any:
    return SimpleNamespace(synchronize=lambda: waited.append(name))


@pytest.mark.parametrize("has_stepped", [True, False])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_synchronization_during_staging_waits_only_for_the_step_stream(
    monkeypatch, is_busy, has_stepped
):
    """A broadcast stands on the device for as long as its trainer is silent."""
    waited: list[str] = []
    current = stream(waited, "this thread's")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    synchronize = worker._wait_for_decoding_only(lambda self: waited.append("device"))
    steps = SimpleNamespace(stream=stream(waited, "steps") if has_stepped else None)
    stager = SimpleNamespace(is_busy=is_busy, steps=steps)
    synchronize(
        SimpleNamespace(
            vllm_inflight=WorkerState(stager=stager), device=torch.device("cuda", 0)
        )
    )
    busy = "steps" if has_stepped else "this thread's"
    assert waited == [busy if is_busy else "device"]


@pytest.mark.parametrize(("asked_gib", "is_refused"), [(None, 0), (3, 0), (5, 1)])
def test_a_cache_of_a_given_size_must_fit_beside_two_sets(
    monkeypatch, asked_gib, is_refused
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 8 << 30))
    asked = asked_gib and asked_gib << 30
    rank = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=asked),
        vllm_config=SimpleNamespace(additional_config={}),
        device=torch.device("cuda", 0),
    )
    determine = worker._with_room_for_the_cache(lambda self: asked or 17)
    if is_refused:
        with pytest.raises(ConfigError, match=r"5\.00 GiB.*4\.00 GiB are free"):
            determine(rank)
    else:
        assert determine(rank) == asked or 17


# ------------------------------------------------------- what several ranks refuse
def failed(error: InflightError, **more: Any) -> Status:
    """The status of a rank on which an update has failed."""
    named = error.named if isinstance(error, WeightsMismatch) else None
    return Status(1, "failed", error=error.to_dict(), named=named, **more)


def missing(*names: str) -> WeightsMismatch:
    return rejection({}, {}, [], names, {}, num_asked=8)


def test_one_rejection_names_the_tensors_that_each_rank_rejected():
    first, second = missing("a", "b"), missing("b", "c")
    error = verdict([failed(first), failed(second)], 1)
    assert isinstance(error, WeightsMismatch)
    assert (error.tensors, error.causes) == (["a", "b", "c"], {"missing": 3})
    assert "3 tensors" in str(error)
    assert "missing: a, b" in str(error) and "missing: b, c" in str(error)
    assert error.remedy == CAUSES[Cause.MISSING][1]


def test_the_error_of_some_ranks_says_of_which():
    """The others may have met nothing, or be at work still."""
    for other in (Status(1, "staged"), Status(1, "staging"), Status(0)):
        error = verdict([other, failed(missing("a"))], 1)
        assert str(error) == f"{missing('a')} (told by rank 1 of 2)"


def test_tensors_that_all_ranks_reject_are_named_once_and_counted():
    names = [f"layers.{n}.weight" for n in range(1000)]
    error = verdict([failed(missing(*names))] * 2, 1)
    assert isinstance(error, WeightsMismatch)
    assert str(error) == str(missing(*names))
    assert (len(error.tensors), error.num_tensors) == (64, 1000)
    halves = [failed(missing(*names[:500])), failed(missing(*names[400:]))]
    error = verdict(halves, 1)
    assert isinstance(error, WeightsMismatch)
    assert error.num_tensors == error.causes["missing"] == 1000


def test_a_tensor_that_no_rank_uses_is_reported_with_the_missing_tensors():
    statuses = [
        failed(missing("a"), unfilled=["fused", "of rank 1"]),
        failed(missing("b"), unfilled=["fused", "of rank 0"]),
    ]
    error = verdict(statuses, 1)
    assert isinstance(error, WeightsMismatch)
    assert error.causes == {"missing": 2, "unused": 1}
    assert "no parameter is filled by fused" in str(error)


def test_of_several_full_logs_the_one_that_lacks_most_is_told():
    lacks = [ChangeLogFull(f"it lacks {n}", missing_bytes=n) for n in (10, 30, 20)]
    error = verdict([failed(each) for each in lacks], 1)
    assert isinstance(error, ChangeLogFull)
    assert (error.missing_bytes, error.message) == (30, "it lacks 30")


def test_a_fault_of_one_rank_outweighs_rejections_by_other_ranks():
    error = verdict([failed(missing("a")), failed(EngineFault("it broke"))], 1)
    assert isinstance(error, EngineFault)
    # And one of which not all names fitted the board is told as it came.
    status = replace(failed(missing("a")), named=None)
    error = verdict([status, failed(missing("b"))], 1)
    assert isinstance(error, WeightsMismatch)
    assert str(error) == str(missing("a"))


def test_ranks_that_received_different_weights_are_reported_with_their_digests():
    statuses = [
        Status(1, sent=digest, digest=digest, unfilled=[]) for digest in ("1a", "2b")
    ]
    error = agree(statuses)
    assert isinstance(error, WeightsMismatch)
    assert "rank 0: 1a" in str(error) and "rank 1: 2b" in str(error)
    assert error.remedy == CAUSES[Cause.RANKS][1]


def test_an_error_of_ours_keeps_its_code_over_an_rpc():
    class Sleepy(Executor):
        def collective_rpc(self, method, args=(), **_):
            if method == "inflight_prepare_sleep":
                return [GOOD, inflight_prepare_sleep(worker, 1)]
            return super().collective_rpc(method, args)

    def let_go():
        raise OutOfDeviceMemory("3 bytes are missing", missing_bytes=3)

    stager = SimpleNamespace(let_go=let_go)
    worker = SimpleNamespace(vllm_inflight=WorkerState(stager=stager))
    ranks = Ranks(Sleepy(), 2)
    with pytest.raises(OutOfDeviceMemory, match="missing") as refused:
        ranks.prepare_sleep(1)
    assert refused.value.missing_bytes == 3
    ranks.close()
