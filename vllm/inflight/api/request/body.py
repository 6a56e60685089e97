"""The body of a request: read no further than allowed, and plain all through.

What a body says travels on to engine cores, in MessagePack: numbers have to fit into
64 bits, and lists and objects lie in each other no deeper than there.

An event loop that reads a body passes on the tokens of every stream as well. So a
large body is read in slices (see packed.py), and the lists that are meant for the ranks
are packed on the way: nobody before the ranks looks into them.
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
from vllm.inflight.transport.files.request_tensors import LongText
from vllm.inflight.update import INT64, MAX_MANIFEST_BYTES

MAX_DEPTH = 32
"""Of lists and objects in each other; a manifest has 4."""

SMALL_BYTES = 1 << 16
"""A body of no more is read at once: that takes a millisecond at most."""

DECODED_BYTES, MARGIN_CHARS = 1 << 19, 1 << 16
"""Of a large body, decoded at once; and what is shown of it before an entry is read."""

LONG_BYTES = 1 << 16
"""A string of more stays where it is, in a body that may have such strings."""

PACKED = ("manifest", "update_info", "names", "dtypes", "shapes")
"""Fields whose long lists are for the ranks, or for `Manifest.packed`."""

DEEP, ENTRIES = 3, 2
"""Levels of a body down to which lists and objects are read in slices, and from which
on the entries of a list are read at once: they are many, and small."""

Body = bytes | bytearray

_space = pattern(r"[ \t\n\r]*").match


async def read(request: Request, largest: int) -> Body:
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
    return raw  # to copy it would take as long as to receive some of it


def parse(raw: Body) -> dict[str, Any]:
    """The JSON object in it; raises `Malformed` unless there is one, or nothing."""
    if not raw.strip(b" \t\n\r"):  # the space of JSON alone
        return {}
    try:
        # Of bytes, json would take UTF-16, and halves of characters.
        text = raw.decode("utf-8-sig")
        body = _decoder.decode(text)
        if "\\ud" in text.lower():
            # An escape of half a character cannot be said again in a reply.
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from None
    if body is None:
        return {}  # as a field that is null counts as left out
    if not isinstance(body, dict):
        raise Malformed("the body must be a JSON object")
    _require_depth(body, MAX_DEPTH)
    return body


def parse_in_slices(raw: Body) -> Work[dict[str, Any]]:
    """The same, of a large body; in its fields `PACKED`, long lists are packed."""
    try:
        reader = _Reader(raw)
        body = yield from reader.body()
        if reader.has_halves:
            msgspec.msgpack.encode(body)  # what was packed has passed that
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise Malformed("the body must be a JSON object")
    return body


def parse_around(raw: Body) -> Work[dict[str, Any]]:
    """The same, of a body that may have strings of many bytes.

    These stay where they are: a field has a `LongText` in the place of such a string,
    or in its list of strings.
    """
    rest, texts = yield from _cut(raw)
    body = yield from parse_in_slices(rest)

    def text(value: object) -> Any:
        return texts.get(value, value) if isinstance(value, str) else value

    def texts_of(value: object) -> Any:
        return list(map(text, value)) if isinstance(value, list) else text(value)

    return {name: texts_of(value) for name, value in body.items()}


def _cut(raw: Body) -> Work[tuple[bytearray, dict[str, LongText]]]:
    """The body with a mark in the place of each long string, and the strings."""
    rest, texts = bytearray(), dict[str, LongText]()
    done, slice_ = 0, TimeSlice()

    def quote(at: int) -> Work[int]:
        """Where the next one is, from `at` on; behind all that there is, if none."""
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
        raise Malformed("the body is not JSON: a string in it has no end")
    rest += raw[done:]
    return rest, texts


def _is_escaped(raw: Body, at: int) -> bool:
    """Whether an odd number of backslashes comes before it."""
    first = at
    while raw[first - 1] == ord("\\"):
        first -= 1
    return bool((at - first) % 2)


async def parsed(raw: Body, *, has_long_texts: bool = False) -> dict[str, Any]:
    """The same; the event loop goes on meanwhile."""
    work = parse_around(raw) if has_long_texts else parse_in_slices(raw)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            body: dict[str, Any] = stop.value
            return body
        await asyncio.sleep(0)


class _Reader:
    """Reads JSON as Python's own reader does, a part at a time, and yields meanwhile.

    What is decoded is a window of the body. It has to show an entry whole, so before
    each there is enough to come, and more where that was not enough.
    """

    def __init__(self, raw: Body) -> None:
        self._raw = raw
        self._num_decoded = 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = self._before = 0
        """Where in the window it reads, and how many characters lie before that."""
        self._slice = TimeSlice()
        self.has_halves = False
        """Whether escapes in it may be halves of characters."""

    def body(self) -> Work[Any]:
        """All of the text, which is one value; an empty object if there is nothing."""
        self._skip()
        if self._at == len(self._text):
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
            # A number may go on behind the window, with what is no part of it so far.
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
        """Whether the entry was the last; where it was not, another one follows."""
        self._skip()
        if self._takes(last):
            return True
        if not self._takes(","):
            raise self._error("Expecting ',' delimiter")
        self._skip()
        return False

    def _skip(self, count: int = 0) -> None:
        """Go on behind `count` characters and the space after them."""
        self._at += count
        while True:
            if len(self._text) - self._at < MARGIN_CHARS:
                self._show_more()
            if self._next not in (" ", "\n", "\t", "\r"):
                return
            self._at = _space(self._text, self._at).end()  # type: ignore[union-attr]

    def _show_more(self, most: int = 0) -> bool:
        """Move the window on, by `most` bytes or as usual; whether it shows more."""
        start, end = self._num_decoded, len(self._raw)
        if start == end:
            return False
        end = min(end, start + max(most, DECODED_BYTES))
        part = self._raw[start:end]
        self.has_halves |= b"\\" in part
        decoded = self._decoder.decode(part, end == len(self._raw))
        self._num_decoded = end
        self._before += self._at
        self._text, self._at = self._text[self._at :] + decoded, 0
        return True

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{what}: character {self._before + self._at}")


def _require_depth(value: object, most: int) -> None:
    """Raise `Malformed` if there are more than `most` levels of lists and objects."""
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
        raise ValueError(f"{text:.40} is no number")
    return value


_decoder = JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_number)
_scan: Any = _decoder.scan_once  # type: ignore[attr-defined]
"""(value, where it ends) of what begins at a position; C, and Python's own."""
