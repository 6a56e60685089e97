"""PipelineRL's door: its request, its worker calls, its method of the engine.

A `WeightUpdateRequest` lists all tensors of a version in the order in which the trainer
broadcasts them. PipelineRL pauses, writes and resumes. Here they go into the shadow
weights while decoding goes on, and the version is committed when it is whole.
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
    """Receive and serve what a `WeightUpdateRequest` announces."""
    return await receive(control_of(engine), body) | {"status": "ok"}


async def receive(control: Control, request: object) -> Reply:
    """The same, from a request in any of the forms in which it travels."""
    async with control.announced(GROUP) as announcement:
        label, info = announced(plain(request), announcement)
        start = StartUpdate(weight_version=label, transport="groups")
        async with control.in_one_call(start) as started:
            await control.update(info, started["update_id"], chunk=0)
            return await control.finish(update_id=started["update_id"])


async def pause_and_update(self: upstream.AsyncLLM, request: object) -> Reply:
    """PipelineRL's method: receive and serve a version; nothing has to be paused.

    Args:
        self: the engine.
        request: PipelineRL's `WeightUpdateRequest`, or its dict.

    Returns:
        That of `finish_weight_update`.

    Raises:
        WeightsMismatch: tensors are missing or not the model's.
        TransferFault: the bytes stopped coming.

    """
    return await receive(control_of(self), request)


async def init_actor_update_group(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Have the workers join the trainer's group, as PipelineRL's start-up does."""
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
