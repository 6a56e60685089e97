"""A meeting: where the ranks of a group find each other and agree on its terms.

The trainer, rank 0, hosts it: a `TCPStore` on an address the workers were told. What
a worker expects of the group is compared there with what the trainer intends.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed
from torch.distributed import DistError

from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.group import Terms
from vllm.inflight.transport.liveness import CONNECT_S, Liveness
from vllm.inflight.transport.waiting import WaitLimit, in_background

TERMS = "terms"
STORE_S = 60.0
"""For the trainer to reach its own store: torch asks the DNS for names to log."""

KNOCK_S = 0.2
"""Longest try to reach the trainer's port, and the time between two."""


class Member(Protocol):
    """A rank's place among the others, of whatever making."""

    terms: Terms
    rank: int
    lifeline: Liveness
    store: Any

    def own_address(self) -> str:
        """The address of this host by which the trainer's host reaches it."""
        ...

    def end(self, reason: str) -> None:
        """Leave, and tell the others why if they can be told."""
        ...


class Rendezvous:
    """One rank's place at it."""

    def __init__(self, terms: Terms, rank: int, address: str, port: int) -> None:
        self.terms = terms
        self.rank = rank
        self.address = address
        self.port = port
        self.lifeline = Liveness()
        self.store: Any = None
        """A client of the trainer's store, good until all are there."""
        self._server: Any = None
        self._listener: socket.socket | None = None
        self._line_port = 0

    @classmethod
    def host(cls, terms: Terms, address: str, port: int = 0) -> Rendezvous:
        """As the trainer: be ready for workers, at any free port if `port` is 0.

        Raises:
            torch.distributed.DistError: the port is taken, or the address not ours.

        """
        server = _store(address, port, STORE_S, is_master=True)
        meeting = cls(terms, 0, address, server.port)
        meeting._server = server
        try:
            # Not the server itself: what keeps the client would keep the port.
            meeting.store = _store(address, server.port, STORE_S)
            own = meeting.own_address()
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            meeting._listener = socket.create_server((own, 0), family=family)
            line_port = meeting._listener.getsockname()[1]
            meeting.store.set(TERMS, json.dumps(asdict(terms) | {"line": line_port}))
        except BaseException as error:
            meeting.end(f"no worker could be told where to meet: {error}")
            raise
        return meeting

    @classmethod
    def join(
        cls, terms: Terms, address: str, port: int, rank: int, watch: WaitLimit
    ) -> Rendezvous:
        """As worker `rank`: find the trainer.

        Raises:
            Malformed: the trainer has other terms.
            TransferFault: it is not there.

        """
        if not 0 < rank < terms.world_size:
            raise Malformed(
                f"this worker is rank {rank} of the group, whose world_size is "
                f"{terms.world_size}; count the trainer and every worker"
            )
        meeting = cls(terms, rank, address, port)
        trainer = f"a trainer at {address}:{port}"
        watch.until(lambda: is_answered(address, port), trainer, longest_nap_s=KNOCK_S)
        # A port that is somebody else's would keep the constructor for ever.
        connecting = in_background(lambda: _store(address, port, watch.timeout_s))
        try:
            meeting.store = store = watch.result(connecting, trainer)
            theirs, meeting._line_port = read_terms(said(store, TERMS, watch, trainer))
        except DistError as error:
            raise TransferFault(f"{trainer} does not answer: {error}") from error
        if theirs != asdict(terms):
            raise Malformed(
                f"the trainer has opened a group of {theirs}, init_info says "
                f"{asdict(terms)}"
            )
        return meeting

    def own_address(self) -> str:
        """The address of this host by which the trainer's host reaches it."""
        with socket.create_connection((self.address, self.port), CONNECT_S) as line:
            return str(line.getsockname()[0])

    def gather(self, watch: WaitLimit) -> None:
        """Wait until every rank is here; raises `TransferFault` if one is not."""
        if self._listener is None:
            line = self.lifeline
            line.hold(self.address, self._line_port, self.rank, watch)
        else:
            with self._listener as listener:
                self.lifeline.gather(listener, self.terms.world_size, watch)

    def end(self, reason: str) -> None:
        """Leave, and tell the others why."""
        self.lifeline.end(reason)
        if self._listener is not None:
            self._listener.close()
        self.store = self._server = None


def said(store: Any, key: str, watch: WaitLimit, waiting_for: str) -> bytes:
    """What the trainer leaves in its store; raises as `watch` does."""

    def ask() -> bytes:
        watch.until(lambda: store.check([key]), waiting_for)
        answer: bytes = store.get(key)
        return answer

    # Torch's client waits for an answer as long as the store's process is stopped.
    return watch.result(in_background(ask), waiting_for)


def read_terms(said: bytes) -> tuple[dict[str, Any], int]:
    """A trainer's terms, and the port of its lifeline; raises `Malformed`."""
    try:
        theirs = json.loads(said)
    except (ValueError, RecursionError):
        theirs = None
    line = theirs.pop("line", None) if isinstance(theirs, dict) else None
    if type(line) is not int or not 0 < line < 1 << 16:
        raise Malformed(f"the trainer has not left its terms there, but {said!r:.80}")
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
    """Whether somebody listens there, now."""
    try:
        socket.create_connection((address, port), timeout=KNOCK_S).close()
    except OSError:
        return False
    return True
