"""The workers of the benchmark of frameworks' pauses: worker calls and a transport.

An arm names `Extension` as its `worker_extension_cls`. So each worker imports this
module before it loads its model, and the transport is registered by then.

A trainer's tensors are on the engine's own device, as trainers on the same GPU lend
them by CUDA IPC. A worker reads them from their files once, at its first update.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from benchmarks.transport import FileTransport, FileUpdateInfo

Tensors = dict[str, torch.Tensor]

BACKEND = "benchmark-memory"
SENT = "BENCH_SENT"
"""In the environment: a file that names the version which the trainer sends now."""


class Extension:
    """The worker calls of the frameworks, as their own extensions name them."""

    # OpenRLHF: one call for each parameter.
    def update_weight(
        self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> None:
        weight = tensors_of(dtype, self.device)[name]
        self.model_runner.model.load_weights(weights=[(name, weight)])

    # prime-rl: one call with a folder, whose files are read each time.
    def update_weights_from_path(self: Any, weight_dir: str) -> None:
        self.model_runner.model.load_weights(weights=_read(weight_dir))

    # SkyRL: a begin, chunks, and an end.
    def skyrl_start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
        """Do nothing: an adopted call begins an update without it."""

    def update_weights_nccl(self: Any, update_info: dict[str, Any]) -> None:
        found = tensors_of(update_info["folder"], self.device)
        chosen = [(name, found[name]) for name in update_info["names"]]
        self.model_runner.model.load_weights(weights=chosen)

    def skyrl_finish_weight_update(self: Any) -> None:
        """Do nothing: it marks the end."""

    # PipelineRL: one call with a request.
    def receive_weight_update(self: Any, request_json: str) -> None:
        folder = json.loads(request_json)["folder"]
        for name, tensor in tensors_of(folder, self.device).items():
            self.model_runner.model.load_weights(weights=[(name, tensor)])

    # ms-swift: buckets, and an end.
    def update_flattened_params(self: Any, metadatas: list[dict[str, Any]]) -> None:
        found = tensors_of(metadatas[0]["dtype"], self.device)
        chosen = [(told["name"], found[told["name"]]) for told in metadatas]
        self.model_runner.model.load_weights(weights=chosen)

    def process_weights_after_loading(self: Any) -> None:
        """Do nothing: it marks the end."""

    # checkpoint-engine: one call, which loads bucket after bucket.
    def update_weights_from_ipc(self: Any, zmq_handles: dict[str, str]) -> None:
        _load_buckets(self, zmq_handles["folder"])

    # NeMo-RL: the same, and the call itself tells nothing.
    def update_weights_from_collective(self: Any) -> bool:
        _load_buckets(self, Path(os.environ[SENT]).read_text())
        return True


class MemoryTransport(FileTransport):
    """Hands a trainer's tensors to the model; an update names their folder."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load every tensor of the version."""
        found = tensors_of(update_info.file, self.device)
        self.model.load_weights(iter(found.items()))


@cache
def tensors_of(folder: str, device: torch.device) -> Tensors:
    """The tensors of a version; a file that two versions share is read once."""
    found: Tensors = {}
    for file in _files(folder):
        number = file.stat().st_ino
        if number not in _of_file:
            _of_file[number] = load_file(file, device=str(device))
        found |= _of_file[number]
    return found


_of_file: dict[int, Tensors] = {}
"""Number of a file's inode → its tensors."""


def names_of(folder: str) -> list[str]:
    """The names of a version's tensors."""
    names: list[str] = []
    for file in _files(folder):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def buckets(names: list[str]) -> Iterator[list[str]]:
    """All names, in four parts at the most."""
    size = -(-len(names) // 4)
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _load_buckets(worker: Any, folder: str) -> None:
    found = tensors_of(folder, worker.device)
    for names in buckets(list(found)):
        chosen = [(name, found[name]) for name in names]
        worker.model_runner.model.load_weights(weights=chosen)


def _read(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _files(folder):
        yield from load_file(file).items()


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MemoryTransport)
