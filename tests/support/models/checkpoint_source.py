"""A trainer's weights as upstream's trainer interface has them: a checkpoint's."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource


class CheckpointSource(WeightSource):
    """The tensors of a folder; `tensors` may be changed between updates."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, t.shape) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())
