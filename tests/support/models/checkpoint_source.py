"""A trainer's weights as upstream's trainer interface has them: a checkpoint's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta

from vllm.inflight.releases.table import adapter

_Source: Any = adapter("weight source")


class CheckpointSource(_Source):
    """The tensors of a folder; `tensors` may be changed between updates."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def read_facts(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, t.shape) for n, t in self.tensors.items()]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())
