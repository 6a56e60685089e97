"""What a control call asks for, checked where it takes effect.

The routes read text as well; who calls in Python says what he means.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import EngineFault, InflightError, Malformed
from vllm.inflight.update import MAX_NAME_CHARS, PauseMode


def read_flag(body: dict[str, Any], name: str) -> bool:
    """Whether `name` is asked for; raises `Malformed` unless it is a bool, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Malformed(f"{name} must be true or false, got {value!r:.80}")
    return bool(value)


def read_mode(body: dict[str, Any], default: str) -> PauseMode:
    """Its `mode`; `default` where there is none, which `""` or 0 is not."""
    value = body.get("mode")
    return PauseMode.parse(default if value is None else value)


def check_owner(value: object) -> str | None:
    """`owner` of a request."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise Malformed(
            f"owner must be a string of 1 to {MAX_NAME_CHARS} characters, got "
            f"{value!r:.80}"
        )
    return value


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
