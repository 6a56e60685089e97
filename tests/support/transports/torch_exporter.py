"""Tensors as torch pickles them on a GPU, with host memory in a GPU's place."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from tests.support.transports.host_memory import HostMemory
from vllm.inflight.transport.cuda_ipc.driver import HANDLE_BYTES
from vllm.inflight.transport.cuda_ipc.torch_exports import COUNTERS_PER_FILE

VERSION = b"\2c"
"""Torch's first two bytes of a handle, up to release 2.12."""


class Call:
    """Becomes a call of `function` when it is pickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


class Exporter:
    """A trainer whose tensors are in `memory`, and whose counters are torch's own.

    Attributes:
        counters: the name of its file of counters.
        counts: the counters. Torch keeps the memory of a tensor until its own is 0.

    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._file = torch.UntypedStorage._new_using_filename_cpu(8 * COUNTERS_PER_FILE)
        _, self.counters, _ = self._file._share_filename_cpu_()
        self._index = 0
        self.counts = torch.empty(0, dtype=torch.int64).set_(self._file)

    def let_count(self, patched: pytest.MonkeyPatch) -> None:
        """Let torch's counters be counted down, which its CPU build cannot."""

        def release(name: bytes, index: int) -> None:
            assert name == self.counters
            self.counts[index] -= 1

        storage = torch.UntypedStorage
        patched.setattr(storage, "_release_ipc_counter_cuda", staticmethod(release))

    def arguments(self, tensor: torch.Tensor, **changes: Any) -> list[Any]:
        """What `reduce_tensor` gives for a tensor on a GPU.

        Args:
            tensor: in host memory.
            changes: other values, by the names of the parameters of
                `rebuild_cuda_tensor`.

        """
        storage = tensor.untyped_storage()
        self.memory.show({"": tensor})
        with self.memory.at(tensor.device):
            handle = self.memory.export(storage.data_ptr())
        event = self._index.to_bytes(HANDLE_BYTES, "little")
        self.memory.events[event] = lambda: True
        facts = {
            "tensor_cls": type(tensor),
            "tensor_size": tensor.size(),
            "tensor_stride": tensor.stride(),
            "tensor_offset": tensor.storage_offset(),
            "storage_cls": type(storage),
            "dtype": tensor.dtype,
            "storage_device": 0,
            "storage_handle": VERSION + handle,
            "storage_size_bytes": storage.nbytes(),
            "storage_offset_bytes": 0,
            "requires_grad": tensor.requires_grad,
            "ref_counter_handle": self.counters,
            "ref_counter_offset": self._index,
            "event_handle": event,
            "event_sync_required": True,
        }
        self.counts[self._index] = int(storage.nbytes() > 0)  # else it has no memory
        self._index += 1
        return list((facts | changes).values())

    def call(self, tensor: torch.Tensor, **changes: Any) -> Call:
        """What a pickle of the tensor has in its place."""
        return Call(reductions.rebuild_cuda_tensor, *self.arguments(tensor, **changes))


def pickled(payload: Any) -> str:
    """An entry of a request: a pickle in base64."""
    file = io.BytesIO()
    pickle.dump(payload, file)
    return base64.b64encode(file.getvalue()).decode()


def exported(exporter: Exporter, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """An entry with a list of (name, tensor), as SGLang's clients send it."""
    return pickled([(name, exporter.call(tensor)) for name, tensor in named])
