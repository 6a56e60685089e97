"""Request bodies: their size, numbers and nesting are limited.

A body travels on to engine cores in MessagePack. So its numbers have to fit into 64
bits, and the nesting of its lists and objects is limited.

The event loop that parses a body also sends the tokens of every stream. So a large body
is parsed in slices (packed.py). Lists that only the ranks read are packed meanwhile.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from json.decoder import JSONDecoder
from re import compile as pattern
from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from vllm.inflight.errors import Malformed
from vllm.inflight.packed import Packer, TimeSlice, Work
from vllm.inflight.transport.sglang.request_tensors import LongText
from vllm.inflight.update import INT64, MAX_MANIFEST_BYTES

MAX_DEPTH = 32
"""The deepest nesting of lists and objects; a manifest has 4 levels."""

SMALL_BYTES = 1 << 16
"""A body of at most this size is parsed at once, which takes up to a millisecond."""

DECODED_BYTES, MARGIN_CHARS = 1 << 19, 1 << 16
"""Bytes of a large body to decode at once, and characters to have before an entry."""

LONG_BYTES = 1 << 16
"""A longer string is not copied, in a body that may have such strings."""

PACKED = ("manifest", "update_info", "names", "dtypes", "shapes")
"""Fields whose long lists only the ranks, or `Manifest.packed`, read."""

DEEP, ENTRIES = 3, 2
"""Lists and objects above level `DEEP` are parsed in slices. From level `ENTRIES` on,
list entries are parsed at once, because they are many and small."""

BYTE_ORDER_MARK = "\ufeff"
"""Some editors put it before a text."""

Body = bytes | bytearray

_space = pattern(r"[ \t\n\r]*").match


async def read(request: Request, largest: int) -> Body:
    """The body; raises `Malformed` if it has more than `largest` bytes.

    A `Content-Length` that is too large is rejected at once. A small one is ignored.
    """
    refusal = Malformed(
        f"the body is larger than the {largest} bytes that this route takes",
        remedy="Send tensors in several requests, or in a file of the engine's host.",
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > largest:
        raise refusal
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > largest:
                raise refusal
    except ClientDisconnect:
        raise Malformed("the body ended before it was complete") from None
    return raw  # not a copy, which would take long


def _no_json(message: str) -> Malformed:
    return Malformed(message, remedy="Send a JSON object, such as {} for no fields.")


def parse(raw: Body) -> dict[str, Any]:
    """The JSON object in a body, empty for no body; else raises `Malformed`."""
    if not raw.strip(b" \t\n\r"):  # the space of JSON alone
        return {}
    try:
        # From bytes, json would also accept UTF-16 and lone surrogates.
        text = raw.decode("utf-8-sig")
        body = _decoder.decode(text)
        if "\\ud" in text.lower():
            # A reply could not contain an escaped lone surrogate.
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise _no_json(f"the body is not JSON: {error}") from None
    if body is None:
        return {}  # null counts as left out, as for fields
    if not isinstance(body, dict):
        raise _no_json("the body must be a JSON object")
    _require_depth(body, MAX_DEPTH)
    return body


def parse_in_slices(raw: Body) -> Work[dict[str, Any]]:
    """Parse a large body; long lists in its `PACKED` fields are packed."""
    try:
        reader = _Reader(raw)
        body = yield from reader.body()
        if reader.has_halves:
            msgspec.msgpack.encode(body)  # packed lists were encoded before
    except (ValueError, RecursionError) as error:
        raise _no_json(f"the body is not JSON: {error}") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise _no_json("the body must be a JSON object")
    return body


def parse_around(raw: Body) -> Work[dict[str, Any]]:
    """Parse a body that may have very long strings.

    Long strings are not copied: a field, or its list of strings, has a `LongText`
    instead of such a string.
    """
    rest, texts = yield from _cut(raw)
    body = yield from parse_in_slices(rest)

    def text(value: object) -> Any:
        return texts.get(value, value) if isinstance(value, str) else value

    def texts_of(value: object) -> Any:
        return list(map(text, value)) if isinstance(value, list) else text(value)

    return {name: texts_of(value) for name, value in body.items()}


def _cut(raw: Body) -> Work[tuple[bytearray, dict[str, LongText]]]:
    """The body with a mark instead of each long string, and the long strings."""
    rest, texts = bytearray(), dict[str, LongText]()
    done, slice_ = 0, TimeSlice()

    def quote(at: int) -> Work[int]:
        """The position of the next quote from `at` on; the length without one."""
        while at < len(raw):
            if (found := raw.find(b'"', at, at + DECODED_BYTES)) >= 0:
                return found
            at += DECODED_BYTES
            if slice_.is_over():
                yield
        return len(raw)

    while (start := (yield from quote(done))) < len(raw):
        end = yield from quote(start + 1)
        while end < len(raw) and _is_escaped(raw, end):
            end = yield from quote(end + 1)
        is_long = end < len(raw) and end - start > LONG_BYTES
        if is_long:
            mark = f"\0long {len(texts)}"
            texts[mark] = LongText(raw, start + 1, end)
        rest += raw[done:start] + (
            json.dumps(mark).encode() if is_long else raw[start : end + 1]
        )
        done = end + 1
        if len(rest) > MAX_MANIFEST_BYTES:
            raise Malformed(
                f"the body has more than {MAX_MANIFEST_BYTES} bytes beside its tensors"
            )
        if slice_.is_over():
            yield
    if len(rest) + len(raw) - done > MAX_MANIFEST_BYTES:
        raise _no_json("the body is not JSON: a string in it has no end")
    rest += raw[done:]
    return rest, texts


def _is_escaped(raw: Body, at: int) -> bool:
    """Whether an odd number of backslashes comes before position `at`."""
    first = at
    while raw[first - 1] == ord("\\"):
        first -= 1
    return bool((at - first) % 2)


async def parsed(raw: Body, *, has_long_texts: bool = False) -> dict[str, Any]:
    """Parse a large body while the event loop goes on."""
    work = parse_around(raw) if has_long_texts else parse_in_slices(raw)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            body: dict[str, Any] = stop.value
            return body
        await asyncio.sleep(0)


class _Reader:
    """Parses JSON as Python's own parser does, part by part, and yields in between.

    A window of the body is decoded at a time. The window has to contain the whole next
    entry, so it is extended before and, if needed, while an entry is parsed.
    """

    def __init__(self, raw: Body) -> None:
        self._raw = raw
        self._num_decoded = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._has_mark = False
        """Whether the text begins with a byte order mark."""
        self._text = ""
        self._at = self._before = 0
        """The position in the window, and the number of characters before it."""
        self._slice = TimeSlice()
        self.has_halves = False
        """Whether the body may contain escaped lone surrogates."""

    def body(self) -> Work[Any]:
        """Parse the whole text as one value; an empty text is an empty object."""
        self._skip()
        if self._at == len(self._text) and not self._has_mark:
            return {}
        value = yield from self._value(0, is_packed=False)
        self._skip()
        if self._at != len(self._text):
            raise self._error("Extra data")
        return value

    def _value(self, level: int, *, is_packed: bool) -> Work[Any]:
        """The value that begins here, `level` lists and objects deep."""
        first = self._next
        if first == "{" and level <= DEEP:
            return (yield from self._object(level, is_packed))
        if first == "[" and level <= DEEP:
            return (yield from self._list(level, is_packed))
        return self._whole(level)

    def _whole(self, level: int) -> Any:
        """The same, read at once."""
        while True:
            try:
                value, end = _scan(self._text, self._at)
            except (StopIteration, ValueError) as error:
                if self._show_more(len(self._text)):
                    continue
                if isinstance(error, StopIteration):
                    raise self._error("Expecting value") from None
                raise
            # A number may go on behind the window, for example with an exponent.
            if end + len("e+") < len(self._text) or not self._show_more():
                break
        self._at = end
        if isinstance(value, dict | list):
            _require_depth(value, MAX_DEPTH - level)
        return value

    def _list(self, level: int, is_packed: bool) -> Work[Any]:
        packer, entries = Packer(), list[Any]()
        add = packer.add if is_packed else entries.append
        self._skip(1)
        is_over = self._takes("]")
        while not is_over:
            if level < ENTRIES and self._next in ("{", "["):
                add((yield from self._value(level + 1, is_packed=is_packed)))
            else:
                add(self._whole(level + 1))
            if self._slice.is_over():
                yield
            is_over = self._ends("]")
        return packer.value() if is_packed else entries

    def _object(self, level: int, is_packed: bool) -> Work[Any]:
        packer, entries = Packer(dict), dict[str, Any]()
        self._skip(1)
        is_over = self._takes("}")
        while not is_over:
            if self._next != '"':
                raise self._error("Expecting property name enclosed in double quotes")
            key = self._whole(level + 1)
            self._skip()
            if not self._takes(":"):
                raise self._error("Expecting ':' delimiter")
            self._skip()
            is_for_ranks = is_packed or (level == 0 and key in PACKED)
            value = yield from self._value(level + 1, is_packed=is_for_ranks)
            if is_packed:
                packer.add((key, value))
            else:
                entries[key] = value
            if self._slice.is_over():
                yield
            is_over = self._ends("}")
        return packer.value() if is_packed else entries

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, char: str) -> bool:
        found = self._next == char
        self._at += found
        return found

    def _ends(self, last: str) -> bool:
        """Whether the list or object ends here; if not, skip the comma."""
        self._skip()
        if self._takes(last):
            return True
        if not self._takes(","):
            raise self._error("Expecting ',' delimiter")
        self._skip()
        return False

    def _skip(self, count: int = 0) -> None:
        """Skip `count` characters and the white space after them."""
        self._at += count
        while True:
            if len(self._text) - self._at < MARGIN_CHARS:
                self._show_more()
            if self._next not in (" ", "\n", "\t", "\r"):
                return
            self._at = _space(self._text, self._at).end()  # type: ignore[union-attr]

    def _show_more(self, most: int = 0) -> bool:
        """Decode `most` or the usual number of bytes more; False at the end."""
        start, end = self._num_decoded, len(self._raw)
        if start == end:
            return False
        end = min(end, start + max(most, DECODED_BYTES))
        part = self._raw[start:end]
        self.has_halves |= b"\\" in part
        decoded = self._decoder.decode(part, end == len(self._raw))
        # Python's own decoder of marks takes half a mark for an empty text.
        if start == 0 and decoded.startswith(BYTE_ORDER_MARK):
            decoded, self._has_mark = decoded[1:], True
        self._num_decoded = end
        self._before += self._at
        self._text, self._at = self._text[self._at :] + decoded, 0
        return True

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{what}: character {self._before + self._at}")


def _require_depth(value: object, most: int) -> None:
    """Raise `Malformed` if lists and objects are nested deeper than `most` levels."""
    level: list[object] = [value]
    for _ in range(most):
        level = [inner for outer in level for inner in _within(outer)]
        if not level:
            return
    raise Malformed(f"the body is more than {MAX_DEPTH} lists and objects deep")


def _within(outer: object) -> list[Any]:
    inner: Any = outer.values() if isinstance(outer, dict) else outer
    return [value for value in inner if isinstance(value, dict | list)]


def _integer(text: str) -> int:
    value = int(text) if len(text) <= 20 else INT64
    if not -INT64 <= value < INT64:
        raise ValueError(f"{text:.40} does not fit into 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not a number")
    return value


_decoder = JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_number)
_scan: Any = _decoder.scan_once  # type: ignore[attr-defined]
"""Scans the value at a position; returns it and its end. Python's own C function."""
