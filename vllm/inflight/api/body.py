"""The body of a request: read no further than allowed, and plain all through.

What a body says travels on to engine cores, in MessagePack: numbers have to fit into
64 bits, and lists and objects lie in each other no deeper than there.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from vllm.inflight.errors import Malformed
from vllm.inflight.update import INT64

MAX_DEPTH = 32
"""Of lists and objects in each other; a manifest has 4."""


async def read(request: Request, largest: int) -> bytes:
    """The body, of at most `largest` bytes; raises `Malformed` when there are more.

    What its sender says about its length is believed if it is too much, and not else.
    """
    refusal = Malformed(f"the body is larger than the {largest} bytes this route takes")
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told[:20]) > largest:
        raise refusal
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > largest:
                raise refusal
    except ClientDisconnect:
        raise Malformed("the body ended before it was whole") from None
    return bytes(raw)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in it; raises `Malformed` unless there is one, or nothing."""
    if not raw.strip():
        return {}
    try:
        # Of bytes, json would take UTF-16, and halves of characters.
        text = raw.decode("utf-8-sig")
        body = json.loads(
            text, parse_int=_integer, parse_float=_number, parse_constant=_number
        )
        if "\\ud" in text.lower():
            # An escape of half a character cannot be said again in a reply.
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from None
    if body is None:
        return {}  # as a field that is null counts as left out
    if not isinstance(body, dict):
        raise Malformed("the body must be a JSON object")
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return body
    raise Malformed(f"the body is more than {MAX_DEPTH} lists and objects deep")


def _within(outer: Any) -> list[Any]:
    inner = outer.values() if isinstance(outer, dict) else outer
    return [value for value in inner if isinstance(value, dict | list)]


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else INT64
    if not -INT64 <= value < INT64:
        raise ValueError(f"{text:.40} does not fit into 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is no number")
    return value
