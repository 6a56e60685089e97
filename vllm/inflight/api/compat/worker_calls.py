"""Upstream's worker calls that update weights, for all engines of one front end.

Each engine core turns such a call into a call of its own controller
(engine/compat/worker_calls.py). With several engines, each core would open an update of
its own and commit alone. So the front end intercepts the call. It becomes one
transaction of all engines, like the engine method of the same name. The front end does
the same for one engine if the call has large arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.api.compat import pipelinerl
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.request.fields import opening
from vllm.inflight.calls import ReadUpdates, ReadVersion, StartUpdate
from vllm.inflight.engine.compat import worker_calls
from vllm.inflight.engine.compat.pipelinerl import RECEIVE
from vllm.inflight.errors import InflightError
from vllm.inflight.frameworks.table import known_calls
from vllm.inflight.packed import BLOCK
from vllm.inflight.releases import fields as release_fields

logger = upstream.init_logger(__name__)

DRAFT = {"format": 1, "draft": True}

POLL_S, MOST_POLLS = 0.2, 3000
"""How often, and how many times, engines are asked whether an update is under way."""


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


async def compared(
    engine: upstream.EngineClient, method: object, call: Awaitable[Any]
) -> Any:
    """Make a worker call; log an error if it leaves engines with different weights.

    Each engine adopts the call by itself, since its workers receive the tensors. So one
    engine may commit a version that another one rejects.
    """
    is_known = method in {row.method for row in known_calls()}
    if not is_known or control_of(engine).num_engines < 2:
        return await call
    try:
        replies = await call
    except Exception:
        # The other engines have not replied, and may commit later.
        task = asyncio.create_task(_compare_at_last(engine, method))
        _comparing.add(task)
        task.add_done_callback(_comparing.discard)
        raise
    await _compare(engine, method)
    return replies


_comparing: set[asyncio.Task[None]] = set()
"""Comparisons that are under way; asyncio keeps no task alive."""


async def _compare_at_last(engine: upstream.EngineClient, method: object) -> None:
    """Compare the engines when none has an update under way."""
    with suppress(InflightError, upstream.EngineDeadError):
        for _ in range(MOST_POLLS):
            await asyncio.sleep(POLL_S)
            states = await control_of(engine).ask(ReadUpdates())
            if not any(state["active"] for state in states):
                break
        await _compare(engine, method)


async def _compare(engine: upstream.EngineClient, method: object) -> None:
    control = control_of(engine)
    versions = await control.ask(ReadVersion())
    told = [f"{each['weight_version']!r}, digest {each['digest']}" for each in versions]
    if len({each["digest"] for each in versions}) > 1:
        logger.error(
            "after %s the engines serve different weights: %s. Send the version again, "
            "or publish one to all of them",
            method,
            "; ".join(f"engine {n}: {text}" for n, text in enumerate(told)),
        )


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
