"""A worker extension with calls of two frameworks, and faults that a test asks for.

The weights come from the file that `SOURCE` names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm.inflight.worker.adopted_call import is_calling

SOURCE: dict[str, Path] = {}
FAULTS: dict[str, Any] = {}
"""`sleep_s`: seconds that a call takes. `writes`: the parameter that it writes past
the loader."""
DEVICES: list[str] = []
"""The default device in a method, in an iterator that it gives to the loader, and in
the loader."""
CALLED: list[tuple[str, bool]] = []
"""Each call, and whether it was adopted."""


def _one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in load_file(SOURCE["file"], device="cpu").items():
        DEVICES.append(torch.empty(0).device.type)
        assert is_calling()
        yield name, tensor


class Ends:
    """NeMo-RL's call of one version, and ROLL's calls of parts with an end."""

    def update_weights_from_collective(self: Any) -> bool:
        CALLED.append(("whole", is_calling()))
        time.sleep(FAULTS.get("sleep_s", 0))
        model = self.model_runner.model
        if (name := FAULTS.get("writes")) is not None:
            with torch.no_grad():
                # No operator of torch writes, so nothing sees it.
                param = dict(model.named_parameters())[name]
                param.data.view(torch.uint8).numpy()[:] = 7
            return True
        DEVICES.append(torch.empty(0).device.type)
        model.load_weights(_one_by_one())
        return True

    def broadcast_parameter(
        self: Any,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        is_lora: bool = False,
    ) -> list[str]:
        CALLED.append(("part", is_calling()))
        tensors = load_file(SOURCE["file"])
        self.model_runner.model.load_weights([(n, tensors[n]) for n in names])
        return names

    def process_weights_after_loading(self) -> str:
        CALLED.append(("end", is_calling()))
        return "done"
