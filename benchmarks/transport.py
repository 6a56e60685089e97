"""A transport for upstream's own update path: a safetensors file, read in place.

It does what upstream's dense transports do around their wire: layerwise reload of
the model that is being served, which has to be paused meanwhile. Nothing of
vllm-inflight is imported here, because the engine that uses it runs without.
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
    """Nothing to agree on beforehand."""


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
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Have every layer packed as soon as it is complete."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load every tensor of the file."""
        self.model.load_weights(_tensors(update_info.file))

    def finish_weight_update(self) -> None:
        """Pack the layers that wait for the end."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to close."""


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
