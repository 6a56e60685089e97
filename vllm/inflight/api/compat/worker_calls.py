"""Upstream's worker calls that update weights, for all engines of one front end.

Each engine core turns such a call into a call of its own controller
(engine/compat/worker_calls.py). With several engines, each core would open an update of
its own and commit alone. So the front end intercepts the call. It becomes one
transaction of all engines, like the engine method of the same name. The front end does
the same for one engine if the call has large arguments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.api.compat import pipelinerl
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.request.fields import opening
from vllm.inflight.calls import StartUpdate
from vllm.inflight.engine.compat import worker_calls
from vllm.inflight.engine.compat.pipelinerl import RECEIVE
from vllm.inflight.packed import BLOCK
from vllm.inflight.releases import fields as release_fields

DRAFT = {"format": 1, "draft": True}


async def _start(
    control: Control, is_checkpoint_format: bool | None = None, **options: Any
) -> Reply:
    release_fields.settled(
        {"is_checkpoint_format": is_checkpoint_format}, release_fields.START
    )
    return await control.start(StartUpdate(**opening(options)))


CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    "init_weight_transfer_engine": Control.init_transport,
    "shutdown_weight_transfer_engine": Control.shutdown_transport,
    "start_weight_update": _start,
    "start_draft_weight_update": lambda control: control.start(
        StartUpdate(manifest=dict(DRAFT))
    ),
    "update_weights": Control.update,
    "finish_weight_update": Control.finish,
    RECEIVE: pipelinerl.receive,
}
"""Intercepted worker methods, and the call of all engines that replaces each."""


def takes(
    engine: upstream.EngineClient,
    method: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> bool:
    """Whether a worker call of `engine`, an `AsyncLLM`, becomes a call of all engines.

    A single engine core executes the call itself unless its `update_info` is large. The
    front end then packs it first (packed.py).
    """
    if not isinstance(method, str) or method not in CALLS:
        return False
    if not worker_calls.intercepts(engine.vllm_config, method, args):
        return False
    info = args[0] if args else (kwargs or {}).get("update_info")
    return control_of(engine).num_engines > 1 or _is_large(info)


def _is_large(info: object) -> bool:
    """Whether an `update_info` has a list that is long enough to be packed."""
    if isinstance(info, list):
        return any(map(_is_large, info))
    values = info.values() if isinstance(info, dict) else ()
    return any(isinstance(v, list | dict) and len(v) > BLOCK for v in values)


async def carry_out(
    engine: upstream.EngineClient,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> list[None]:
    """Make the call; returns the reply of `collective_rpc`, one None for each rank.

    Raises:
        InflightError: an engine rejected the call; the message names the remedy.

    """
    await CALLS[method](control_of(engine), *args, **(kwargs or {}))
    return [None] * int(engine.vllm_config.parallel_config.world_size)
