"""Where the two sets of weights of a model live on a GPU.

    while the model is loaded      everything it allocates is carved from an arena
    once it is loaded              few large handles, and a second range beside it
    from then on                   nothing is allocated, and nothing moves

The arena is opened around upstream's model loader, and no wider: what a model runner
makes beside its model (samplers, LoRA stacks, input buffers) changes while it serves
and must stay where it is when the two sets change places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import ArenaTorn, ConfigError, InflightError
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model import support
from vllm.inflight.worker.model_state import ModelState, recall

logger = upstream.init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """The home of one model's weights."""

    arena: Arena | None
    reason: str | None
    """Why the arena holds one set only; None if it holds two."""


def placement_of(model: torch.nn.Module) -> Placement:
    """Where `model` lives, as `settle_in` has left it."""
    return recall(model, Placement) or Placement(
        None, "its loader goes past upstream's BaseModelLoader"
    )


def is_wanted(vllm_config: Any) -> bool:
    """Whether the weights of an engine are to lie in an arena."""
    return (
        torch.device(vllm_config.device_config.device).type == "cuda"
        and InflightConfig.of(vllm_config).staging in ("auto", "device")
        and support.config_obstacle(vllm_config) is None
    )


def load_into_arena(
    load: Callable[[], torch.nn.Module], vllm_config: Any
) -> torch.nn.Module:
    """Run `load` so that the model's weights lie in an arena with room for two sets.

    Raises:
        ConfigError: `--inflight-staging device` was asked for and cannot be had.

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
        residence = _add_shadow_range(model, arena, vllm_config)
    except BaseException:
        arena.close()
        raise
    return _report(model, residence, staging)


def release(model: torch.nn.Module) -> None:
    """Give the memory back; nothing may touch `model` or its shadow any more."""
    placement = ModelState.of(model).pop(Placement)
    if placement is not None and placement.arena is not None:
        placement.arena.close()


def _report(
    model: torch.nn.Module, residence: Placement, staging: str
) -> torch.nn.Module:
    ModelState.of(model).set(residence)
    if residence.reason is None:
        return model
    if staging == "device":
        release(model)
        raise ConfigError(
            f"--inflight-staging device cannot be had: {residence.reason}"
        )
    logger.warning("weights get no second set of pages: %s", residence.reason)
    return model


def _add_shadow_range(
    model: torch.nn.Module, arena: Arena, vllm_config: Any
) -> Placement:
    # Before a second set takes its memory: not every model can use one.
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
        # The live set is whole, whatever happened: it only has no second one.
        return Placement(arena, str(error))
    runs = arena.runs()
    logger.info(
        "a second set of weights lies beside the live one: %.2f GiB in %d handles",
        sum(num_bytes for _, num_bytes in runs) / 2**30,
        len(runs),
    )
    return Placement(arena, None)


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of `model` that has bytes, once."""
    for name, tensor in model.named_parameters():
        if tensor.numel():
            yield name, tensor
