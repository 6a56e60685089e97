"""Absent towers: parts of a model that an engine was told to leave out.

An engine that is to see nothing (`--language-model-only`, or limits of 0) builds no
tower, and loads checkpoints that have one. An update may bring it, too, and nothing of
it is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.inflight import upstream


def is_absent(model: torch.nn.Module, name: str) -> bool:
    """Whether a tensor of a checkpoint is of a part that `model` was built without."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.apply_list([name]) if mapper is not None else [name]
    return any(
        path.startswith(f"{left_out}.")
        for left_out, layer in model.named_modules()
        if isinstance(layer, upstream.StageMissingLayer)
        for path in mapped
    )
