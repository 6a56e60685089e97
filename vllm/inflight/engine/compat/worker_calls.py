"""Upstream's worker calls that update weights become calls of the controller.

Clients of upstream drive an update by worker methods. Such clients are its own `LLM`,
its front ends (also the one in Rust), and frameworks that use `collective_rpc`. On the
workers, these calls would load the shadow weights and never commit them. So the engine
core intercepts them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.calls import (
    AbortUpdate,
    Call,
    CommitUpdate,
    InitTransport,
    JoinGroup,
    MissBroadcast,
    PrepareUpdate,
    ReceiveChunk,
    ShutdownTransport,
    StartUpdate,
)
from vllm.inflight.engine.compat import pipelinerl
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.errors import InflightError, Malformed
from vllm.inflight.releases import fields as release_fields

Answer = Any
"""The result of a call of the controller: an envelope, or a Future of one."""


def ask(controller: EngineContext, call: Call) -> Answer:
    """Call the controller between two steps, from any thread."""
    if not controller.in_process:
        return controller.call(call)
    return controller.step_queue.run(lambda: controller.call(call))


def _start(controller: EngineContext, kwargs: dict[str, Any]) -> Answer:
    release_fields.settled(kwargs, release_fields.START)
    return ask(controller, StartUpdate())


def finish(controller: EngineContext, update_id: str | None = None) -> Answer:
    """Prepare, and commit in a later queued call once every rank is prepared."""
    if update_id is None and (active := controller.updates.ledger.active) is not None:
        update_id = active.update_id  # both calls are for this update
    prepared = ask(controller, PrepareUpdate(update_id))
    commit = CommitUpdate(update_id)
    return _then(controller, prepared, lambda: ask(controller, commit))


def _receive_whole(controller: EngineContext, request: object) -> Answer:
    """PipelineRL's update in one call: start, receive the broadcast, finish."""
    announcement, began = uuid.uuid4().hex, time.monotonic()
    update_id = announcement

    def miss() -> Answer:
        age_s = time.monotonic() - began
        missed = MissBroadcast(pipelinerl.GROUP, announcement, age_s)
        return ask(controller, missed)

    def finish_or_abort() -> Answer:
        # The caller does not know the update and could not abort it.
        end = finish(controller, update_id)
        abort = AbortUpdate(update_id)
        return _then(controller, end, otherwise=lambda: ask(controller, abort))

    def begin_and_receive() -> Answer:
        label, info = pipelinerl.announced(pipelinerl.plain(request), announcement)
        start = StartUpdate(update_id, label, transport="groups")
        started = ask(controller, start)
        if "error" in started:
            return started
        return ask(controller, ReceiveChunk(info, update_id))

    try:
        received = begin_and_receive()
    except InflightError as error:
        received = {"error": error.to_dict()}
    return _then(controller, received, finish_or_abort, otherwise=miss)


def _then(
    controller: EngineContext,
    answer: Answer,
    following: Callable[[], Answer] | None = None,
    otherwise: Callable[[], Any] = lambda: None,
) -> Answer:
    """Call `following` in a later queued call, if `answer` is not an error.

    Without `following`, the result is `answer`. After an error, `otherwise` is called,
    and the result is the error.
    """

    def settled(found: dict[str, Any]) -> Answer:
        if "error" not in found:
            return found if following is None else following()
        otherwise()
        return found

    return after(controller, answer, settled)


def after(
    controller: EngineContext,
    answer: Answer,
    following: Callable[[dict[str, Any]], Answer],
) -> Answer:
    """Call `following` with the envelope of `answer`, in a later queued call.

    Returns the result of `following`, or a Future of it.
    """
    if isinstance(answer, Future) and controller.in_process:
        answer = answer.result()
    if not isinstance(answer, Future):
        return following(answer)
    result: Future[dict[str, Any]] = Future()

    def pass_on(done: Future[Any]) -> None:
        found = done.result()
        if isinstance(found, Future):
            found.add_done_callback(pass_on)
        else:
            result.set_result(found)

    def arrived(done: Future[dict[str, Any]]) -> None:
        envelope = done.result()
        queued = controller.step_queue.submit(lambda: following(envelope))
        queued.add_done_callback(pass_on)

    answer.add_done_callback(arrived)
    return result


PHASES: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
    "init_weight_transfer_engine": lambda controller, kwargs: ask(
        controller, InitTransport(kwargs.get("init_info"))
    ),
    "shutdown_weight_transfer_engine": lambda controller, kwargs: ask(
        controller, ShutdownTransport()
    ),
    "start_weight_update": lambda controller, kwargs: _start(controller, kwargs),
    "start_draft_weight_update": lambda controller, kwargs: ask(
        controller, StartUpdate(manifest={"format": 1, "draft": True})
    ),
    "update_weights": lambda controller, kwargs: ask(
        controller, ReceiveChunk(kwargs.get("update_info"))
    ),
    "finish_weight_update": lambda controller, kwargs: finish(controller),
}
"""Upstream's worker methods that change weights, and the calls that replace them."""

_PARAMETERS = {
    "init_weight_transfer_engine": ("init_info",),
    "start_weight_update": tuple(release_fields.START),
    "update_weights": ("update_info",),
}
"""The parameters of these methods in order, also those of older vLLM releases."""


def intercepts(
    vllm_config: upstream.VllmConfig,
    method: str | Callable[..., Any],
    args: tuple[Any, ...],
    *,
    has_actor_group: bool = False,
) -> bool:
    """Whether a worker call becomes calls of the controller.

    Args:
        vllm_config: of the engine.
        method: name of the worker method, or a function.
        args: its positional arguments.
        has_actor_group: see `EngineContext.has_actor_group`.

    """
    if not isinstance(method, str):
        return False
    return method in PHASES or pipelinerl.takes(
        vllm_config, method, args, has_actor_group=has_actor_group
    )


def _answer(
    controller: EngineContext,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Answer:
    if method in PHASES:
        return PHASES[method](controller, _named(method, args, kwargs or {}))
    if method == pipelinerl.RECEIVE:
        return _receive_whole(controller, args[0])
    call = pipelinerl.CALLS[method](*args)
    controller.has_actor_group = isinstance(call, JoinGroup)
    return ask(controller, call)


def _named(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a worker method by name; raises `Malformed` for unknown ones."""
    names = _PARAMETERS.get(method, ())
    unknown = [name for name in kwargs if name not in names]
    if unknown or len(args) > len(names):
        extra = repr(unknown[0]) if unknown else f"number {len(names) + 1}"
        raise Malformed(
            f"the worker method {method} has no argument {extra}; it takes "
            + (", ".join(names) or "none")
        )
    return dict(zip(names, args, strict=False)) | kwargs


def execute(
    controller: EngineContext,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Execute a worker call by calls of the controller.

    Returns:
        the reply of `collective_rpc`: None for each rank, or a Future of that.

    Raises:
        InflightError: the controller rejected the call; the message names the remedy.

    """
    answer = _answer(controller, method, args, kwargs)
    return delivered(controller, answer, lambda _: [None] * controller.num_ranks)


def delivered(
    controller: EngineContext, answer: Answer, read: Callable[[Any], list[Any]]
) -> Any:
    """The reply of `collective_rpc` that `read` makes of an answer, or a Future of it.

    Raises:
        InflightError: the answer is an error.

    """
    if isinstance(answer, Future) and controller.in_process:
        answer = answer.result()
    if not isinstance(answer, Future):
        return read(_ok(answer))
    reply: Future[list[Any]] = Future()

    def done(finished: Future[dict[str, Any]]) -> None:
        try:
            reply.set_result(read(_ok(finished.result())))
        except Exception as error:
            reply.set_exception(error)

    answer.add_done_callback(done)
    return reply


def _ok(envelope: dict[str, Any]) -> Any:
    if "error" in envelope:
        raise InflightError.from_dict(envelope["error"])
    return envelope["ok"]
