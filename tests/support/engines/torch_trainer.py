"""A trainer in a process of its own, which knows `torch.distributed` and nothing else.

It opens its group the way SGLang's clients and PipelineRL do: a store under the group's
name, and torch's own helper for a group beside the default one.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.ports import free_port

HOST = "127.0.0.1"
BACKEND = "nccl" if torch.cuda.device_count() > 1 else "gloo"
"""Over NCCL where the trainer can have a GPU of its own, the last one."""


def open_group(
    name: str, port: int, world_size: int, backend: str, rank: int = 0
) -> Any:
    """One rank of a new group."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import (
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    timeout = timedelta(seconds=300)
    store, rank, size = next(
        rendezvous(f"tcp://{HOST}:{port}", rank, world_size, timeout=timeout)
    )
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def trainer(pipe: Any, name: str, port: int, world_size: int, backend: str) -> None:
    """Open the group, then broadcast what is asked for: (path, names, flattened)."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        torch.cuda.set_device(device)
    group = open_group(name, port, world_size, backend)
    pipe.send("joined")
    while (order := pipe.recv()) is not None:
        path, names, flattened = order
        tensors = {n: t.to(device) for n, t in load_file(path).items()}
        parts = [tensors[n] for n in names]
        if flattened:
            parts = [torch.cat([t.flatten().view(torch.uint8) for t in parts])]
        try:
            for tensor in parts:
                dist.broadcast(tensor, src=0, group=group)
            if backend == "nccl":
                torch.cuda.synchronize()
            pipe.send("sent")
        except RuntimeError as error:
            pipe.send(f"broke: {error}")


def member(
    pipe: Any, name: str, port: int, world_size: int, backend: str, rank: int
) -> None:
    """A worker without an engine: it tells which tensors came otherwise than sent."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)  # the first GPU is an engine's
        torch.cuda.set_device(device)
    group = open_group(name, port, world_size, backend, rank)
    while (path := pipe.recv()) is not None:
        sent = load_file(path)
        got = {n: torch.empty_like(t, device=device) for n, t in sent.items()}
        for tensor in got.values():
            dist.broadcast(tensor, src=0, group=group)
        pipe.send([n for n, t in got.items() if not torch.equal(t.cpu(), sent[n])])


class TorchTrainer:
    """The process, and what it is told."""

    def __init__(self, name: str, world_size: int, backend: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.port = free_port()
        self.name = name
        self.world_size = world_size
        self.backend = backend
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, name, self.port, world_size, backend)
        self.process = spawn.Process(target=trainer, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def group(self) -> dict[str, Any]:
        """Body of SGLang's `/init_weights_update_group`."""
        return {
            "master_address": HOST,
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self.world_size,
            "group_name": self.name,
            "backend": self.backend,
            "timeout_s": 120.0,
        }

    def begin(self, folder: Path, names: list[str], *, flattened: bool = False) -> None:
        """Have it broadcast, beside whatever comes next."""
        self.pipe.send((str(folder / "model.safetensors"), names, flattened))

    def heard(self) -> str:
        """What it says next."""
        assert self.pipe.poll(60), "the trainer says nothing"
        return str(self.pipe.recv())

    @contextmanager
    def beside(self, rank: int) -> Iterator[Any]:
        """A worker of another engine that is only played; the pipe to it."""
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        group = (self.name, self.port, self.world_size, self.backend)
        playing = spawn.Process(target=member, args=(theirs, *group, rank), daemon=True)
        playing.start()
        theirs.close()
        try:
            yield pipe
        finally:
            playing.kill()
            playing.join()
            pipe.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def training(
    name: str = "weight_update_group", world_size: int = 2, backend: str = BACKEND
) -> Iterator[Any]:
    """A trainer, for the length of a `with`."""
    running = TorchTrainer(name, world_size, backend)
    try:
        yield running
    finally:
        running.stop()


def facts(folder: Path, names: list[str] | None = None) -> dict[str, list[Any]]:
    """`names`, `dtypes` and `shapes` of a checkpoint, as SGLang's clients send them."""
    tensors = load_file(folder / "model.safetensors")
    chosen = list(tensors) if names is None else names
    return {
        "names": chosen,
        "dtypes": [str(tensors[n].dtype).removeprefix("torch.") for n in chosen],
        "shapes": [list(tensors[n].shape) for n in chosen],
    }
