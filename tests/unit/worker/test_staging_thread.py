"""A staging thread that dies has told so before: nobody waits for it in vain."""

import math
import queue
import random
import string
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton import knobs

from tests.support.waiting import until
from vllm.inflight import messages
from vllm.inflight.engine.update.ranks import verdict
from vllm.inflight.errors import DeltaUnsupported, EngineFault
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.worker import replay_plan
from vllm.inflight.worker.delta import device_writer
from vllm.inflight.worker.shadow import swap
from vllm.inflight.worker.shadow.log_entries import LogEntries
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.thread import StagingThread
from vllm.inflight.worker.staging.worker import Held, StagingWorker, Versions
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.verify import drift
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint
from vllm.inflight.yielding import with_breaks

RANK, NUM_RANKS = 1, 2


class Transport(StagedEngine):
    """One of ours, that does what it is told by the test."""

    fault: BaseException | None = None
    measured: object = None

    def __init__(self) -> None:
        pass

    def init_transfer_engine(self, init_info: Any) -> None:
        raise AssertionError("it is not connected here")

    def receive_weights(self, update_info: Any) -> None:
        raise AssertionError("it receives nothing here")

    def shutdown(self) -> None:
        if self.measured is not None:
            vars(threading.current_thread())["_transport"] = self  # as in an update
        if self.fault is not None:
            raise self.fault

    @property
    def gauges(self) -> dict[str, Any]:
        if isinstance(self.measured, Exception):
            raise self.measured
        return {"window": self.measured}


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    made = StatusBoard.create(NUM_RANKS)
    yield made
    made.close()
    with suppress(FileNotFoundError):
        made.unlink()


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def stager(board: StatusBoard, transport: Transport) -> Iterator[StagingWorker]:
    """The second rank of two, by a launcher that has started five before it."""
    parallel = SimpleNamespace(
        rank=6 + RANK,
        world_size=NUM_RANKS,
        tensor_parallel_size=NUM_RANKS,
        data_parallel_index=0,
    )
    worker = SimpleNamespace(
        device=torch.device("cpu"),
        vllm_config=SimpleNamespace(additional_config={}, parallel_config=parallel),
        weight_transfer_engine=transport,
    )
    shadow: Any = ShadowModel.__new__(ShadowModel)
    vars(shadow).update(
        device=worker.device, live=None, module=None, reason=None, num_threads=1
    )
    shadow.arenas, shadow.log = (), None
    shadow.plan = replay_plan.Plan(is_replayed=False)
    shadow.start_checkpoint = StartCheckpoint({"norm.weight": (4,)})
    made = StagingWorker(worker, shadow)
    made.attach(board.path, NUM_RANKS)
    made.staging_stream = nullcontext  # type: ignore[method-assign]
    yield made
    made.close()


def told(board: StatusBoard, serial: int = 1) -> Any:
    """What the rank posts in the end of an update."""
    until(
        lambda: board.read(RANK).get("state") in ("failed", "staged"),
        "the rank says nothing",
    )
    status = messages.Status.from_dict(board.read(RANK))
    assert status.serial == serial
    return verdict([status], serial)


def test_kernels_of_copies_are_loaded_before_anything_is_decoded(
    stager: StagingWorker, monkeypatch: pytest.MonkeyPatch
):
    """Into what is served, from that and from what the start checkpoint holds."""
    seen: list[Any] = []
    runtime = knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", pytest.fail)  # vLLM's

    def warm(*args: object) -> None:
        assert runtime.jit_post_compile_hook is None
        seen.append(args)

    monkeypatch.setattr(replay_plan, "warm", warm)
    monkeypatch.setattr(device_writer, "warm", lambda *args, **options: None)
    monkeypatch.setattr(drift, "warm", lambda *args: None)
    gpu = torch.device("cuda")
    monkeypatch.setattr(stager.worker, "device", gpu)
    stager.shadow.module = torch.nn.Linear(2, 2, device="meta")
    of_file = StartCheckpoint({"norm.weight": (4,)}, {"norm.weight": "bfloat16"})
    monkeypatch.setattr(stager.shadow, "start_checkpoint", of_file)
    stager._warm()
    served = {torch.float32}
    assert seen == [(gpu, served | {torch.bfloat16}, served)]
    assert runtime.jit_post_compile_hook is pytest.fail


@pytest.mark.parametrize("fault", [SystemExit(3), KeyboardInterrupt(), OSError("no")])
def test_any_exception_of_a_transport_fails_the_update(
    stager: StagingWorker,
    board: StatusBoard,
    transport: Transport,
    fault: BaseException,
) -> None:
    transport.fault = fault
    stager.command(1, messages.Shutdown())
    error = told(board)
    assert isinstance(error, EngineFault)
    assert type(fault).__name__ in error.message


def test_memory_is_unmapped_once_an_aborted_update_has_ended(
    stager: StagingWorker,
    board: StatusBoard,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, unmapped = threading.Event(), threading.Event(), threading.Event()

    def shutdown() -> None:
        begun.set()
        may_end.wait(60)

    monkeypatch.setattr(transport, "shutdown", shutdown)
    monkeypatch.setattr(transport, "unmap", unmapped.set)
    stager.command(1, messages.Shutdown())
    begun.wait(60)
    stager.unmap()
    assert not unmapped.is_set()  # it is under way
    board.cancel(1)
    threading.Timer(0.2, may_end.set).start()
    stager.unmap()
    assert may_end.is_set() and unmapped.is_set()


def test_long_loops_of_a_job_have_breaks(
    stager: StagingWorker, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks: list[StagingThread] = []
    monkeypatch.setattr(StagingThread, "_take_break", lambda job: breaks.append(job))
    monkeypatch.setattr(transport, "shutdown", lambda: list(with_breaks(range(10**6))))
    stager.command(1, messages.Shutdown())
    until(lambda: len(breaks) > 10, "it takes no breaks")
    until(lambda: not stager.is_busy, "it never ends")


def test_the_first_received_bytes_are_reported_at_once(
    stager: StagingWorker, board: StatusBoard
) -> None:
    job = StagingThread(stager, board, 1, predecessor=None)
    job._post()
    job._posted = math.inf  # whatever was told a moment ago
    job._progress(5, 1)
    assert board.read(RANK)["bytes"] == 5


def test_a_job_works_beside_decoding_until_its_order_is_carried_out(
    stager: StagingWorker, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, seen = sys.getswitchinterval(), list[float]()
    monkeypatch.setattr(
        transport, "shutdown", lambda: seen.append(sys.getswitchinterval())
    )
    stager.command(1, messages.Shutdown())
    until(lambda: bool(seen), "it did nothing")
    assert seen[0] < usual
    until(lambda: sys.getswitchinterval() == usual, "it never ends")


def test_a_job_that_expects_a_command_gets_the_interpreter_soon(
    stager: StagingWorker, board: StatusBoard
) -> None:
    usual, seen = sys.getswitchinterval(), list[float]()

    class Commands:
        """None comes, until the update is aborted."""

        def get(self, timeout: float) -> messages.Command:
            seen.append(sys.getswitchinterval())
            if len(seen) == 3:
                board.cancel(1)
            raise queue.Empty

    job = StagingThread(stager, board, 1, predecessor=None)
    job._commands = Commands()  # type: ignore[assignment]
    job.run()
    assert seen[0] < usual == seen[1] == seen[2] == sys.getswitchinterval()


def of_no_use() -> object:
    return object()


def too_long() -> str:
    letters = random.Random(0)
    return "".join(letters.choices(string.printable, k=1 << 20))


@pytest.mark.parametrize(
    "measured", [RuntimeError("no gauge"), of_no_use(), too_long()]
)
def test_a_notice_that_cannot_be_posted_still_says_that_the_update_failed(
    stager: StagingWorker, board: StatusBoard, transport: Transport, measured: object
) -> None:
    transport.measured = measured
    transport.fault = OSError("the wire is gone")
    stager.command(1, messages.Shutdown())
    error = told(board)
    assert isinstance(error, EngineFault)
    assert "the wire is gone" in error.message


@pytest.mark.parametrize("shares", [None, [0] * 5], ids=["whole", "delta"])
def test_a_rank_with_more_names_of_others_than_it_can_tell_stages_whole_versions_alone(
    board: StatusBoard,
    stager: StagingWorker,
    monkeypatch: pytest.MonkeyPatch,
    shares: list[int] | None,
) -> None:
    """Experts of seven other ranks, and no start checkpoint that knows of them.

    A tensor of a delta that no rank serves as a copy would stay as it was.
    """
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight_{kind}"
        for layer in range(60)
        for expert in range(48, 384)
        for part in ("gate", "up", "down")
        for kind in ("packed", "scale", "shape")
    ]

    def prepared(self: StagingThread, _: object) -> None:
        staged = replace(self._status, unfilled=names, shares=shares, state="staged")
        self._status = staged

    monkeypatch.setattr(StagingThread, "_prepare", prepared)
    stager.command(1, messages.Prepare())
    if shares is None:
        assert not isinstance(told(board), Exception)
        status = board.read(RANK)
        assert (status["state"], status.get("unfilled")) == ("staged", None)
    else:
        error = told(board)
        assert isinstance(error, DeltaUnsupported)
        assert f"changes {len(names)} tensors" in error.message


def test_a_staging_job_that_cannot_be_created_is_reported(
    stager: StagingWorker, board: StatusBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager.worker.vllm_config, "additional_config", None)
    stager.command(1, messages.Start(None, "configured", False, 60.0))
    assert isinstance(told(board), EngineFault)
    assert not stager.is_busy


def test_a_rank_posts_to_the_entry_that_its_engine_reads_under_any_launcher(
    stager: StagingWorker, board: StatusBoard
) -> None:
    assert stager.rank == RANK
    stager.command(1, messages.Shutdown())
    until(lambda: board.read(RANK).get("orders") == 1, "the rank says nothing")
    assert board.read(0) == {}


def test_a_rank_that_its_engine_has_no_place_for_is_rejected_when_it_attaches(
    stager: StagingWorker, board: StatusBoard
) -> None:
    with pytest.raises(ValueError, match="it has 1 ranks, and this is number 1"):
        stager.attach(board.path, 1)


def test_copies_are_enqueued_while_others_run_and_all_are_done_before_a_move_counts(
    stager: StagingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ends: list[object] = []

    class End:
        """The end of what a GPU does."""

        def __init__(self, *, blocking: bool) -> None:
            assert blocking  # or the wait would take a core

        def record(self, stream: object) -> None:
            assert stream is stager._stream
            open_ends.append(self)

        def synchronize(self) -> None:
            del open_ends[: open_ends.index(self) + 1]

    monkeypatch.setattr(torch.cuda, "Event", End)
    stager._stream = object()  # type: ignore[assignment]
    counts = []
    for _ in range(4):
        stager.keep_up()
        counts.append(len(open_ends))
    assert counts == [1, 2, 2, 2]
    flip = SimpleNamespace(of=lambda entries: len(open_ends))
    monkeypatch.setattr(swap, "Swap", SimpleNamespace)
    stager.versions = Versions(before=Held(flip=cast(Any, flip)))
    stager.move_way_back(lambda: False, LogEntries())
    assert stager.versions.before == Held(flip=cast(Any, 0))
    stager.keep_up()
    assert len(open_ends) == 1  # nothing that is done is waited for
