"""Liveness connections: one socket between the trainer and each worker.

Neither NCCL nor a stalled TCP stream shows that a peer died or gave up. When a process
ends, the kernel closes its sockets. A rank that gives up sends its reason before it
closes its socket. A check is one system call that never blocks, and needs no thread.
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
MAX_REASON_BYTES = 1000
"""Longest reason that is sent. It fits into any socket buffer, so `send` never
blocks."""


class Liveness:
    """The sockets of one rank: one per worker in the trainer, one in a worker."""

    def __init__(self) -> None:
        self._connections: dict[int, socket.socket] = {}
        self._fault: str | None = None

    def fault(self) -> str | None:
        """Which peer has ended, and why; None while all are alive.

        The first fault is kept, because its reason can be read from the socket once.
        """
        if self._fault is not None:
            return self._fault
        for rank, connection in list(
            self._connections.items()
        ):  # another thread may end it
            received = _read(connection, MAX_REASON_BYTES)
            if received is not None:
                who = f"rank {rank}" if rank else "the trainer"
                self._fault = f"{who} {received.decode(errors='replace') or 'is gone'}"
                return self._fault
        return None

    def end(self, reason: str) -> None:
        """Send the reason to all peers and close the sockets; can be repeated."""
        for connection in list(self._connections.values()):
            with suppress(OSError):  # the peer is gone
                connection.send(reason.encode()[:MAX_REASON_BYTES])
            connection.close()
        self._connections.clear()

    def connect(self, address: str, port: int, rank: int, limit: WaitLimit) -> None:
        """As a worker: connect to the trainer, and wait for all other ranks."""
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
            connection.setblocking(False)
            self._connections[0] = connection
            connection.send(RANK.pack(rank))

        def all_there() -> bool:
            if 0 not in self._connections:
                raise TransferFault(f"the trainer at {address}:{port} is gone")
            received = _read(self._connections[0], len(GO))
            if received is not None and received != GO:
                rest = _read(self._connections[0], MAX_REASON_BYTES) or b""
                reason = (received + rest).decode(errors="replace")
                raise TransferFault(f"the trainer {reason or 'is gone'}")
            return received is not None

        limit.until(all_there, "the other workers to join")

    def accept(
        self, listener: socket.socket, world_size: int, limit: WaitLimit
    ) -> None:
        """As the trainer: wait for one connection per worker, then let them go on."""
        listener.setblocking(False)
        unidentified: list[socket.socket] = []

        def all_there() -> bool:
            with suppress(BlockingIOError):
                connection, _ = listener.accept()
                connection.setblocking(False)
                unidentified.append(connection)
            for connection in list(unidentified):
                received = _read(connection, RANK.size)
                if received is not None:
                    unidentified.remove(connection)
                    self._admit(connection, received, world_size)
            fault = self.fault()
            if fault is not None:
                raise TransferFault(f"{fault}, before all ranks had connected")
            return len(self._connections) == world_size - 1

        missing = f"{world_size - 1} workers to join the group"
        try:
            limit.until(all_there, missing)
        finally:
            for connection in unidentified:
                connection.close()
        for connection in self._connections.values():
            connection.send(GO)

    def _admit(
        self, connection: socket.socket, received: bytes, world_size: int
    ) -> None:
        rank = RANK.unpack(received)[0] if len(received) == RANK.size else 0
        if 0 < rank < world_size and rank not in self._connections:
            self._connections[rank] = connection
            return
        with suppress(OSError):
            connection.send(f"has no place for rank {rank} of {world_size}".encode())
        connection.close()


def _read(connection: socket.socket, most_bytes: int) -> bytes | None:
    """The bytes that arrived: empty if the peer closed, None if nothing arrived."""
    try:
        return connection.recv(most_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
