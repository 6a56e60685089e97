"""A rendezvous: where the ranks of a group find each other and compare its terms.

The trainer, rank 0, hosts a `TCPStore` at an address that the workers know. It leaves
the terms of the group there, and each worker compares them with its own. A worker with
little memory asks for smaller buckets. Then all ranks take the smallest size.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed
from torch.distributed import DistError

from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.group import Terms, naming_the_peer
from vllm.inflight.transport.liveness import CONNECT_S, Liveness
from vllm.inflight.transport.waiting import WaitLimit, in_background

TERMS = "terms"
WANTED = "bucket_bytes/{rank}"
"""The largest bucket that a worker has memory for, in bytes."""
AGREED = "bucket_bytes"
"""The size of a bucket on all ranks, in bytes."""
STORE_S = 60.0
"""Longest time for the trainer to reach its own store. Torch looks names up in the DNS
to log them."""

SIZE = "the size of a bucket, which a rank of an older release does not tell"
"""What a rank waits for when all have connected."""

KNOCK_S = 0.2
"""The timeout of one try to reach the trainer's port, and the time between two
tries."""


class KeyStore(Protocol):
    """What is used of a client of torch's `TCPStore`, which has no types."""

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: str) -> None: ...


class Member(Protocol):
    """What a group needs of a `Rendezvous` or a `TorchRendezvous`."""

    terms: Terms
    rank: int
    liveness: Liveness
    store: Any
    """A client of the trainer's `TCPStore`; None after `end`."""

    def own_address(self) -> str:
        """The address of this host on the interface that reaches the trainer."""
        ...

    def end(self, reason: str) -> None:
        """Leave, and send the other ranks the reason if there is a connection."""
        ...


class Rendezvous:
    """One rank's end of a rendezvous."""

    def __init__(self, terms: Terms, rank: int, address: str, port: int) -> None:
        self.terms = terms
        self.rank = rank
        self.address = address
        self.port = port
        self.liveness = Liveness()
        self.store: Any = None
        """A client of the trainer's store; used until all ranks have connected."""
        self._server: Any = None
        self._listener: socket.socket | None = None
        self._liveness_port = 0
        self._most = terms.bucket_bytes

    @classmethod
    def host(cls, terms: Terms, address: str, port: int = 0) -> Rendezvous:
        """As the trainer: wait for workers, at any free port if `port` is 0.

        Raises:
            torch.distributed.DistError: the port is taken, or the address is not one
                of this host.

        """
        server = _store(address, port, STORE_S, is_master=True)
        rendezvous = cls(terms, 0, address, server.port)
        rendezvous._server = server
        try:
            # A client of its own: keeping the server as client would keep the port.
            rendezvous.store = _store(address, server.port, STORE_S)
            own = rendezvous.own_address()
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            rendezvous._listener = socket.create_server((own, 0), family=family)
            liveness_port = rendezvous._listener.getsockname()[1]
            rendezvous.store.set(
                TERMS, json.dumps(asdict(terms) | {"line": liveness_port})
            )
        except BaseException as error:
            rendezvous.end(f"the rendezvous could not be opened: {error}")
            raise
        return rendezvous

    @classmethod
    def join(
        cls,
        terms: Terms,
        address: str,
        port: int,
        rank: int,
        limit: WaitLimit,
        *,
        most_bucket_bytes: int | None = None,
    ) -> Rendezvous:
        """As worker `rank`: find the trainer and compare terms.

        `most_bucket_bytes` is the largest bucket that this worker has memory for, a
        multiple of `ALIGNMENT`; by default, any. `gather` changes `terms` by it.

        Raises:
            Malformed: the terms of the trainer differ, or `rank` is out of range.
            TransferFault: the trainer does not answer.

        """
        if not 0 < rank < terms.world_size:
            raise Malformed(
                f"this worker is rank {rank} of the group, whose world_size is "
                f"{terms.world_size}; count the trainer and every worker"
            )
        rendezvous = cls(terms, rank, address, port)
        trainer = f"a trainer at {address}:{port}"
        limit.until(lambda: is_answered(address, port), trainer, longest_nap_s=KNOCK_S)
        # The constructor never returns if the port belongs to another program.
        connecting = in_background(lambda: _store(address, port, limit.timeout_s))
        try:
            rendezvous.store = store = limit.result(connecting, trainer)
            theirs, rendezvous._liveness_port = read_terms(
                read_key(store, TERMS, limit, trainer)
            )
            if most_bucket_bytes is not None:
                rendezvous._most = min(terms.bucket_bytes, most_bucket_bytes)
            store.set(WANTED.format(rank=rank), str(rendezvous._most))
        except DistError as error:
            raise TransferFault(f"{trainer} does not answer: {error}") from error
        if theirs != asdict(terms):
            raise Malformed(
                f"the trainer has opened a group of {theirs}, init_info says "
                f"{asdict(terms)}"
            )
        return rendezvous

    def own_address(self) -> str:
        """The address of this host on the interface that reaches the trainer."""
        with socket.create_connection((self.address, self.port), CONNECT_S) as line:
            return str(line.getsockname()[0])

    def gather(self, limit: WaitLimit) -> None:
        """Wait until all ranks are connected, and agree on the size of a bucket.

        Raises:
            TransferFault: a rank is gone or does not come.
            Malformed: what a rank has left in the store is no size.

        """
        if self._listener is None:
            self.liveness.connect(self.address, self._liveness_port, self.rank, limit)
        else:
            with self._listener as listener:
                self.liveness.accept(listener, self.terms.world_size, limit)
        try:
            with naming_the_peer(self.liveness):
                self.terms = replace(self.terms, bucket_bytes=self._agreed(limit))
        except ValueError as error:
            raise Malformed(f"a rank left no size of a bucket: {error}") from None

    def _agreed(self, limit: WaitLimit) -> int:
        """The smallest bucket that a worker asks for, which the trainer finds."""
        if self.rank:
            agreed = int(read_key(self.store, AGREED, limit, SIZE))
            if agreed > self._most:
                raise ValueError(f"{agreed} is more than {self._most}")
            return agreed
        wanted = [
            int(read_key(self.store, WANTED.format(rank=rank), limit, SIZE))
            for rank in range(1, self.terms.world_size)
        ]
        self.store.set(AGREED, str(min(wanted)))
        return min(wanted)

    def end(self, reason: str) -> None:
        """Leave, and send the other ranks the reason."""
        self.liveness.end(reason)
        if self._listener is not None:
            self._listener.close()
        self.store = self._server = None


def read_key(store: KeyStore, key: str, limit: WaitLimit, waiting_for: str) -> bytes:
    """The value that the trainer leaves in its store; raises as `limit` does."""

    def ask() -> bytes:
        limit.until(lambda: store.check([key]), waiting_for)
        answer: bytes = store.get(key)
        return answer

    # Torch's client blocks for as long as the process of the store is stopped.
    return limit.result(in_background(ask), waiting_for)


def read_terms(value: bytes) -> tuple[dict[str, Any], int]:
    """A trainer's terms, and its port for liveness connections; raises `Malformed`."""
    try:
        theirs = json.loads(value)
    except (ValueError, RecursionError):
        theirs = None
    line = theirs.pop("line", None) if isinstance(theirs, dict) else None
    if type(line) is not int or not 0 < line < 1 << 16:
        raise Malformed(f"the trainer has not left its terms there, but {value!r:.80}")
    return theirs, line


def _store(
    address: str, port: int, timeout_s: float, *, is_master: bool = False
) -> Any:
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def is_answered(address: str, port: int) -> bool:
    """Whether a program listens at the port now."""
    try:
        socket.create_connection((address, port), timeout=KNOCK_S).close()
    except OSError:
        return False
    return True
