"""Both ends of a wire for tests, in threads or in processes; no vLLM, only torch."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Terms
from vllm.inflight.transport.waiting import WaitLimit, in_background

HOST = "127.0.0.1"
BUCKET_BYTES = 4096
PATIENT = WaitLimit(60.0)
CPU = torch.device("cpu")

spawn = multiprocessing.get_context("spawn")


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of all kinds: larger than a bucket, empty, of one byte, of many dtypes."""
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "embedding": some(50, 64),
        "norm": some(64).to(torch.bfloat16),
        "nothing": torch.empty(0, 7),
        "scale": some(1)[0],
        "byte": torch.full((1,), seed % 251, dtype=torch.uint8),
        "mask": some(3, 5) > 0,
        "quantised": some(33, 9).to(torch.float8_e4m3fn),
        "exactly_one_bucket": some(BUCKET_BYTES // 4),
        "transposed": some(40, 30).t(),
        "head": some(130, 64).to(torch.float16),
        "last": torch.arange(seed, seed + 11),
    }


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of everything about each tensor."""
    return {
        name: hashlib.sha256(
            t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            + f"{t.dtype} {tuple(t.shape)}".encode()
        ).hexdigest()
        for name, t in named
    }


class Recorder:
    """A model that remembers what it was given."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.num_calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_calls += 1
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()


def engine(model: Any = None, *, rank: int = 0, replica: int = 0, size: int = 1) -> Any:
    """The receiving engine of one worker of a CPU engine."""
    from vllm.inflight.transport.collective.receiver_engine import GlooEngine

    parallel = SimpleNamespace(
        rank=rank,
        data_parallel_index=replica,
        world_size=size,
        tensor_parallel_size=size,
    )
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return GlooEngine(None, config, CPU, model or Recorder())


def init_info(port: int, **changes: Any) -> dict[str, Any]:
    """What a trainer tells the workers."""
    return {
        "master_address": HOST,
        "master_port": port,
        "world_size": 2,
        "bucket_bytes": BUCKET_BYTES,
        "timeout_s": 20.0,
    } | changes


def host(world_size: int = 2, bucket_bytes: int = BUCKET_BYTES) -> Rendezvous:
    terms = Terms(wire="gloo", world_size=world_size, bucket_bytes=bucket_bytes)
    return Rendezvous.host(terms, HOST)


def open_sender(meeting: Rendezvous, watch: WaitLimit = PATIENT) -> Sender:
    return Sender(open_group(meeting, CPU, watch), 3, watch)


def connect(engine: Any, **changes: Any) -> Sender:
    """A trainer in a thread of this process, and the engine joined to it."""
    meeting = host(bucket_bytes=changes.get("bucket_bytes", BUCKET_BYTES))
    opening = in_background(lambda: open_sender(meeting))
    engine.init_transfer_engine(
        engine.parse_init_info(init_info(meeting.port, **changes))
    )
    return opening.result()


def update(engine: Any, named: dict[str, torch.Tensor]) -> None:
    """Receive what `named` announces."""
    announced = TensorList.of(named.items())
    engine.receive_weights(engine.parse_update_info(announced.update_info))


def send(sender: Sender, named: dict[str, torch.Tensor], **announce: Any) -> None:
    announced = TensorList.of((announce or named).items())
    sender.send(announced, named.items(), PATIENT)


def transfer(engine: Any, sender: Sender, named: dict[str, torch.Tensor]) -> None:
    """One whole update."""
    sending = in_background(lambda: send(sender, named))
    update(engine, named)
    sending.result(timeout=60)


def open_things() -> set[tuple[str, Any]]:
    """Open files, by number and target, and threads of ours.

    What earlier tests left may end at any moment, so ask for what is new:
    `assert open_things() <= before`.
    """
    gc.collect()
    found: set[tuple[str, Any]] = {
        (thread.name, thread.ident)  # itself it would hold what it works on
        for thread in threading.enumerate()
        if thread.name.startswith("inflight")
    }
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


# ------------------------------------------------------------------- processes
@contextlib.contextmanager
def process(target: Any, *args: Any) -> Iterator[Any]:
    """`target(pipe, *args)` in a process; killed at the end, if need be."""
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=target, args=(theirs, *args), daemon=True)
    child.start()
    theirs.close()
    try:
        yield SimpleNamespace(pipe=ours, kill=child.kill, join=child.join)
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()


def receiving(
    pipe: Any, port: int, rank: int, world_size: int, seeds: list[int]
) -> None:
    """A worker that receives one update per seed, and tells the digests of each."""
    terms = Terms(wire="gloo", world_size=world_size, bucket_bytes=BUCKET_BYTES)
    meeting = Rendezvous.join(terms, HOST, port, rank, PATIENT)
    receiver = Receiver(open_group(meeting, CPU, PATIENT), 3, PATIENT)
    for seed in seeds:
        announced = TensorList.of(tensors(seed).items())
        pipe.send(digests(receiver.tensors(announced, PATIENT)))
    pipe.recv()


def stopping(pipe: Any) -> None:
    """A trainer that sends half of an update and then no more."""
    meeting = host()
    pipe.send(meeting.port)
    sender = open_sender(meeting)

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        named = list(tensors().items())
        yield from named[: len(named) // 2]
        pipe.send("half")
        time.sleep(1000)

    sender.send(TensorList.of(tensors().items()), half(), PATIENT)
