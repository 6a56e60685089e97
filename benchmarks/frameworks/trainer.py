"""The trainer of a framework, in a process of its own, with the framework's transport.

`python -m benchmarks.frameworks.trainer TRAINER SOURCE NUM_RANKS HANDLE`, started by
`TrainerProcess`. TRAINER is a key of `SENDERS`. SOURCE is the folder of a model's
shape, whose weights are drawn, or `files`: each order then names a checkpoint. The
group of OpenRLHF, the sender of verl and the parameter server of checkpoint-engine are
those of the package. The worker calls are made in the order in which the framework's
trainer makes them, through a pipe in place of Ray or HTTP.

OpenRLHF's trainer broadcasts over NCCL from the GPU after the engine's. Its colocated
trainer (`openrlhf_ipc`), verl's and checkpoint-engine's have their weights on the
engine's own GPUs, and lend memory of each by CUDA IPC. prime-rl's trainer writes its
versions to files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.frameworks.on_host import (
    JOB,
    lend,
    use_host,
    use_host_for_checkpoint_engine,
)
from benchmarks.frameworks.packages import OWN

HOST = "127.0.0.1"
FILES = "files"
BUCKET_MB = "BENCH_BUCKET_MB"
"""In the environment: the size of a buffer of verl and checkpoint-engine, if it is not
their own."""
Tensors = dict[str, torch.Tensor]
Call = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Makes a worker call: method, arguments and keyword arguments."""


@dataclass(frozen=True)
class Version:
    """An order to send a version.

    Attributes:
        folder: the checkpoint, if weights are not drawn.
        pause_s: for so long nothing is sent when half of it has been.

    """

    folder: Path | None = None
    pause_s: float = 0


class Engine:
    """The engine, as its trainer calls it: one call at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Make a worker call, and do not wait for it."""
        self._pipe.send((method, args, kwargs))

    def end(self) -> Any:
        """What the call has returned; raises what it has raised."""
        reply = self._pipe.recv()
        if isinstance(reply, Exception):
            raise reply
        return reply


class Sender:
    """One way in which a framework's trainer sends a version.

    Attributes:
        package: a key of `OWN`.
        is_beside: whether the trainer has its weights on the engine's own GPUs.
        reads_files: whether the engine reads checkpoints.
        pause: arguments of the framework's own pause.

    """

    package = ""
    is_beside = False
    reads_files = False
    pause: ClassVar[dict[str, Any]] = {"mode": "keep"}

    def __init__(self, engine: Engine, num_ranks: int) -> None:
        self._engine, self._num_ranks = engine, num_ranks


class OpenRLHF(Sender):
    """OpenRLHF: a broadcast and a worker call for each parameter."""

    package = "openrlhf"

    def __init__(self, engine: Engine, num_ranks: int) -> None:
        from openrlhf.utils.distributed_util import stateless_init_process_group

        super().__init__(engine, num_ranks)
        port, size = _free_port(), 1 + num_ranks
        engine.begin("init_process_group", HOST, port, 1, size, "openrlhf", "nccl")
        self._group = stateless_init_process_group(HOST, port, 0, size, device_of(-1))
        engine.end()
        if getattr(self._group, "disabled", False):
            raise RuntimeError("vLLM's NCCL communicator is disabled in this process")

    def send(self, tensors: Tensors, *, pause_s: float = 0) -> None:
        """Send a version; see `Version`."""
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            told = name, tensor.dtype, tensor.shape, number == len(tensors)
            self._engine.begin("update_weight", *told)
            if 2 * number // len(tensors) == 1 and pause_s:
                time.sleep(pause_s)
                pause_s = 0
            stream = torch.cuda.current_stream()
            self._group.broadcast(tensor, src=0, stream=stream)
            self._engine.end()


class OpenRLHFColocated(Sender):
    """OpenRLHF with `colocate_all`: a worker call for each parameter, with handles.

    Each parameter is copied, and the copy is lent to the ranks on the same GPU.
    """

    package = "openrlhf"
    is_beside = True

    def send(self, tensors: Tensors, *, pause_s: float = 0) -> None:
        """Send a version; see `Version`."""
        from openrlhf.trainer.ray.utils import get_physical_gpu_id

        for number, (name, tensor) in enumerate(tensors.items(), 1):
            copies, handles = [], {}
            for rank in range(self._num_ranks):
                with on_device(device_of(rank)) as device:
                    copies.append(tensor.to(device, copy=True))
                    handles[get_physical_gpu_id()] = reduce(copies[-1])
            told = {"dtype": tensor.dtype, "shape": tensor.shape}
            told |= {"ipc_handles": handles, "empty_cache": number == len(tensors)}
            self._engine.begin("update_weight_cuda_ipc", name, **told)
            if 2 * number // len(tensors) == 1 and pause_s:
                time.sleep(pause_s)
                pause_s = 0
            self._engine.end()
            torch.cuda.synchronize()


class Verl(Sender):
    """verl: one worker call, and a sender of buckets for each rank."""

    package = "verl"
    is_beside = True

    def send(self, tensors: Tensors, *, pause_s: float = 0) -> None:
        """Send a version; verl's sender cannot be told to pause."""
        has_gpu = torch.cuda.is_available()
        self._engine.begin("update_weights_from_ipc", use_shm=not has_gpu)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=self._send_to, args=(rank, tensors, failures))
            for rank in range(self._num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._engine.end()
        for failure in failures:
            raise failure

    def _send_to(
        self, rank: int, tensors: Tensors, failures: list[BaseException]
    ) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
            BucketedWeightSender,
        )

        device = device_of(rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        sender = BucketedWeightSender(
            f"ipc:///tmp/rl-colocate-zmq-{os.environ[JOB]}-replica-0-rank-{rank}.sock",
            int(os.environ.get(BUCKET_MB, 512)),
            use_shm=device.type == "cpu",
        )
        try:
            asyncio.run(sender.async_send_weights(iter(tensors.items())))
        except BaseException as failure:
            failures.append(failure)


class CheckpointEngine(Sender):
    """checkpoint-engine: a parameter server for each rank, here for one.

    The server makes the worker call in a thread of its own, and does not hear whether
    it has failed.
    """

    package = "checkpoint_engine"
    is_beside = True

    def __init__(self, engine: Engine, num_ranks: int) -> None:
        from checkpoint_engine.ps import ParameterServer

        if num_ranks != 1:
            raise ValueError("checkpoint-engine has a process for each rank")
        super().__init__(engine, num_ranks)
        os.environ["RANK"] = "0"
        if size := os.environ.get(BUCKET_MB):
            os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(int(size) / 1024)
        self._server = ParameterServer(
            world_size=1, gpu_count=1, master_addr=HOST, master_port=_free_port()
        )

    def send(self, tensors: Tensors, *, pause_s: float = 0) -> None:
        """Send a version; its server cannot be told to pause."""
        failures: list[Exception] = []

        def request(sockets: list[tuple[str, str]]) -> None:
            self._engine.begin("update_weights_from_ipc", dict(sockets))
            try:
                self._engine.end()
            except Exception as failure:
                failures.append(failure)

        server, name = self._server, "version"
        server.register_checkpoint(name, named_tensors=tensors)
        try:
            server.gather_metas(name)
            server.update(name, request)
        finally:
            server.unregister_checkpoint(name)
        for failure in failures:
            raise failure


class PrimeRL(Sender):
    """prime-rl: a worker call with the folder of a checkpoint."""

    package = "prime_rl"
    is_beside = True
    reads_files = True
    pause: ClassVar[dict[str, Any]] = {"mode": "keep", "clear_cache": False}

    def send(self, folder: Path) -> None:
        """Let the engine read a version."""
        self._engine.begin("update_weights_from_path", str(folder))
        self._engine.end()


SENDERS: dict[str, Any] = {
    "openrlhf": OpenRLHF,
    "openrlhf_ipc": OpenRLHFColocated,
    "verl": Verl,
    "checkpoint_engine": CheckpointEngine,
    "prime_rl": PrimeRL,
}


def reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """A function and arguments that give another process the memory of a tensor."""
    if tensor.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor)
    return lend(tensor)


@contextmanager
def on_device(device: torch.device) -> Iterator[torch.device]:
    """Context: a GPU is the current one; the host needs no such thing."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield device


def device_of(number: int) -> torch.device:
    """A GPU by its number, -1 for the last one; the host if there are none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", number % torch.cuda.device_count())


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


class TrainerProcess:
    """The connection to a trainer: gives it orders, and makes the calls it asks for.

    Args:
        framework: a key of `SENDERS`.
        source: the folder of a shape, or `files`.
        num_ranks: of the engine.

    """

    def __init__(self, framework: str, source: str, num_ranks: int) -> None:
        self._pipe, far = Pipe()
        module = "benchmarks.frameworks.trainer"
        handle = str(far.fileno())
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", module),
                *(framework, source, str(num_ranks), handle),
            ],
            pass_fds=[far.fileno()],
            start_new_session=True,
        )
        far.close()

    def ready(self) -> None:
        """Wait until it has its weights."""
        self._pipe.recv()

    def join(self, call: Call) -> None:
        """Let it join the group of the engine's workers, where there is one."""
        self.carry_out(None, call)

    def carry_out(self, order: Version | None, call: Call) -> None:
        """Let it send a version; None: let it join.

        Raises:
            Exception: what a call has raised.

        """
        self._pipe.send(order)
        while True:
            told = self._pipe.recv()
            if isinstance(told, Exception):
                raise told
            if told is None:
                return
            try:
                reply = call(*told)
            except Exception as error:
                reply = error
            self._pipe.send(reply)

    def end(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def orders(pipe: Connection) -> Iterator[Any]:
    """The orders that come until the other end is closed."""
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def main(framework: str, source: str, num_ranks: str, handle: str) -> None:
    """Get weights ready, join, then send a version at every order."""
    pipe = Connection(int(handle))
    kind = SENDERS[framework]
    device = device_of(0 if kind.is_beside else -1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        use_host()
        torch.set_num_threads(1)  # threads that wait would hold the engine's cores
    OWN[kind.package].use()
    if device.type == "cpu" and kind is CheckpointEngine:
        use_host_for_checkpoint_engine()
    weights: Any = None
    written: Iterator[Path] = iter(())
    if source != FILES:
        from benchmarks.gpu.trainer import Weights, change

        if kind.reads_files:
            written = cycle(write_files(Path(source), device)[::-1])
        else:
            weights = Weights(source, device)
    pipe.send("ready")
    sender: Any = None
    for order in orders(pipe):
        try:
            if sender is None:
                sender = kind(Engine(pipe), int(num_ranks))
            elif weights is not None:
                change(weights.own)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                sender.send(dict(weights.read_tensors()))
            elif kind.reads_files:
                sender.send(order.folder or next(written))
            else:
                sender.send(_read(order.folder, device), pause_s=order.pause_s)
        except Exception as error:
            pipe.send(error)
        else:
            pipe.send(None)


def write_files(folder: Path, device: torch.device) -> list[Path]:
    """The folders of two versions of a shape, which differ in one tensor.

    They are written once: `folder` has the files of the first version as well, for an
    engine that starts with it. What the versions share is on the disk once.
    """
    from safetensors.torch import save_file

    from benchmarks.gpu.trainer import Weights, change

    versions = [folder / f"step_{number}" for number in (0, 1)]
    if versions[-1].is_dir():
        return versions
    own = dict(Weights(str(folder), device).own)
    head = next(name for name in ("lm_head.weight", *own) if name in own)
    tensors = {head: own.pop(head)}
    rest = folder / "rest.safetensors"
    save_file({name: tensor.cpu() for name, tensor in own.items()}, rest)
    for version in versions:
        version.mkdir()
        (version / rest.name).hardlink_to(rest)
        save_file({head: tensors[head].cpu()}, version / "head.safetensors")
        change(tensors)
    (folder / "head.safetensors").hardlink_to(versions[0] / "head.safetensors")
    return versions


def _read(folder: Path, device: torch.device) -> Tensors:
    from safetensors.torch import load_file

    found: Tensors = load_file(folder / "model.safetensors", device=str(device))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
