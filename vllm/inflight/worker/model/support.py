"""Which models can be updated in flight; decided when the engine starts.

The weights of a layer can be flipped if all of its state is in its parameters, or is
packed into `cpu_linear` (the GEMM of the CPU build). Any other tensor of a layer would
stay at the old version. So such a tensor is searched for here, and named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import ConfigError
from vllm.inflight.transport import base as transport
from vllm.inflight.worker.model import direct_writes, parallelism
from vllm.inflight.worker.model.kinds import classifier, mla, moe, quantized
from vllm.inflight.worker.model.kinds.hidden_weights import (
    IMPLEMENTATION,
    HiddenWeights,
    is_packed,
)
from vllm.inflight.worker.model.layers import buffer_names, layers

logger = upstream.init_logger(__name__)

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Drafters that find drafts in the text: they have no weights."""

WITH_WEIGHTS = ("draft_model", "eagle", "eagle3", "mtp")
"""Drafters that are a second module tree beside their model (see drafter.py)."""

MTP = {
    "cpu": (
        "MiMoMTPModel",
        "Glm4MoeMTPModel",
        "Glm4MoeLiteMTPModel",
        "DeepSeekMTPModel",
        "ErnieMTPModel",
    ),
    "cuda": (
        "MiMoMTPModel",
        "Glm4MoeMTPModel",
        "Glm4MoeLiteMTPModel",
        "DeepSeekMTPModel",
        "ErnieMTPModel",
        "Qwen3NextMTP",
        "Qwen3_5MTP",
        "Qwen3_5MoeMTP",
    ),
}
"""Architectures of MTP layers, by the device on which they were shown to equal a fresh
engine. Upstream has one method for all."""

BESIDE_QUANTISED = ("draft_model", "eagle", "eagle3")
"""Drafters without quantisation that were tested beside a quantised model, on both
devices."""


MOST_ELEMENTS = 1 << 31
"""Elements from which on a parameter is too large for delta staging: a place in it has
32 bits."""


def config_obstacle(vllm_config: upstream.VllmConfig) -> str | None:
    """Why an engine with this configuration cannot be updated; None if it can.

    Raises:
        ConfigError: an option of this package has an invalid value.

    """
    return _answered(lambda: _config_obstacle(vllm_config))


def _answered(look: Callable[[], str | None]) -> str | None:
    """The answer of `look`; if it fails, the failure is the reason.

    A failure here must not keep an engine from starting that would start without this
    package.
    """
    try:
        return look()
    except ConfigError:
        raise
    except Exception as error:
        logger.exception("looking for what keeps updates out failed")
        return (
            "looking for what could keep updates out failed with "
            f"{type(error).__name__}: {error}"
        )


def _config_obstacle(vllm_config: upstream.VllmConfig) -> str | None:
    device = vllm_config.device_config.device_type
    drafting = vllm_config.speculative_config
    seen = WITHOUT_WEIGHTS + WITH_WEIGHTS
    if drafting is not None and drafting.method not in seen:
        return (
            "a drafter with weights is configured, of a kind that has not been "
            f"exchanged yet (--speculative-config, method {drafting.method!r})"
        )
    if (reason := _beside_drafter(vllm_config, device)) is not None:
        return f"a drafter with weights is configured, and {reason}"
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "encoder outputs of other engines are read (--ec-transfer-config)"
    if (
        reason := parallelism.parallelism_obstacle(vllm_config.parallel_config)
    ) is not None:
        return reason
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    if transfer is not None and (
        reason := transport.transport_obstacle(transfer.backend)
    ):
        return reason
    if (reason := _memory_of_others(vllm_config, device)) is not None:
        return reason
    model_config = vllm_config.model_config
    if model_config.enable_sleep_mode and model_config.sleep_mode_backend != "cumem":
        # The backend would have to know live and shadow weights, as worker/sleep.py
        # does.
        return f"sleep mode goes by the backend {model_config.sleep_mode_backend!r}"
    if device not in ("cpu", "cuda"):
        return f"weights are staged on CPU and CUDA, and the device is {device}"
    if device == "cpu" and InflightConfig.of(vllm_config).staging == "device":
        return "there is no GPU; 'auto' and 'host' are for the CPU build"
    return None


def _beside_drafter(vllm_config: upstream.VllmConfig, device: str) -> str | None:
    """Why a drafter cannot be flipped with this model; None if it can."""
    drafting = vllm_config.speculative_config
    if drafting is None or drafting.method in WITHOUT_WEIGHTS:
        return None
    if getattr(drafting, "parallel_drafting", False):
        return "it drafts in parallel, from a buffer that its checkpoint fills"
    draft_config = drafting.draft_model_config
    if drafting.method == "mtp":
        kinds = draft_config.architectures
        if set(kinds).isdisjoint(MTP.get(device, ())):
            return (
                f"its MTP layers are of a kind that has not been exchanged on {device} "
                f"yet ({', '.join(kinds)})"
            )
        if draft_config.model != vllm_config.model_config.model:
            return f"its MTP layers are not its model's own ({draft_config.model})"
    if draft_config is not None and draft_config.quantization is not None:
        return f"the drafter is quantised ({draft_config.quantization})"
    if (head := getattr(drafting, "draft_lm_head_quantization", None)) is not None:
        return f"it has a quantised copy of the model's head (in {head})"
    quantization = vllm_config.model_config.quantization
    if quantization is not None and drafting.method not in BESIDE_QUANTISED:
        return f"the model is quantised ({quantization})"
    if vllm_config.model_config.enable_sleep_mode:
        return "sleep mode is enabled (--enable-sleep-mode)"
    return None


def _memory_of_others(vllm_config: upstream.VllmConfig, device: str) -> str | None:
    """Why the weights lie in memory that an update may not write;

    None if they do not.
    """
    if device == "cpu":
        return None  # upstream offloads and maps nothing on a CPU
    loading = getattr(vllm_config, "load_config", None)
    given = getattr(loading, "model_loader_extra_config", None) or {}
    is_shared = getattr(loading, "load_format", None) == "ipc_cache"
    if is_shared and given.get("mode", "zero_copy") == "zero_copy":
        return (
            "its weights are mapped from a cache that other engines may share "
            "(--load-format ipc_cache); with the loader's mode 'copy' they are its own"
        )
    offloading = getattr(vllm_config, "offload_config", None)
    if offloading is None:
        return None
    flags = {
        "--offload-group-size": offloading.prefetch.offload_group_size,
        "--cpu-offload-gb": offloading.uva.cpu_offload_gb,
    }
    if used := [flag for flag, value in flags.items() if value]:
        return f"its weights are offloaded to the host ({', '.join(used)})"
    return None


def _offloader() -> str | None:
    """Why weights are not where they were loaded; None if they are."""
    offloader = upstream.get_offloader()
    if isinstance(offloader, upstream.NoopOffloader):
        return None
    if isinstance(offloader, upstream.UVAOffloader) and not offloader.cpu_offload_bytes:
        return None  # it offloads nothing, as on the CPU build
    return (
        f"its weights are offloaded by {type(offloader).__name__}, which moves them "
        "between the host and the device"
    )


def support_obstacle(
    live: torch.nn.Module, vllm_config: upstream.VllmConfig
) -> str | None:
    """Why the weights of `live` cannot be updated; None if they can.

    Raises:
        ConfigError: an option of this package has an invalid value.

    """
    return _answered(
        lambda: (
            _config_obstacle(vllm_config)
            or _offloader()
            or _model_obstacle(live, vllm_config)
        )
    )


def _model_obstacle(
    live: torch.nn.Module, vllm_config: upstream.VllmConfig
) -> str | None:
    device = vllm_config.device_config.device_type
    num_ranks = getattr(vllm_config.parallel_config, "world_size", 1)
    if (reason := direct_writes.direct_writes_obstacle(live, num_ranks)) is not None:
        return reason
    if (reason := classifier.classifier_obstacle(live, vllm_config)) is not None:
        return reason
    for name, layer in layers(live):
        method = getattr(layer, "quant_method", None)
        if quantized.is_processed(layer):
            if vllm_config.lora_config is not None:
                return f"layer {name} is quantised, and adapters are (--enable-lora)"
            cache = vllm_config.cache_config.cache_dtype
            if quantized.has_cache_scales(layer) and upstream.is_quantized_kv_cache(
                cache
            ):
                return (
                    f"layer {name} scales a KV cache of {cache} with numbers of its "
                    "checkpoint, and graphs are compiled with them"
                )
        if moe.is_experts(method):
            if (reason := moe.experts_obstacle(method)) is not None:
                return f"layer {name} {reason}"
        elif (
            quantized.is_quantised(layer)
            and (reason := quantized.quantized_obstacle(layer, device, num_ranks))
            is not None
        ):
            return f"layer {name} {reason}"
        for key in buffer_names(layer):
            return f"layer {name} loads the buffer {key!r}"
        reason = mla.derived_obstacle(layer) or _read_once(layer, device)
        if reason is not None:
            return f"layer {name} {reason}"
    for name, layer, path in HiddenWeights(live):
        return (
            f"layer {name or '<root>'} ({type(layer).__name__}) keeps weights "
            f"in its attribute {path!r}, which no update fills"
        )
    return None


def _read_once(layer: object, device: str) -> str | None:
    """What an attention layer reads of its weights in its first step only."""
    if hasattr(layer, "sink_populated"):
        return "writes its sinks into the KV cache in its first step, and never again"
    sinks = getattr(getattr(layer, IMPLEMENTATION, None), "sinks", None)
    if device == "cpu" and sinks is not None and sinks.dtype is torch.float16:
        return "casts its sinks in its first step (--dtype bfloat16 does not)"
    return None


def names_differ(live: torch.nn.Module, shadow: torch.nn.Module) -> str | None:
    """Why two module trees cannot be walked side by side; None if they can."""
    names = [name for name, _ in layers(live)]
    others = [name for name, _ in layers(shadow)]
    if names == others:
        return None
    odd = sorted(set(names) ^ set(others)) or [
        name for name, other in zip(names, others, strict=True) if name != other
    ]
    return f"a second copy of the model differs in the layers {odd[:4]}"


def difference(live: torch.nn.Module, shadow: torch.nn.Module) -> str | None:
    """Why two module trees of a model are not alike; None if they are."""
    if (reason := names_differ(live, shadow)) is not None:
        return reason
    for (name, a), (_, b) in zip(layers(live), layers(shadow), strict=True):
        if quantized.is_quantised(a):
            if (reason := quantized.difference(a, b)) is not None:
                return f"layer {name}: {reason}"
            continue
        if quantized.has_cache_scales(a):
            continue
        # A parameter that is None was registered as absent; a loader may fill it even
        # so.
        if odd := sorted(_filled(a) ^ _filled(b)):
            return f"layer {name} gains or loses the parameters {odd} after loading"
        for key in sorted(_filled(a)):
            param, other = a._parameters[key], b._parameters[key]
            assert param is not None
            assert other is not None
            if param.is_cpu:
                continue  # the CPU build takes packed weights out of their parameters
            if _form(param) != _form(other):
                return f"the layout of {name}.{key} changes after loading"
    return None


def layouts_differ(live: torch.nn.Module, hollow: torch.nn.Module) -> str | None:
    """Why the live parameters do not lie as loaders write them; None if they do.

    Args:
        live: the model that is served.
        hollow: a second tree of it, in load format.

    """
    for (name, a), (_, b) in zip(layers(live), layers(hollow), strict=True):
        if is_packed(a):
            return f"layer {name} is packed for the GEMM of the CPU build"
        for key in sorted(_filled(a) | _filled(b)):
            param, other = a._parameters.get(key), b._parameters.get(key)
            if param is None or other is None or _form(param) != _form(other):
                return f"the layout of {name}.{key} changes after loading"
            if param.numel() >= MOST_ELEMENTS:
                return f"{name}.{key} has {param.numel()} elements, too many for a log"
    return None


def _filled(layer: torch.nn.Module) -> set[str]:
    return {key for key, param in layer._parameters.items() if param is not None}


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
