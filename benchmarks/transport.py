"""A transport for upstream's own update path: it reads a safetensors file.

Like upstream's dense transports, it does a layerwise reload of the live model, which
has to be paused for that. The engine that uses it runs without vllm-inflight, so this
file imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "benchmark-file"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The init info; it has no fields."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Which file to load."""

    file: str


class FileTransport(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads a file into the model it was created with."""

    hands_whole_tensors = True

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Start the layerwise reload."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load every tensor of the file."""
        self.model.load_weights(_tensors(update_info.file))

    def finish_weight_update(self) -> None:
        """Finish the layerwise reload."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class Extension:
    """Named as `worker_extension_cls`, so that workers import this module.

    Upstream does that before it loads the model and creates the transport.
    """


def _tensors(file: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            yield name, opened.get_tensor(name)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransport)
