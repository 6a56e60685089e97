"""The wire on two GPUs: its speed, a killed trainer, an abort, a new group after it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.transports.peers import HOST, digests, process, tensors
from tests.support.transports.peers_on_gpu import GPU_BUCKET_BYTES, large, trainer
from vllm.inflight.errors import Cancelled, TransferFault
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Terms
from vllm.inflight.transport.waiting import WaitLimit, in_background

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for each end"
    ),
]

WATCH = WaitLimit(60.0)
NUM_GIB = 4


@pytest.fixture
def gpu():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device):
        yield device


def join(port: int, device: torch.device) -> Receiver:
    terms = Terms(wire="nccl", world_size=2, bucket_bytes=GPU_BUCKET_BYTES)
    meeting = Rendezvous.join(terms, HOST, port, 1, WATCH)
    return Receiver(open_group(meeting, device, WATCH), 3, WATCH)


def announced() -> TensorList:
    return TensorList.of(large(torch.device("meta"), NUM_GIB))


def receive_all(device: torch.device) -> None:
    """A whole group, from its opening to its end."""
    with process(trainer, "small") as child:
        receiver = join(child.pipe.recv(), device)
        named = receiver.tensors(TensorList.of(tensors().items()), WATCH)
        arrived = [(name, tensor.cpu()) for name, tensor in named]
        assert digests(arrived) == digests(tensors().items())
        child.pipe.send("arrived")
        receiver.group.close()


class Decoding(threading.Thread):
    """Other work of the same GPU, on a stream of its own, waited for step by step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.num_steps = 0
        self._device = device
        self._over = threading.Event()

    def run(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            matrix = torch.randn(2048, 2048, device=self._device)
            torch.cuda.current_stream().synchronize()
            while not self._over.is_set():
                began = time.monotonic()
                matrix @ matrix
                torch.cuda.current_stream().synchronize()
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.num_steps += 1

    def stop(self) -> None:
        self._over.set()
        self.join(30)
        assert not self.is_alive(), "other work of the GPU hangs"


@pytest.fixture
def decoding(gpu):
    thread = Decoding(gpu)
    thread.start()
    while thread.num_steps < 10:
        time.sleep(0.01)
    yield thread
    thread.stop()


def test_every_byte_arrives(gpu):
    receive_all(gpu)


def test_four_gib_arrive_and_how_fast(gpu):
    expected = dict(large(gpu, NUM_GIB))
    with process(trainer, "large", NUM_GIB) as child:
        receiver = join(child.pipe.recv(), gpu)
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.monotonic()
            equal = [
                torch.eq(tensor, expected[name]).all()
                for name, tensor in receiver.tensors(announced(), WATCH)
            ]
            assert torch.stack(equal).all()
            seconds = time.monotonic() - began
            print(f"\n{NUM_GIB * 2**30 / seconds / 1e9:.1f} GB/s over NCCL, checked")
        child.pipe.send("arrived")
        receiver.group.close()


def test_a_trainer_killed_in_the_middle_hurts_nothing_else(gpu, decoding):
    with process(trainer, "half", NUM_GIB) as child:
        receiver = join(child.pipe.recv(), gpu)

        def receive() -> None:
            with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream()):
                for _ in receiver.tensors(announced(), WATCH):
                    pass

        receiving = in_background(receive)
        assert child.pipe.recv() == "half"
        time.sleep(1.0)  # a broadcast kernel stands on the GPU now
        steps = decoding.num_steps
        time.sleep(1.0)
        assert decoding.num_steps > steps
        child.kill()
        killed = time.monotonic()
        with pytest.raises(TransferFault):
            receiving.result(timeout=60)
        print(f"\nnoticed after {time.monotonic() - killed:.2f} s")
        assert time.monotonic() - killed < 10.0
    print(f"longest step of other work: {decoding.longest_s * 1e3:.1f} ms")
    assert decoding.longest_s < 5.0
    torch.cuda.synchronize()  # no kernel is left behind
    receive_all(gpu)


def test_a_cancelled_update_ends_its_transfer_and_a_new_group_works(gpu, decoding):
    cancelled = threading.Event()
    with process(trainer, "half", NUM_GIB) as child:
        receiver = join(child.pipe.recv(), gpu)

        def receive() -> None:
            with torch.cuda.device(gpu), torch.cuda.stream(torch.cuda.Stream()):
                watch = WaitLimit(60.0, cancelled.is_set)
                for _ in receiver.tensors(announced(), watch):
                    pass

        receiving = in_background(receive)
        assert child.pipe.recv() == "half"
        time.sleep(0.5)
        asked = time.monotonic()
        cancelled.set()
        with pytest.raises(Cancelled):
            receiving.result(timeout=60)
        print(f"\nlet go after {time.monotonic() - asked:.2f} s")
    torch.cuda.synchronize()
    receive_all(gpu)
