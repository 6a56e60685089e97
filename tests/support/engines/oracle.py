"""The oracle: what vLLM alone makes of a checkpoint, on the very rank that serves it.

It knows nothing of second sets, plans and digests. A model is built anew and loaded by
vLLM's own loader, on every rank, and every parameter that is served has to be what that
model has, bit for bit. A kernel may keep a quantised weight where no parameter shows
it, so quantised layers also have to multiply alike. So a path that ends in other
weights is found, whatever the reason and whatever was accepted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

from vllm.inflight import ops
from vllm.inflight.worker.model.kinds.quantized import is_quantised
from vllm.inflight.worker.model.layers import layers, parameters
from vllm.inflight.worker.verify import readback


def check(llm: Any, folder: Path | str) -> None:
    """Assert that every rank serves what a fresh load of `folder` has.

    A folder with its `config.json`, whose tensors are all of the model's.
    """
    assert differing(llm, folder) == []


def check_served(llm: Any, folders: Iterable[Path]) -> None:
    """Check what an engine serves, whatever led there.

    By the digest of its label it is one of `folders`, or none that is known here. What
    is read back of it has to have that digest, too.
    """
    info = llm.weight_info()
    if info["weights"] != "live":
        return
    if llm.weight_update_status()["active"] is None:
        assert llm.verify_weights()["result"] != "different"
    if info["digest"] is None:
        return
    found = [folder for folder in folders if _digest(folder) == info["digest"]]
    for folder in found[:1]:
        check(llm, folder)


@functools.cache
def _digest(folder: Path) -> str:
    tensors = {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    digests = ops.digest(list(tensors.values()))
    return ops.manifest_digest(
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, digest)
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    )


def differing(llm: Any, folder: Path | str) -> list[str]:
    """`rank: name` of all that is not what a fresh load has."""
    try:
        found = llm.collective_rpc("tests_differing", args=(str(folder),))
    except (AttributeError, NotImplementedError):
        # In this process; elsewhere the worker has to be an `Oracle`.
        found = llm.collective_rpc(differing_on, args=(str(folder),))
    return [f"{rank}: {name}" for rank, names in enumerate(found) for name in names]


class Oracle:
    """A worker extension, for engines whose ranks are processes of their own."""

    def tests_differing(self, folder: str) -> list[str]:
        """See `differing`, of this rank."""
        return differing_on(self, folder)


def differing_on(worker: Any, folder: str) -> list[str]:
    """The parameters and quantised layers of one rank that a fresh load has not."""
    live = worker.model_runner.get_model()
    fresh = _fresh(worker, folder)
    counterparts = dict(fresh.named_modules())
    found = []
    with torch.no_grad():
        for name, layer, key, param in parameters(live):
            path, _, _ = name.rpartition(".")
            expected = _content(counterparts[path], key)
            if not _is_same(readback.content(layer, key, param), expected):
                found.append(name)
        for name, layer in layers(live):
            if is_quantised(layer) and not _is_same(
                _product(layer, worker.device),
                _product(counterparts[name], worker.device),
            ):
                found.append(name)
    return found


def _fresh(worker: Any, folder: str) -> torch.nn.Module:
    config = copy.copy(worker.vllm_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.model = folder
    config.model_config.model_weights = ""
    config.load_config = copy.copy(config.load_config)
    config.load_config.load_format = "auto"
    # Layers enter themselves in the compilation config when they are built.
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # It is only read. Torch's compiler would keep it for as long as the process lives.
    config.compilation_config.mode = CompilationMode.NONE
    # Upstream's loader alone: nothing of ours gives the model memory or changes it.
    config.additional_config = {"inflight": {"staging": "off"}}
    loader = get_model_loader(config.load_config)
    with set_current_vllm_config(config), torch.no_grad():
        return loader.load_model(config, config.model_config)


def _content(layer: Any, key: str) -> torch.Tensor:
    param = layer._parameters.get(key)
    if param is None:  # a buffer that is made a parameter to be replaced
        return layer._buffers[key]
    return readback.content(layer, key, param)


def _product(layer: Any, device: torch.device) -> torch.Tensor:
    """What a quantised layer makes of the unit matrix, by the kernel that decodes."""
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    unit = torch.eye(width, dtype=layer.params_dtype, device=device)
    product: torch.Tensor = layer.quant_method.apply(layer, unit)
    return product


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.is_meta or other.is_meta:
        return False  # what has no content cannot be served
    bits: Sequence[torch.Tensor] = [
        tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)
    ]
    return torch.equal(*bits)
