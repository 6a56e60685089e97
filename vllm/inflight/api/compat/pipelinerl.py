"""PipelineRL's interface: its HTTP requests, its worker calls, its engine method.

A `WeightUpdateRequest` lists all tensors of a version in the order in which the trainer
broadcasts them. PipelineRL itself pauses, writes the weights and resumes. Here the
tensors go into the shadow weights while decoding goes on. The version is committed when
it is complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import StartUpdate
from vllm.inflight.engine.compat.pipelinerl import GROUP, announced, group, plain
from vllm.inflight.errors import Malformed

Handler = Callable[[Any, dict[str, Any]], Awaitable[Reply]]


async def receive_weight_update(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Receive and commit the version that a `WeightUpdateRequest` lists."""
    return await receive(control_of(engine), body) | {"status": "ok"}


async def receive(control: Control, request: object) -> Reply:
    """Receive and commit a version; `request` may be an object, a dict or JSON."""
    async with control.announced(GROUP) as announcement:
        label, info = announced(plain(request), announcement)
        start = StartUpdate(weight_version=label, transport="groups")
        return await control.update_in_one_call([info], start=start, finish={})


async def pause_and_update(self: upstream.AsyncLLM, request: object) -> Reply:
    """PipelineRL's method: receive and commit a version, without a pause.

    Args:
        self: the engine.
        request: PipelineRL's `WeightUpdateRequest`, or its dict.

    Returns:
        The reply of `finish_weight_update`.

    Raises:
        WeightsMismatch: tensors are missing or not the model's.
        TransferFault: the bytes stopped coming.

    """
    return await receive(control_of(self), request)


async def init_actor_update_group(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Join the trainer's group on all workers, as PipelineRL does at its start."""
    names = ("actor_idx", "actor_ngpus", "init_method", "world_size")
    for name in names:
        if name not in body:
            raise Malformed(f"the body needs the field {name!r}")
    await control_of(engine).join_group(group(*(body[name] for name in names)))
    return {"status": "ok"}


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/receive_weight_update"): receive_weight_update,
    ("POST", "/init_actor_update_group"): init_actor_update_group,
}
