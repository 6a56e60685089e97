"""Worker extensions with the calls of verl, ms-swift and checkpoint-engine.

Each reads buckets of tensors from a buffer that the sender fills again, and processes
the weights at the end. The three methods have one name, and other arguments.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
import zmq

ADDRESS: list[str] = []
"""Where the sender of verl listens; its extension computes the address by itself."""

Pairs = list[tuple[str, torch.Tensor]]


def _pairs(entries: Any, buffer: torch.Tensor, *, copies: bool = False) -> Pairs:
    found: Pairs = []
    for entry in entries:
        dtype, shape, start = entry["dtype"], entry["shape"], entry["offset"]
        end = start + dtype.itemsize * shape.numel()
        tensor = buffer[start:end].view(dtype).view(shape)
        found.append((entry["name"], tensor.clone() if copies else tensor))
    return found


def _process(worker: Any) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(
        worker.model_runner.model, worker.model_runner.model_config, worker.device
    )


def _received(address: str, *, copies: bool = False) -> Iterator[Pairs]:
    """The tensors of each bucket; the one before is answered first."""
    socket = zmq.Context.instance().socket(zmq.REP)
    socket.connect(address)
    memory: SharedMemory | None = None
    try:
        told: Any = socket.recv_pyobj()
        memory = SharedMemory(name=told["name"])
        buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
        socket.send(b"")
        while True:
            told = socket.recv_pyobj()
            yield _pairs(told["bucket_meta"].values(), buffer, copies=copies)
            socket.send(b"")
            if told["is_last"]:
                break
        del buffer
    finally:
        socket.close()
        gc.collect()
        if memory is not None:
            memory.close()  # fails if a layer has kept a tensor of the buffer


class Verl:
    """verl's `vLLMColocateWorkerExtension`."""

    def update_weights_from_ipc(
        self: Any,
        peft_config: Any = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        assert use_shm
        if peft_config and base_sync_done:
            return  # an adapter: nothing of the model is written
        for pairs in _received(ADDRESS[-1]):
            self.model_runner.model.load_weights(pairs)
            del pairs
        _process(self)


class Swift:
    """ms-swift's `WeightSyncWorkerExtension`."""

    def update_weights_from_ipc(
        self: Any,
        use_shm: bool = False,
        zmq_handle: str | None = None,
        timeout_s: int = 300,
        peft_config: Any = None,
        base_sync_done: bool = False,
    ) -> None:
        assert use_shm and zmq_handle is not None
        for pairs in _received(zmq_handle, copies=True):
            self.model_runner.model.load_weights(weights=pairs)
        _process(self)

    def update_named_param(self: Any, name: str, dtype: str, shape: Any) -> None:
        weight = self.tests_group.broadcast_obj(None, src=0)
        assert (weight.shape, str(weight.dtype)) == (torch.Size(shape), dtype)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def update_flattened_params(self: Any, metadatas: list[dict[str, Any]]) -> None:
        flat = self.tests_group.broadcast_obj(None, src=0)
        pairs = [
            (
                told["name"],
                flat[told["start_idx"] : told["end_idx"]]
                .view(getattr(torch, told["dtype"].removeprefix("torch.")))
                .view(told["shape"]),
            )
            for told in metadatas
        ]
        self.model_runner.model.load_weights(weights=pairs)

    def process_weights_after_loading(self: Any) -> None:
        _process(self)

    def init_communicator(self: Any, host: str, port: int, world_size: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self.tests_group = StatelessProcessGroup.create(
            host=host, port=port, rank=1, world_size=world_size
        )


class CheckpointEngine:
    """checkpoint-engine's `VllmColocateWorkerExtension`."""

    def update_weights_from_ipc(self: Any, zmq_handles: dict[str, str]) -> None:
        socket = zmq.Context.instance().socket(zmq.REP)
        (address,) = zmq_handles.values()
        socket.connect(address)
        try:
            opened, arguments = socket.recv_pyobj()
            buffer = opened(*arguments)
            socket.send(b"")
            while (told := socket.recv_pyobj()) is not None:
                if isinstance(told, Exception):
                    raise told
                socket.send_string(self._answer_to(_pairs(told, buffer)))
            del buffer
            socket.send(b"")
            assert socket.recv_pyobj() is None
            _process(self)
            socket.send(b"")
        finally:
            socket.close()

    def _answer_to(self: Any, pairs: Pairs) -> str:
        """Nothing, or the error of the load, which is not raised here."""
        load: Callable[[Pairs], Any] = self.model_runner.model.load_weights
        try:
            load(pairs)
        except Exception as error:
            return str(error)
        return ""
