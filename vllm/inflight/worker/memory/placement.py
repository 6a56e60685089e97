"""Where the live weights and the shadow weights of a model lie on a GPU.

| when | memory |
|---|---|
| while the model is loaded | everything the model allocates comes from an arena |
| once the model is loaded | the arena has few large handles and a shadow range |
| from then on | nothing is allocated, and nothing moves |

The arena is open around upstream's model loader alone. A model runner makes other
tensors beside its model (samplers, LoRA stacks, input buffers). These change while
the engine serves, and must stay where they are at a flip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import (
    ArenaTorn,
    ConfigError,
    InflightError,
    OutOfDeviceMemory,
)
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model import support
from vllm.inflight.worker.model.one_set import one_set_obstacle
from vllm.inflight.worker.model_state import ModelState, recall

LEAST_SHARE = 0.05
"""Two sets of weights leave this share of an engine's memory, or there is one. The
share is for the KV cache and the activations of a step."""

logger = upstream.init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """The arena that holds the weights of one model."""

    arena: Arena | None
    reason: str | None
    """Why the arena has no shadow range; None if it has one."""
    is_short: bool = False
    """Whether it has none because two sets of weights do not fit the GPU."""


def placement_of(model: torch.nn.Module) -> Placement:
    """Where the weights of `model` lie, as `load_into_arena` left them."""
    return recall(model, Placement) or Placement(
        None, "its loader goes past upstream's BaseModelLoader"
    )


def is_wanted(vllm_config: upstream.VllmConfig) -> bool:
    """Whether the weights of an engine are to lie in an arena."""
    return (
        torch.device(vllm_config.device_config.device).type == "cuda"
        and InflightConfig.of(vllm_config).staging in ("auto", "device")
        and support.config_obstacle(vllm_config) is None
    )


def load_into_arena(
    load: Callable[[], torch.nn.Module], vllm_config: upstream.VllmConfig
) -> torch.nn.Module:
    """Run `load` so that the model's weights lie in an arena with room for two sets.

    Raises:
        ConfigError: `--inflight-staging device` is set, and there is no room.

    """
    if not is_wanted(vllm_config):
        return load()
    staging = InflightConfig.of(vllm_config).staging
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        arena = Arena.open(device)
    except (RuntimeError, InflightError) as error:
        return _report(load(), Placement(None, str(error)), staging)
    try:
        with arena.loading():
            model = load()
        placement = _add_shadow_range(model, arena, vllm_config)
    except BaseException:
        arena.close()
        raise
    return _report(model, placement, staging)


def release(model: torch.nn.Module) -> None:
    """Free the memory; nothing may use `model` or its shadow model any more."""
    placement = ModelState.of(model).pop(Placement)
    if placement is not None and placement.arena is not None:
        placement.arena.close()


def _report(
    model: torch.nn.Module, placement: Placement, staging: str
) -> torch.nn.Module:
    ModelState.of(model).set(placement)
    if placement.reason is None:
        return model
    if staging == "device":
        release(model)
        raise ConfigError(
            f"--inflight-staging device cannot be had: {placement.reason}"
        )
    logger.warning("the arena gets no shadow range: %s", placement.reason)
    return model


def _add_shadow_range(
    model: torch.nn.Module, arena: Arena, vllm_config: upstream.VllmConfig
) -> Placement:
    # Asked before the shadow range takes memory: not every model can use one.
    if (reason := support.support_obstacle(model, vllm_config)) is not None:
        return Placement(arena, reason)
    for name, tensor in tensors(model):
        if not arena.contains(tensor):
            reason = f"{name} was not allocated by the thread that loads the model"
            return Placement(arena, reason)
    try:
        arena.consolidate()
        arena.pair()
    except ArenaTorn:
        raise
    except InflightError as error:
        # The live weights are whole, whatever happened. Only the shadow range is
        # missing.
        return Placement(arena, str(error), isinstance(error, OutOfDeviceMemory))
    runs = arena.runs()
    both = 2 * sum(num_bytes for _, num_bytes in runs)
    if (reason := _lack_of_room(both, vllm_config)) is not None:
        can_have_one = InflightConfig.of(vllm_config).staging == "auto"
        if can_have_one and one_set_obstacle(model, vllm_config) is None:
            arena.unpair()
            return Placement(arena, reason, is_short=True)
    logger.info(
        "shadow weights lie beside the live weights: %.2f GiB in %d handles",
        sum(num_bytes for _, num_bytes in runs) / 2**30,
        len(runs),
    )
    return Placement(arena, None)


def _lack_of_room(num_bytes: int, vllm_config: upstream.VllmConfig) -> str | None:
    """Why two sets leave too little for a KV cache; None if they leave enough.

    Args:
        num_bytes: of both sets, which have their memory.
        vllm_config: of the engine.

    """
    cache = vllm_config.cache_config
    free, total = torch.cuda.mem_get_info()
    asked = cache.kv_cache_memory_bytes
    budget = int(total * cache.gpu_memory_utilization)
    left = free if asked else budget - num_bytes
    if left >= (asked or budget * LEAST_SHARE):
        return None
    return (
        f"two sets of weights take {num_bytes / 2**30:.2f} GiB and leave "
        f"{max(0, left) / 2**30:.2f} GiB for the KV cache and the steps"
    )


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of `model` that has bytes, once."""
    for name, tensor in model.named_parameters():
        if tensor.numel():
            yield name, tensor
