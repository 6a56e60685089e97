"""The trainer's end on a GPU, in a process of its own; only torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tests.support.transports.peers import HOST, PATIENT, tensors
from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Terms

GPU_BUCKET_BYTES = 256 << 20
TENSOR_BYTES = 128 << 20

Pair = tuple[str, torch.Tensor]


def large(device: torch.device, num_gib: int) -> Iterator[Pair]:
    """Tensors of that size together, each full of its own number."""
    for i in range((num_gib << 30) // TENSOR_BYTES):
        shape = (TENSOR_BYTES // 2,)
        yield f"{i}", torch.full(shape, i, dtype=torch.bfloat16, device=device)


def trainer(pipe: Any, what: str, num_gib: int = 0) -> None:
    """Sends `small`: tensors of all kinds; `large`, thrice; or `half` and no more."""
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    terms = Terms(wire="nccl", world_size=2, bucket_bytes=GPU_BUCKET_BYTES)
    meeting = Rendezvous.host(terms, HOST)
    pipe.send(meeting.port)
    sender = Sender(open_group(meeting, gpu, PATIENT), 3, PATIENT)
    if what == "small":
        named = {name: tensor.to(gpu) for name, tensor in tensors().items()}
        sender.send(TensorList.of(named.items()), named.items(), PATIENT)
    else:
        named = dict(large(gpu, num_gib))
        announced = TensorList.of(named.items())
        if what == "half":
            sender.send(announced, _half(pipe, named.items()), PATIENT)
        for _ in range(3):
            sender.send(announced, named.items(), PATIENT)
    pipe.recv()
    sender.group.close()


def _half(pipe: Any, pairs: Iterable[Pair]) -> Iterator[Pair]:
    pairs = list(pairs)
    yield from pairs[: len(pairs) // 2]
    pipe.send("half")
    time.sleep(1000)
