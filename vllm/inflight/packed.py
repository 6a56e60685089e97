"""Packed values: long lists and objects travel as bytes, and are read by blocks.

Only one thread of a process runs Python at a time. If an API server, an engine core
or a rank reads, sends or pickles a plain list of 100,000 tensors, its other work stops
for a second. So the process that receives such a list packs it, processes that do not
read it pass on bytes, and the process that uses it unpacks it.

Packing and unpacking are `Work`: generators that yield at least every millisecond. The
caller lets other work run then: an event loop awaits, a thread sleeps.

A packed list or object is plain data, `{MARK: [block, …], "kind", "length"}`, which
MessagePack can send. A block is MessagePack of up to `BLOCK` entries, compressed by
zlib. JSON has no bytes, so no JSON body can look like a packed value.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Work = Generator[None, None, T]
"""Work in time slices; the generator returns its result."""

SLICE_S = 0.001
"""Seconds after which work yields."""

BLOCK = 1024
"""Entries of a block; a longer list or object is packed."""

MARK = "\0packed"
_plain: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder()

LEVELS = 3
"""Depth down to which long lists and objects in a value are packed."""

PLAIN = (str, int, float, bool, type(None), list, dict)
"""Types of entries that are packed. A caller in this process may pass other types;
their list stays as it is."""


class TimeSlice:
    """The clock of one time slice."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def is_over(self) -> bool:
        """Whether the slice is over; if it is, the next one begins."""
        now = time.perf_counter()
        if now - self._began < SLICE_S:
            return False
        self._began = now
        return True


def at_once(work: Work[T]) -> T:
    """Do all the work without a break."""
    return resting(work, lambda: None)


def resting(work: Work[T], rest: Callable[[], None]) -> T:
    """Do the work, and call `rest` between its slices."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            value: T = stop.value
            return value
        rest()


class Packer:
    """Packs a list, or an object as pairs of key and value, entry by entry."""

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]] = list) -> None:
        self._kind = kind
        self._blocks: list[bytes] = []
        self._open: list[Any] = []
        self.length = 0

    def add(self, entry: object) -> None:
        """Add an entry.

        Raises:
            ValueError: the entry cannot be encoded, such as a lone surrogate.

        """
        self._open.append(entry)
        if len(self._open) == BLOCK:
            self._close()

    def packed(self) -> dict[str, Any]:
        """The packed value, even if it is short."""
        self._close()
        if not self._blocks:
            self._blocks.append(_block([]))
        return {
            MARK: self._blocks,
            "kind": self._kind.__name__,
            "length": self.length,
        }

    def value(self) -> Any:
        """The value: packed if it is longer than a block, else plain."""
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


def is_packed(value: object) -> bool:
    """Whether a value is a packed list or object."""
    if not isinstance(value, dict) or MARK not in value:
        return False
    blocks = value[MARK]
    # A JSON object can have the mark with an empty list, but no bytes.
    is_bytes = isinstance(blocks, list) and all(isinstance(b, bytes) for b in blocks)
    return is_bytes and bool(blocks)


def blocks(
    value: Any, decoder: msgspec.msgpack.Decoder[list[Any]] = _plain
) -> Iterator[list[Any]]:
    """The entries of a list, or the pairs of an object, in blocks.

    Args:
        value: the list or the object, packed or plain.
        decoder: the decoder of a packed block.

    """
    if is_packed(value):
        for block in value[MARK]:
            yield decoder.decode(zlib.decompress(block))
        return
    entries = list(value.items()) if isinstance(value, dict) else value
    for start in range(0, len(entries), BLOCK):
        yield entries[start : start + BLOCK]


def length(value: Any) -> int:
    """The number of entries of a list or an object, packed or plain."""
    return int(value["length"]) if is_packed(value) else len(value)


def pack(value: object, levels: int = LEVELS) -> Work[Any]:
    """Pack the long lists and objects in a value, down to a depth of `levels`."""
    if not isinstance(value, list | dict) or is_packed(value):
        return value
    if len(value) > BLOCK:
        try:
            return (yield from _packed(value))
        except (TypeError, ValueError):
            return value  # its reader reports the error
    if not levels:
        return value
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found[key] = yield from pack(inner, levels - 1)
    return found if isinstance(value, dict) else list(found.values())


def _packed(value: object) -> Work[dict[str, Any]]:
    """Pack one list or object; raises TypeError or ValueError if that is impossible."""
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
    """Unpack a value; its plain parts stay as they are."""
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


def _holds_more(value: object) -> bool:
    """Whether a value may contain packed lists or objects."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(isinstance(v, list | dict) for v in value)
