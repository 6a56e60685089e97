"""The envelope of an answer to a control call: `{"ok": …}` or `{"error": …}`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import EngineFault, InflightError

logger = upstream.init_logger(__name__)


def enveloped(call: Callable[[], Any]) -> Any:
    """`{"ok": …}`, `{"error": …}`, or a Future of one where `call` returns a Future."""
    try:
        answer = call()
    except Exception as error:
        return {"error": _described(error)}
    if not isinstance(answer, Future):
        return {"ok": answer}
    reply: Future[dict[str, Any]] = Future()
    answer.add_done_callback(lambda done: reply.set_result(_envelope(done)))
    return reply


def watched(call: Callable[[], Any], told: Callable[[BaseException], None]) -> Any:
    """What `call` returns or raises; `told` of its failure, also of a later one."""
    try:
        answer = call()
    except Exception as error:
        told(error)
        raise
    if not isinstance(answer, Future):
        return answer

    def arrived(done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            told(error)

    answer.add_done_callback(arrived)
    return answer


def _envelope(done: Future[Any]) -> dict[str, Any]:
    error = done.exception()
    return {"ok": done.result()} if error is None else {"error": _described(error)}


def _described(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, InflightError):
        logger.error("a control call failed", exc_info=error)
        error = EngineFault(f"{type(error).__name__}: {error}")
    return error.to_dict()
