"""Replies of control calls: errors travel as data, so that they keep their type."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import InflightError

logger = upstream.init_logger(__name__)


def enveloped(call: Callable[[], Any]) -> Any:
    """`{"ok": …}`, `{"error": …}`, or a Future of one where `call` returns a Future."""
    try:
        answer = call()
    except InflightError as error:
        return {"error": error.to_dict()}
    if not isinstance(answer, Future):
        return {"ok": answer}
    reply: Future[dict[str, Any]] = Future()
    answer.add_done_callback(lambda done: reply.set_result(_envelope(done)))
    return reply


def _envelope(done: Future[Any]) -> dict[str, Any]:
    error = done.exception()
    if error is None:
        return {"ok": done.result()}
    if isinstance(error, InflightError):
        return {"error": error.to_dict()}
    logger.error("a control call failed", exc_info=error)
    return {
        "error": {"code": "engine_fault", "message": f"{type(error).__name__}: {error}"}
    }
