"""The status board: each rank posts its status, and the engine core reads it.

Progress, votes and cancellation travel through shared memory and not through
RPCs, because a blocking RPC waits for every batch in flight. The board is a
file in /dev/shm, unlinked as soon as every rank has opened it, so nothing is
left behind however a process ends.

Layout: 64 bytes of header (u64 serial of the last cancelled update; u64 that is not 0
once something has touched the weights that a rank serves, past any update), then one
slot per rank: u64 sequence, then two pages of u32 length + JSON, packed by zlib if it
is long. The page named by the sequence's lowest bit is whole; the other one is where
the rank writes next, so a rank that is killed in the middle of a post leaves the last
one whole.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import zlib
from typing import Any
from weakref import WeakValueDictionary

import msgspec

HEADER_BYTES = 64
TOUCHED_AT = 8
"""Where the header says that weights which are served were touched."""
PAGE_BYTES = 1 << 18
LONG_BYTES = 1 << 14
"""A status of this length or more is compressed.

A rank of a pipeline stage names all tensors of the other stages."""
SLOT_BYTES = HEADER_BYTES + 2 * PAGE_BYTES
_posts = WeakValueDictionary[str, threading.Event]()
"""For each board that this process has open: set when a rank of the process posts."""
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class StatusBoard:
    """The status board of one engine, opened by its core and by every rank."""

    def __init__(self, path: str, num_ranks: int) -> None:
        self.path = path
        self.num_ranks = num_ranks
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), board_bytes(num_ranks))
        self._posted = _posts.setdefault(path, threading.Event())
        self._lock = threading.Lock()
        """Held by a thread that writes: a staging thread, the monitor or the core."""

    @classmethod
    def create(cls, num_ranks: int) -> StatusBoard:
        """A new, empty board.

        Raises:
            OSError: there is no room for it.

        """
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        handle, path = tempfile.mkstemp(prefix="vllm-inflight-board-", dir=folder)
        try:
            # A page that is only promised would kill the rank that first writes to it.
            os.posix_fallocate(handle, 0, board_bytes(num_ranks))
            return cls(path, num_ranks)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(handle)

    def unlink(self) -> None:
        """Take the name away; whoever has the board open keeps it."""
        os.unlink(self.path)

    def close(self) -> None:
        """Give the memory back."""
        self._map.close()

    def post(self, rank: int, status: dict[str, Any]) -> None:
        """Replace the status of `rank`; only that rank's process calls this."""
        text = msgspec.json.encode(status)
        if len(text) > LONG_BYTES:
            text = zlib.compress(text, 1)
        if len(text) > PAGE_BYTES - _U32.size:
            raise ValueError(f"status of {len(text)} bytes does not fit the board")
        with self._lock:
            slot = _slot(rank)
            sequence = self._sequence(rank) + 1
            page = _page(slot, sequence)
            _U32.pack_into(self._map, page, len(text))
            self._map[page + _U32.size : page + _U32.size + len(text)] = text
            _U64.pack_into(self._map, slot, sequence)
        self.wake()

    def read(self, rank: int) -> dict[str, Any]:
        """The latest whole status of `rank`; empty before the first."""
        while True:
            sequence = self._sequence(rank)
            page = _page(_slot(rank), sequence)
            (length,) = _U32.unpack_from(self._map, page)
            text = self._map[page + _U32.size : page + _U32.size + length]
            if self._sequence(rank) == sequence:
                break
        if not text:
            return {}
        # Fast, as a stage may name 50,000 tensors, and a core that steps waits for it.
        status: dict[str, Any] = msgspec.json.decode(
            text if text.startswith(b"{") else zlib.decompress(text)
        )
        return status

    def read_all(self) -> list[dict[str, Any]]:
        """The latest status of every rank, in rank order."""
        return [self.read(rank) for rank in range(self.num_ranks)]

    def rest(self, seconds: float) -> None:
        """Wait for so long, or until a rank of this process posts, or for `wake`.

        What has come since the last call ends the wait at once. One thread may wait.
        """
        self._posted.wait(seconds)
        self._posted.clear()

    def wake(self) -> None:
        """End the wait of `rest` in this process."""
        self._posted.set()

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever any rank posts; cheaper to compare than to read."""
        return tuple(self._sequence(rank) for rank in range(self.num_ranks))

    def cancel(self, serial: int) -> None:
        """Tell every rank to stop working on update `serial` and older ones."""
        with self._lock:
            _U64.pack_into(self._map, 0, max(serial, self.cancelled()))

    def cancelled(self) -> int:
        """The serial of the last cancelled update; 0 before the first."""
        return int(_U64.unpack_from(self._map, 0)[0])

    def touch(self) -> None:
        """Tell the engine core to look at what is served, before its next step."""
        _U64.pack_into(self._map, TOUCHED_AT, 1)

    def is_touched(self) -> bool:
        """Whether a rank has told that, since it was last taken note of."""
        return bool(_U64.unpack_from(self._map, TOUCHED_AT)[0])

    def untouch(self) -> None:
        """Take note of it; before looking, so that what comes meanwhile is not lost."""
        _U64.pack_into(self._map, TOUCHED_AT, 0)

    def _sequence(self, rank: int) -> int:
        return int(_U64.unpack_from(self._map, _slot(rank))[0])


def _slot(rank: int) -> int:
    return HEADER_BYTES + rank * SLOT_BYTES


def _page(slot: int, sequence: int) -> int:
    return slot + HEADER_BYTES + (sequence % 2) * PAGE_BYTES


def board_bytes(num_ranks: int) -> int:
    """Size of a board for `num_ranks` ranks."""
    return HEADER_BYTES + num_ranks * SLOT_BYTES
