"""Upstream's phases, called on the workers, become calls of the gate.

Clients of upstream (its own `LLM` and front ends, a Rust one included, and
frameworks that use `collective_rpc`) drive an update by worker methods. On the
workers these would load into the second set and never commit it, so the engine
core takes them over before they get there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import release_fields
from vllm.inflight.engine.compat import pipelinerl
from vllm.inflight.errors import InflightError, Malformed

Answer = Any
"""What a call of the gate returns: an envelope, or a Future of one."""


def ask(gate: Any, method: str, body: dict[str, Any]) -> Answer:
    """A call of the gate between two steps, whichever thread makes it."""
    if not gate.in_process:
        return gate.call(method, body)
    return gate.turns.run(lambda: gate.call(method, body))


def _begin(gate: Any, kwargs: dict[str, Any]) -> Answer:
    release_fields.settled(kwargs, release_fields.START)
    return ask(gate, "begin", {})


def _finish(gate: Any, update: dict[str, Any]) -> Answer:
    """Seal, and commit in a turn of its own once every rank has voted."""
    if not update and (active := gate.updates.ledger.active) is not None:
        update = {"update_id": active.update_id}  # the same one, whatever comes between
    sealed = ask(gate, "seal", update)
    return _then(gate, sealed, lambda: ask(gate, "commit", update))


def _receive_whole(gate: Any, request: Any) -> Answer:
    """All of PipelineRL's update: begin, receive what is broadcast, vote, commit."""
    announcement, began = uuid.uuid4().hex, time.monotonic()
    update = {"update_id": announcement}

    def miss() -> Answer:
        missed = {"announcement": announcement, "age_s": time.monotonic() - began}
        return ask(gate, "miss", {"group_name": pipelinerl.GROUP} | missed)

    def finish() -> Answer:
        # Who made one call of it would not know that it is still staged.
        end = _finish(gate, update)
        return _then(gate, end, otherwise=lambda: ask(gate, "abort", update))

    def begin_and_receive() -> Answer:
        label, info = pipelinerl.announced(pipelinerl.plain(request), announcement)
        body = {"transport": "groups", "weight_version": label} | update
        begun = ask(gate, "begin", body)
        if "error" in begun:
            return begun
        return ask(gate, "receive", {"update_info": info} | update)

    try:
        received = begin_and_receive()
    except InflightError as error:
        received = {"error": error.to_dict()}
    return _then(gate, received, finish, otherwise=miss)


def _then(
    gate: Any,
    answer: Answer,
    following: Callable[[], Answer] | None = None,
    otherwise: Callable[[], Any] = lambda: None,
) -> Answer:
    """`following` in a turn of its own, once `answer` is there and no error.

    Without one it is the answer. After an error `otherwise`, and the error is told.
    """
    if isinstance(answer, Future) and gate.in_process:
        answer = answer.result()
    if not isinstance(answer, Future):
        if "error" not in answer:
            return answer if following is None else following()
        otherwise()
        return answer
    result: Future[dict[str, Any]] = Future()

    def pass_on(done: Future[Any]) -> None:
        found = done.result()
        if isinstance(found, Future):
            found.add_done_callback(pass_on)
        else:
            result.set_result(found)

    def arrived(done: Future[dict[str, Any]]) -> None:
        if "error" in (found := done.result()):
            told = gate.turns.submit(otherwise)
            told.add_done_callback(lambda _: result.set_result(found))
        elif following is None:
            result.set_result(found)
        else:
            gate.turns.submit(following).add_done_callback(pass_on)

    answer.add_done_callback(arrived)
    return result


PHASES: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
    "init_weight_transfer_engine": lambda gate, kwargs: ask(
        gate, "transport", {"order": "init", "init_info": kwargs.get("init_info")}
    ),
    "shutdown_weight_transfer_engine": lambda gate, kwargs: ask(
        gate, "transport", {"order": "shutdown"}
    ),
    "start_weight_update": lambda gate, kwargs: _begin(gate, kwargs),
    "start_draft_weight_update": lambda gate, kwargs: ask(
        gate, "begin", {"manifest": {"format": 1, "draft": True}}
    ),
    "update_weights": lambda gate, kwargs: ask(
        gate, "receive", {"update_info": kwargs.get("update_info")}
    ),
    "finish_weight_update": lambda gate, kwargs: _finish(gate, {}),
}
"""Worker methods of upstream that change weights, and what they become."""

_PARAMETERS = {
    "init_weight_transfer_engine": ("init_info",),
    "start_weight_update": tuple(release_fields.START),
    "update_weights": ("update_info",),
}
"""Their parameters in order, and those of vLLM's older releases."""


def intercepts(gate: Any, method: Any, args: tuple[Any, ...]) -> bool:
    """Whether a worker call is to become calls of the gate."""
    if not isinstance(method, str):
        return False
    return method in PHASES or pipelinerl.takes(gate, method, args)


def _answer(
    gate: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Answer:
    if method in PHASES:
        return PHASES[method](gate, _named(method, args, kwargs or {}))
    if method == pipelinerl.RECEIVE:
        return _receive_whole(gate, args[0])
    body = pipelinerl.CALLS[method](*args)
    gate.has_actor_group = body["order"] == "join"
    return ask(gate, "transport", {"transport": "groups"} | body)


def _named(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a phase by name; raises `Malformed` if it has no such one."""
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
    gate: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Run a phase; the reply of `collective_rpc`, one None per rank, or a Future.

    Raises:
        InflightError: what the gate refused; its message names the remedy.

    """
    answer = _answer(gate, method, args, kwargs)
    if isinstance(answer, Future) and gate.in_process:
        answer = answer.result()
    if not isinstance(answer, Future):
        return _reply(gate, answer)
    reply: Future[list[None]] = Future()

    def done(finished: Future[dict[str, Any]]) -> None:
        try:
            reply.set_result(_reply(gate, finished.result()))
        except Exception as error:
            reply.set_exception(error)

    answer.add_done_callback(done)
    return reply


def _reply(gate: Any, envelope: dict[str, Any]) -> list[None]:
    if "error" in envelope:
        raise InflightError.from_dict(envelope["error"])
    return [None] * gate.num_ranks
