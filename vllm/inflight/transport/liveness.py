"""A lifeline: one socket between the trainer and each worker, to notice an end by.

Neither NCCL nor a stalled TCP stream tells that a peer died or gave up. The end of a
process closes its sockets, and one that gives up says why before it closes them.
Looking is one system call that never blocks, and needs no thread.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.waiting import WaitLimit

RANK = struct.Struct("!I")
GO = b"+"
CONNECT_S = 5.0
MOST_BYTES = 1000
"""Of a last word; it fits into any socket's buffer, so sending it cannot block."""


class Liveness:
    """The sockets of one rank: the trainer has one per worker, a worker has one."""

    def __init__(self) -> None:
        self._lines: dict[int, socket.socket] = {}
        self._fault: str | None = None

    def fault(self) -> str | None:
        """Who has ended, and why; None while everybody is there.

        The first one that was noticed stays: its word can be read only once.
        """
        if self._fault is not None:
            return self._fault
        for rank, line in list(self._lines.items()):  # another thread may end it
            said = _read(line, MOST_BYTES)
            if said is not None:
                who = f"rank {rank}" if rank else "the trainer"
                self._fault = f"{who} {said.decode(errors='replace') or 'is gone'}"
                return self._fault
        return None

    def end(self, reason: str) -> None:
        """Say it to everybody and let go; a second time does nothing."""
        for line in list(self._lines.values()):
            with suppress(OSError):  # who is gone needs no word
                line.send(reason.encode()[:MOST_BYTES])
            line.close()
        self._lines.clear()

    def hold(self, address: str, port: int, rank: int, watch: WaitLimit) -> None:
        """As a worker: take hold of the trainer's end, until all ranks have."""
        with suppress(OSError):
            line = socket.create_connection((address, port), timeout=CONNECT_S)
            line.setblocking(False)
            self._lines[0] = line
            line.send(RANK.pack(rank))

        def all_there() -> bool:
            if 0 not in self._lines:
                raise TransferFault(f"the trainer at {address}:{port} is gone")
            said = _read(self._lines[0], len(GO))
            if said is not None and said != GO:
                rest = _read(self._lines[0], MOST_BYTES) or b""
                reason = (said + rest).decode(errors="replace")
                raise TransferFault(f"the trainer {reason or 'is gone'}")
            return said is not None

        watch.until(all_there, "the other workers to join")

    def gather(
        self, listener: socket.socket, world_size: int, watch: WaitLimit
    ) -> None:
        """As the trainer: hand an end to each worker, then let all of them go on."""
        listener.setblocking(False)
        strangers: list[socket.socket] = []

        def all_there() -> bool:
            with suppress(BlockingIOError):
                line, _ = listener.accept()
                line.setblocking(False)
                strangers.append(line)
            for line in list(strangers):
                said = _read(line, RANK.size)
                if said is not None:
                    strangers.remove(line)
                    self._admit(line, said, world_size)
            fault = self.fault()
            if fault is not None:
                raise TransferFault(f"{fault}, before everybody was there")
            return len(self._lines) == world_size - 1

        missing = f"{world_size - 1} workers to join the group"
        try:
            watch.until(all_there, missing)
        finally:
            for line in strangers:
                line.close()
        for line in self._lines.values():
            line.send(GO)

    def _admit(self, line: socket.socket, said: bytes, world_size: int) -> None:
        rank = RANK.unpack(said)[0] if len(said) == RANK.size else 0
        if 0 < rank < world_size and rank not in self._lines:
            self._lines[rank] = line
            return
        with suppress(OSError):
            line.send(f"has no place for rank {rank} of {world_size}".encode())
        line.close()


def _read(line: socket.socket, most_bytes: int) -> bytes | None:
    """What was said; empty if the other end is closed, None if there is nothing."""
    try:
        return line.recv(most_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
