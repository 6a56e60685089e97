"""Quantised checkpoints, made by hand of one in bf16: nothing is downloaded.

The linear layers of the decoder are quantised; embedding, head and norms are not.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
GROUP, WIDE_GROUP, BLOCK = 32, 128, 128
"""Inputs that share a scale of int4, for either kernel of GPUs; the edge of a block of
fp8."""

Tensors = dict[str, torch.Tensor]


def int8_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    quantised = (weight.float() / scale).round().clamp(-127, 127)
    return {"weight": quantised.to(torch.int8), "weight_scale": scale}


def int8_static(weight: torch.Tensor) -> Tensors:
    return int8_channel(weight) | {"input_scale": torch.tensor([0.05])}


def fp8_channel(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": _fp8(weight.float() / scale), "weight_scale": scale}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().max() / 448
    return {"weight": _fp8(weight.float() / scale), "weight_scale": scale}


def fp8_block(weight: torch.Tensor) -> Tensors:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scale = torch.empty(rows, columns)
    quantised = torch.empty(weight.shape)
    for row in range(rows):
        for column in range(columns):
            at = tuple(slice(n * BLOCK, (n + 1) * BLOCK) for n in (row, column))
            scale[row, column] = weight[at].float().abs().max() / 448
            quantised[at] = weight[at].float() / scale[row, column]
    return {"weight": _fp8(quantised), "weight_scale_inv": scale}


def int4_group(weight: torch.Tensor, size: int = GROUP) -> Tensors:
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // size, size)
    scale = groups.abs().amax(2) / 7
    digits = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    shifts = 4 * torch.arange(8)
    words = (digits.view(rows, columns // 8, 8) << shifts).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": scale.to(weight.dtype),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _fp8(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn)


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    groups = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": groups},
    }


def _numbers(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    common = {"num_bits": num_bits, "type": kind, "symmetric": True}
    return common | {"strategy": strategy, **more}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
KINDS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "int8": (
        int8_channel,
        _compressed(
            "int-quantized",
            _numbers(8, "int", "channel"),
            _numbers(8, "int", "token", dynamic=True),
        ),
    ),
    "int8-static": (
        int8_static,
        _compressed(
            "int-quantized",
            _numbers(8, "int", "channel"),
            _numbers(8, "int", "tensor", dynamic=False),
        ),
    ),
    "int4": (
        int4_group,
        _compressed(
            "pack-quantized", _numbers(4, "int", "group", group_size=GROUP), None
        ),
    ),
    "int4-wide": (
        partial(int4_group, size=WIDE_GROUP),
        _compressed(
            "pack-quantized", _numbers(4, "int", "group", group_size=WIDE_GROUP), None
        ),
    ),
    "fp8-channel": (
        fp8_channel,
        _compressed(
            "float-quantized",
            _numbers(8, "float", "channel"),
            _numbers(8, "float", "token", dynamic=True),
        ),
    ),
    "fp8-tensor": (fp8_tensor, FP8),
    "fp8-block": (fp8_block, FP8 | {"weight_block_size": [BLOCK, BLOCK]}),
}


def quantise(source: Path, folder: Path, kind: str) -> Path:
    """Write the checkpoint in `source` to `folder`, quantised as `KINDS[kind]` says."""
    if folder.exists():
        return folder
    of, config = KINDS[kind]
    shutil.copytree(source, folder)
    tensors: Tensors = {}
    for name, tensor in load_file(source / FILE).items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{key}": part for key, part in of(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(described))
    return folder
