"""Values of many entries, packed: they travel as bytes and are read a block at a time.

An API server, an engine core and every rank do other things beside an update, and one
thread of a process runs Python at a time. A list of 100,000 tensors that is read, sent
or pickled as it is would stop them for a second. So it is packed where it comes in,
passes as bytes through all that do not look into it, and is unpacked where it is used.

Both are `Work`: a generator that yields at least every millisecond. Who drives it lets
others run then: an event loop by awaiting, a thread by sleeping.

A packed list or object is plain data, `{MARK: [block, …], "kind", "length"}`, so that
it can be sent in MessagePack; a block is MessagePack of up to `BLOCK` entries, packed
by zlib. JSON has no bytes, so nobody sends such a thing by chance.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Work = Generator[None, None, T]
"""Something to do, in slices; its value is what comes of it."""

SLICE_S = 0.001
"""Seconds after which work yields."""

BLOCK = 1024
"""Entries of a block; a list or an object of more is packed."""

MARK = "\0packed"
_plain: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder()

LEVELS = 3
"""How deep in a value lists and objects are looked for that are to be packed."""

PLAIN = (str, int, float, bool, type(None), list, dict)
"""What entries may be; others, as of a caller in the same process, stay as they are."""


class TimeSlice:
    """The time of one slice of some work."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def is_over(self) -> bool:
        """Whether to yield now; the next slice begins then."""
        now = time.perf_counter()
        if now - self._began < SLICE_S:
            return False
        self._began = now
        return True


def at_once(work: Work[T]) -> T:
    """Do all of some work without a break."""
    return resting(work, lambda: None)


def resting(work: Work[T], rest: Callable[[], None]) -> T:
    """Do some work, and `rest` between its slices."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            value: T = stop.value
            return value
        rest()


class Packer:
    """Packs a list, or an object as pairs of key and value, as its entries come."""

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]] = list) -> None:
        self._kind = kind
        self._blocks: list[bytes] = []
        self._open: list[Any] = []
        self.length = 0

    def add(self, entry: Any) -> None:
        """Add an entry.

        Raises:
            ValueError: it holds what cannot be sent, such as half of a character.

        """
        self._open.append(entry)
        if len(self._open) == BLOCK:
            self._close()

    def packed(self) -> dict[str, Any]:
        """All of it, packed, however short it is."""
        self._close()
        if not self._blocks:
            self._blocks.append(_block([]))
        return {
            MARK: self._blocks,
            "kind": self._kind.__name__,
            "length": self.length,
        }

    def value(self) -> Any:
        """All of it: packed, or if it is no longer than a block as what it is."""
        if self._blocks:
            return self.packed()
        return dict(self._open) if self._kind is dict else self._open

    def _close(self) -> None:
        if self._open:
            self._blocks.append(_block(self._open))
            self.length += len(self._open)
            self._open = []


def _block(entries: list[Any]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(entries), 1)


def is_packed(value: Any) -> bool:
    """Whether a value is a list or an object that was packed."""
    if not isinstance(value, dict) or MARK not in value:
        return False
    blocks = value[MARK]
    # Of none, an object of JSON could say that it is one.
    is_bytes = isinstance(blocks, list) and all(isinstance(b, bytes) for b in blocks)
    return is_bytes and bool(blocks)


def blocks(
    value: Any, decoder: msgspec.msgpack.Decoder[list[Any]] = _plain
) -> Iterator[list[Any]]:
    """The entries of a list, packed or not, or the pairs of an object, by blocks.

    Args:
        value: the list or the object.
        decoder: of a block, if it is packed.

    """
    if is_packed(value):
        for block in value[MARK]:
            yield decoder.decode(zlib.decompress(block))
        return
    entries = list(value.items()) if isinstance(value, dict) else value
    for start in range(0, len(entries), BLOCK):
        yield entries[start : start + BLOCK]


def length(value: Any) -> int:
    """How many entries a list or an object has, packed or not."""
    return int(value["length"]) if is_packed(value) else len(value)


def pack(value: Any, levels: int = LEVELS) -> Work[Any]:
    """Pack the long lists and objects in a value, down to `levels` below it."""
    if not isinstance(value, list | dict) or is_packed(value):
        return value
    if len(value) > BLOCK:
        try:
            return (yield from _packed(value))
        except (TypeError, ValueError):
            return value  # whoever reads it says what is wrong
    if not levels:
        return value
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found[key] = yield from pack(inner, levels - 1)
    return found if isinstance(value, dict) else list(found.values())


def _packed(value: Any) -> Work[dict[str, Any]]:
    """Pack one list or object; raises TypeError or ValueError if it cannot be sent."""
    is_object = isinstance(value, dict)
    packer = Packer(dict if is_object else list)
    for block in blocks(value):
        kinds = {type(entry[1] if is_object else entry) for entry in block}
        if not kinds <= set(PLAIN):
            raise TypeError(f"{kinds} are not plain")
        for entry in block:
            packer.add(entry)
        yield
    return packer.packed()


def unpack(value: Any, levels: int = LEVELS) -> Work[Any]:
    """The value that was packed; what was not packed is as it was."""
    if is_packed(value):
        is_object = value["kind"] == "dict"
        made: Any = {} if is_object else []
        for block in blocks(value):
            for number, entry in enumerate(block):
                inner = entry[1] if is_object else entry
                if levels and _holds_more(inner):
                    inner = yield from unpack(inner, levels - 1)
                    block[number] = (entry[0], inner) if is_object else inner
            made.update(block) if is_object else made.extend(block)
            yield
        return made
    if not levels or not isinstance(value, list | dict) or len(value) > BLOCK:
        return value
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found[key] = yield from unpack(inner, levels - 1)
    return found if isinstance(value, dict) else list(found.values())


def _holds_more(value: Any) -> bool:
    """Whether lists or objects lie in it, which may be packed."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(isinstance(v, list | dict) for v in value)
