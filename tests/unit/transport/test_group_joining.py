"""Joining a group: a worker that does not fit gets an error, and no wait is endless."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.ports import free_port
from tests.support.transports.peers import (
    BUCKET_BYTES,
    CPU,
    HOST,
    PATIENT,
    engine,
    host,
    init_info,
    open_sender,
    open_things,
    process,
)
from tests.support.waiting import until
from vllm.inflight.errors import Cancelled, Malformed, TransferFault
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.nccl import NcclGroup
from vllm.inflight.transport.collective.rendezvous import WANTED, Rendezvous
from vllm.inflight.transport.group import Terms
from vllm.inflight.transport.liveness import Liveness
from vllm.inflight.transport.torch_groups import rendezvous as plain
from vllm.inflight.transport.torch_groups.rendezvous import TorchRendezvous, _PlainNccl
from vllm.inflight.transport.waiting import WaitLimit, in_background

pytestmark = pytest.mark.seconds

SOON_S = 30.0


@pytest.fixture
def worker():
    worker = engine()
    yield worker
    worker.shutdown()


def join(worker, port, **changes):
    info = worker.parse_init_info(init_info(port, **changes))
    worker.init_transfer_engine(info)


def test_a_worker_outside_the_world_is_rejected(worker):
    outside = engine(rank=1, replica=1, size=2)
    with pytest.raises(Malformed, match="rank 4 of the group, whose world_size is 4"):
        join(outside, 1, world_size=4)


def test_a_group_on_other_terms_is_rejected(worker):
    meeting = host()
    with pytest.raises(Malformed, match=r"'bucket_bytes': 4096.*: 8192"):
        join(worker, meeting.port, bucket_bytes=8192)
    meeting.end("is over")


def test_the_wrong_kind_of_device_is_rejected(worker):
    worker.device = torch.device("meta")
    with pytest.raises(Malformed, match="inflight_gloo receives on cpu"):
        join(worker, 1)


def test_waiting_for_a_missing_trainer_ends_at_the_timeout(worker):
    began = time.monotonic()
    with pytest.raises(TransferFault, match="waited 1 s for a trainer at"):
        join(worker, free_port(), timeout_s=1.0)
    assert time.monotonic() - began < SOON_S


def test_joining_at_a_port_of_another_program_ends_at_the_timeout(worker):
    with socket.create_server((HOST, 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TransferFault):
            join(worker, silent.getsockname()[1], timeout_s=1.0)
        assert time.monotonic() - began < SOON_S


def test_joining_can_be_cancelled(worker):
    cancelled = threading.Event()
    worker.cancelled = cancelled.is_set
    meeting = host(world_size=2)
    joining = in_background(lambda: join(worker, meeting.port, timeout_s=60.0))
    time.sleep(0.3)
    asked = time.monotonic()
    cancelled.set()
    with pytest.raises(Cancelled):
        joining.result(timeout=60)
    assert time.monotonic() - asked < SOON_S
    meeting.end("is over")


def stopping(pipe: Any) -> None:
    """Host a store on which no terms are left; stop for good when told so."""
    store = torch.distributed.TCPStore(
        HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    pipe.send(store.port)
    pipe.recv()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_suspended_trainer_holds_a_worker_only_until_the_timeout_or_a_cancellation(
    worker, is_cancelled
):
    cancelled = threading.Event()
    worker.cancelled = cancelled.is_set
    timeout_s = 60.0 if is_cancelled else 3.0
    with process(stopping) as trainer:
        port = trainer.pipe.recv()
        joining = in_background(lambda: join(worker, port, timeout_s=timeout_s))
        time.sleep(1.0)  # for the worker to be at the terms
        trainer.pipe.send("stop")
        time.sleep(0.5)
        if is_cancelled:
            cancelled.set()
        with pytest.raises(Cancelled if is_cancelled else TransferFault):
            joining.result(timeout=SOON_S)


def test_waiting_for_missing_workers_ends_at_the_timeout():
    began = time.monotonic()
    with pytest.raises(TransferFault, match="waited 1 s for 1 workers to join"):
        open_sender(host(), WaitLimit(1.0))
    assert time.monotonic() - began < SOON_S


def test_two_workers_cannot_have_one_rank():
    meeting = host(world_size=3)
    opening = in_background(lambda: open_sender(meeting))
    terms = Terms(wire="gloo", world_size=3, bucket_bytes=BUCKET_BYTES)

    def join_as(rank):
        joined = Rendezvous.join(terms, HOST, meeting.port, rank, PATIENT)
        return Receiver(open_group(joined, CPU, PATIENT), 3, PATIENT)

    both = [in_background(lambda: join_as(1)) for _ in range(2)]
    while not any(one.done() for one in both):
        time.sleep(0.01)
    refused = next(one for one in both if one.done())
    with pytest.raises(TransferFault, match="the trainer has no place for rank 1 of 3"):
        refused.result()
    # Whom it has a place for does not suffer.
    (first,) = (one for one in both if one is not refused)
    ends = [in_background(lambda: join_as(2)), first, opening]
    for end in [end.result(timeout=60) for end in ends]:
        end.group.close()


def test_all_ranks_take_the_smallest_bucket_that_a_worker_asks_for():
    meeting = host(world_size=3, bucket_bytes=4096)
    opening = in_background(lambda: open_sender(meeting))

    def join_with(rank, most):
        joined = Rendezvous.join(
            meeting.terms, HOST, meeting.port, rank, PATIENT, most_bucket_bytes=most
        )
        return Receiver(open_group(joined, CPU, PATIENT), 3, PATIENT)

    asked = enumerate((512, None), start=1)
    ends = [in_background(lambda pair=pair: join_with(*pair)) for pair in asked]
    for end in [end.result(timeout=60) for end in (opening, *ends)]:
        assert end.group.terms.bucket_bytes == end._slots.num_bytes == 512
        end.group.close()


@pytest.mark.parametrize("size", ["-256", "many"])
def test_a_worker_that_asks_for_no_size_of_a_bucket_is_rejected(size):
    meeting = host()
    joined = Rendezvous.join(meeting.terms, HOST, meeting.port, 1, PATIENT)
    joined.store.set(WANTED.format(rank=1), size)
    joining = in_background(lambda: open_group(joined, CPU, PATIENT))
    with pytest.raises(Malformed, match="left no size of a bucket"):
        open_sender(meeting)
    with pytest.raises((Malformed, TransferFault), match="no size of a bucket"):
        joining.result(timeout=60)


def test_a_worker_takes_no_larger_bucket_than_it_asked_for():
    meeting = host(bucket_bytes=4096)
    joined = Rendezvous.join(
        meeting.terms, HOST, meeting.port, 1, PATIENT, most_bucket_bytes=256
    )
    joined.store.set(WANTED.format(rank=1), "512")
    gathering = in_background(lambda: meeting.gather(PATIENT))
    with pytest.raises(Malformed, match="512 is more than 256"):
        open_group(joined, CPU, PATIENT)
    gathering.result(timeout=60)
    meeting.end("over")


def test_an_unknown_wire_is_rejected():
    meeting = Rendezvous.host(
        Terms(wire="pigeon", world_size=2, bucket_bytes=256), HOST
    )
    terms = meeting.terms
    joined = Rendezvous.join(terms, HOST, meeting.port, 1, PATIENT)
    joining = in_background(lambda: open_group(joined, CPU, PATIENT))
    with pytest.raises(Malformed, match="there is no wire 'pigeon'"):
        open_group(meeting, CPU, PATIENT)
    with pytest.raises((Malformed, TransferFault)):
        joining.result(timeout=60)


def storing(pipe: Any) -> None:
    """Host a store, as torch's trainer does, and no more."""
    store = torch.distributed.TCPStore(
        HOST, 0, 2, True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    pipe.send(store.port)
    pipe.recv()


class WithoutGpu:
    """A worker's group over NCCL, up to the trainer's NCCL id."""

    _connect: Any

    def __init__(self, meeting: Any, _: Any, watch: WaitLimit, **__: Any) -> None:
        self._rendezvous = meeting
        self.terms = meeting.terms
        self._connect(watch, None)


class OursWithoutGpu(WithoutGpu, NcclGroup):
    """Opened by our trainer."""


class TorchsWithoutGpu(WithoutGpu, _PlainNccl):
    """Opened by a trainer with torch alone, at its first broadcast."""


@pytest.mark.parametrize("wire", ["gloo", "nccl"])
def test_a_trainer_that_dies_before_its_group_of_torchs_is_open_fails_the_transfer(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "_PlainNccl", TorchsWithoutGpu)
    with process(storing) as trainer:
        address = f"tcp://{HOST}:{trainer.pipe.recv()}"
        meeting = TorchRendezvous.join(wire, address, 1, 2, "trainers", PATIENT)
        trainer.kill()
        trainer.join()
        with pytest.raises(TransferFault, match="the trainer was lost"):
            plain.join_torch_group(meeting, CPU, PATIENT)


@pytest.mark.parametrize("wire", ["gloo", "nccl"])
def test_a_trainer_that_gives_up_while_the_transport_connects_is_heard(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its connections close a moment later. That is what the transport notices.
    monkeypatch.setattr(
        "vllm.inflight.transport.collective.connect.NcclGroup", OursWithoutGpu
    )
    meeting = Rendezvous.host(Terms(wire=wire, world_size=2, bucket_bytes=256), HOST)
    joined = Rendezvous.join(meeting.terms, HOST, meeting.port, 1, PATIENT)
    joining = in_background(lambda: open_group(joined, CPU, PATIENT))
    meeting.gather(PATIENT)
    meeting.end("has no memory for a bucket")
    with pytest.raises(TransferFault, match="the trainer has no memory for a bucket"):
        joining.result(SOON_S)


def test_an_nccl_error_is_reported_with_the_reason_that_the_peer_gave() -> None:
    class Library:
        def state(self, comm: Any) -> bool:
            raise TransferFault("NCCL: remote process exited")

    group = OursWithoutGpu.__new__(OursWithoutGpu)
    group._nccl, group._comm, group._lock = Library(), object(), threading.Lock()
    group._rendezvous = SimpleNamespace(liveness=Liveness())
    with pytest.raises(TransferFault, match="remote process exited"):
        group._is_idle()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    group._rendezvous.liveness._connections[0] = ours
    with theirs:
        theirs.send(b"has no memory")
    for _ in range(2):  # it stays the reason
        with pytest.raises(TransferFault, match="the trainer has no memory"):
            group._is_idle()
    group._rendezvous.liveness.end("is over")


def test_a_trainer_with_an_invalid_bucket_count_fails_its_workers_at_once(worker):
    meeting = host()
    opening = in_background(
        lambda: Sender(open_group(meeting, CPU, PATIENT), 0, PATIENT)
    )
    began = time.monotonic()
    with pytest.raises(TransferFault, match="num_buckets must be at least 1"):
        join(worker, meeting.port)
    assert time.monotonic() - began < SOON_S
    with pytest.raises(ValueError, match="num_buckets must be at least 1"):
        opening.result(SOON_S)


def test_a_trainer_that_cannot_say_where_to_meet_leaves_nothing_open(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no socket")

    host().end("the first store of a process opens a pipe for good")
    before = open_things()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", fail)
        with pytest.raises(OSError, match="no socket"):
            host()
    until(lambda: open_things() <= before)
