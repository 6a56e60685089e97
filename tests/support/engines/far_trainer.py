"""A trainer with a process of its own, and a GPU if there are any, driven by a pipe.

Upstream's trainer interface sends; what it asks of the inference side is done by the
test's process, on an `LLM`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta

from benchmarks.gpu.trainer import Client
from tests.support.engines.probe import greedy
from tests.support.models.sliced_source import Entry, SlicedSource
from tests.support.ports import free_port
from tests.support.preloaded_process import nursery
from tests.support.transports.peers import HOST
from tests.support.waiting import until
from vllm.inflight.errors import InflightError
from vllm.inflight.releases.table import adapter
from vllm.inflight.trainer.deltas.policy import Sent
from vllm.inflight.transport.buckets.tensor_list import Pair
from vllm.inflight.transport.collective.trainer_engine import ShardMeta
from vllm.inflight.transport.waiting import in_background

_Source: Any = adapter("weight source")


class Weights(_Source):
    """Those of a checkpoint, whole or cut; after half of them it may fall silent."""

    def __init__(self, device: torch.device, silent: Any, num_slices: int) -> None:
        self._device = device
        self._silent = silent
        self._num_slices = num_slices
        self.is_to_fall_silent = False
        self._entries: list[Entry] = []

    def load(self, folder: str) -> None:
        """Become what a checkpoint holds."""
        if self._num_slices > 1:
            cut = SlicedSource(Path(folder), self._num_slices, are_told=False)
            self._entries = [
                (n, t.to(self._device), shard) for n, t, shard in cut.entries
            ]
            return
        file = Path(folder) / "model.safetensors"
        self._entries = [
            (n, t.to(self._device), None) for n, t in load_file(file).items()
        ]

    def read_facts(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tensor.shape)
            if shard is None
            else ShardMeta(name, tensor.dtype, tensor.shape, shard)
            for name, tensor, shard in self._entries
        ]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = [(name, tensor) for name, tensor, _ in self._entries]
        return half(pairs, self._silent) if self.is_to_fall_silent else iter(pairs)


def half(pairs: list[Pair], silent: Any) -> Iterator[Pair]:
    """The first half of some tensors; then it falls silent."""
    yield from pairs[: len(pairs) // 2]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    silent.set()
    time.sleep(1000)


def send_half(
    send: Any, silent: Any, tensor_list: Any, pairs: list[Pair], calls: Any
) -> None:
    """In the place of a trainer engine's `_send`."""
    send(tensor_list, half(pairs, silent), calls)


def run(
    pipe: Any,
    silent: Any,
    backend: str,
    gpu: int,
    folder: str,
    num_slices: int,
    common: dict[str, Any],
) -> None:
    """The process: joins, then sends what it is told to."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    device = torch.device("cpu")
    if backend != "inflight_gloo":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    source = Weights(device, silent, num_slices)
    source.load(folder)

    def joined() -> Any:
        return WeightTransferTrainerFactory.trainer_init(
            init_info(backend, common), client=Client(pipe), source=source
        )

    engine = joined()
    pipe.send(("done", None))
    while True:
        order = pipe.recv()
        if isinstance(order, int):
            engine.shutdown()
            common["master_port"] = order
            engine = joined()
        else:
            folder, is_to_fall_silent = order
            # What changed is searched before it is sent.
            searches = common.get("delta", "off") != "off"
            source.is_to_fall_silent = is_to_fall_silent and not searches
            if is_to_fall_silent and searches:
                engine._send = partial(send_half, engine._send, silent)
            source.load(folder)
            try:
                engine.send_weights()
            except InflightError as error:
                pipe.send(("failed", error))
                continue
        last = getattr(getattr(engine, "deltas", None), "last", None)
        pipe.send(("done", last))


def init_info(backend: str, common: dict[str, Any]) -> Any:
    """The init info of a backend."""
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(**common)
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(**common)
    if backend == "inflight_ipc":
        from vllm.inflight.transport.cuda_ipc.trainer_engine import IpcTrainerInitInfo

        return IpcTrainerInitInfo(**common)
    from vllm.inflight.transport.collective import trainer_engine

    if backend == "inflight_gloo":
        return trainer_engine.GlooTrainerInitInfo(**common)
    return trainer_engine.NcclTrainerInitInfo(**common)


class FarTrainer:
    """The test's end of it; `with` ends the process.

    Args:
        llm: the engine that takes its weights, in this process.
        backend: `inflight_gloo`, `inflight_nccl`, `inflight_ipc`, `nccl` or `ipc`.
        folder: the first checkpoint it has.
        gpu: of the trainer, if it has one.
        num_workers: of the engine; counted for backends that make a group.
        num_slices: into which each tensor is cut, for backends that take slices.
        **options: of the backend's init info.

    """

    def __init__(
        self,
        llm: Any,
        backend: str,
        folder: Path,
        *,
        gpu: int = -1,
        num_workers: int = 1,
        num_slices: int = 1,
        **options: Any,
    ) -> None:
        self._llm = llm
        self._pipe, theirs = nursery.Pipe()
        self.silent = nursery.Event()
        """Set when half of an update was sent and no more will be."""
        common = {"rank": 0, **options}
        if not backend.endswith("ipc"):
            common |= {
                "master_address": HOST,
                "master_port": free_port(),
                "world_size": 1 + num_workers,
            }
        gpu %= max(1, torch.cuda.device_count())
        arguments = (theirs, self.silent, backend, gpu, str(folder), num_slices, common)
        self._process = nursery.Process(target=run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> FarTrainer:
        try:
            self._attend()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def send(self, folder: Path) -> Sent | None:
        """One update, served when this returns; raises what the engine refused.

        Returns what was sent, from a trainer that sends deltas.
        """
        self._pipe.send((str(folder), False))
        return self._attend()

    def join_again(self) -> None:
        """Leave the group, and open another one."""
        self._llm.shutdown_weight_transfer_engine()
        self._pipe.send(free_port())
        self._attend()

    def fall_silent(self, folder: Path) -> Any:
        """Have half of an update sent and no more; the update's Future."""
        self._pipe.send((str(folder), True))
        sending = in_background(self._attend)
        assert self.silent.wait(60), "the trainer did not get half-way"
        # The call that opens the update goes beside the transfer.
        until(lambda: self._llm.weight_update_status()["active"])
        return sending

    def kill(self) -> None:
        """The end of it, wherever it is."""
        self._process.kill()
        self._process.join()

    def _attend(self) -> Sent | None:
        """Do for the trainer what it asks, until it is done."""
        while True:
            method, payload = self._pipe.recv()
            if method == "done":
                return payload
            if method == "failed":
                raise payload
            try:
                self._call(method, payload)
            except InflightError as error:
                if self.silent.is_set():
                    raise  # the trainer waits for nothing
                self._pipe.send(error)
            else:
                self._pipe.send(None)

    def _call(self, method: str, payload: Any) -> None:
        if method == "init_weight_transfer_engine":
            self._llm.init_weight_transfer_engine({"init_info": payload})
        elif method == "update_weights":
            update_info, options = payload
            self._llm.update_weights({"update_info": update_info}, **options)
        elif payload is not None:
            self._llm.start_weight_update(manifest=payload)
        else:
            getattr(self._llm, method)()


def sends_and_rollbacks(
    far: FarTrainer, llm: Any, versions: Iterable[tuple[Path, list[list[int]]]]
) -> None:
    """Send each checkpoint, roll back and send it again; it makes what it should."""
    for folder, expected in versions:
        far.send(folder)
        assert greedy(llm) == expected
        llm.rollback_weights()
        assert greedy(llm) != expected
        far.send(folder)
        assert greedy(llm) == expected
