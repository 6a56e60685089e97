"""Upstream's phases, called on the workers, become calls of the gate.

Clients of upstream (its own `LLM` and front ends, a Rust one included, and
frameworks that use `collective_rpc`) drive an update by worker methods. On the
workers these would load into the second set and never commit it, so the engine
core takes them over before they get there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight.errors import Conflict, InflightError

Answer = Any
"""What a call of the gate returns: an envelope, or a Future of one."""


def _draft(gate: Any, kwargs: dict[str, Any]) -> Answer:
    raise Conflict("draft models cannot be updated in flight in this release")


def _finish(gate: Any, kwargs: dict[str, Any]) -> Answer:
    """Seal, and commit in a turn of its own once every rank has voted."""
    sealed = gate.call("seal", {})
    if not isinstance(sealed, Future):
        return sealed if "error" in sealed else gate.call("commit", {})
    if gate.in_process:
        envelope = sealed.result()
        return envelope if "error" in envelope else gate.call("commit", {})
    answer: Future[dict[str, Any]] = Future()

    def voted(done: Future[dict[str, Any]]) -> None:
        if "error" in done.result():
            answer.set_result(done.result())
            return
        turn = gate.turns.submit(lambda: gate.call("commit", {}))
        turn.add_done_callback(lambda t: answer.set_result(t.result()))

    sealed.add_done_callback(voted)
    return answer


PHASES: dict[str, Callable[[Any, dict[str, Any]], Answer]] = {
    "init_weight_transfer_engine": lambda gate, kwargs: gate.call(
        "transport", {"order": "init", "init_info": kwargs.get("init_info")}
    ),
    "shutdown_weight_transfer_engine": lambda gate, kwargs: gate.call(
        "transport", {"order": "shutdown"}
    ),
    "start_weight_update": lambda gate, kwargs: gate.call("begin", {}),
    "start_draft_weight_update": _draft,
    "update_weights": lambda gate, kwargs: gate.call(
        "receive", {"update_info": kwargs.get("update_info")}
    ),
    "finish_weight_update": _finish,
}
"""Worker methods of upstream that change weights, and what they become."""

_POSITIONAL = {
    "init_weight_transfer_engine": "init_info",
    "update_weights": "update_info",
}


def carry_out(
    gate: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Run a phase; the reply of `collective_rpc`, one None per rank, or a Future.

    Raises:
        InflightError: what the gate refused; its message names the remedy.

    """
    named = dict(kwargs or {})
    if args:
        named[_POSITIONAL[method]] = args[0]
    answer = PHASES[method](gate, named)
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
