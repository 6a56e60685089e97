"""A group over gloo: CPU memory over TCP, for CPU engines and tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.collective.rendezvous import Member
from vllm.inflight.transport.group import LARGE, Pending, group_ended, naming_the_peer
from vllm.inflight.transport.waiting import WaitLimit, in_background

_Gloo: Any = torch.distributed.ProcessGroupGloo  # its options are untyped


class GlooGroup:
    """Implements `Group`. Gloo works in a thread of its own, so no call blocks."""

    large = LARGE

    def __init__(
        self, rendezvous: Member, device: torch.device, limit: WaitLimit
    ) -> None:
        self.terms = rendezvous.terms
        self.device = device
        self.ended: str | None = None
        self._rendezvous = rendezvous
        with naming_the_peer(rendezvous.liveness):
            self._gloo: Any = _connected(rendezvous, limit)

    def broadcast(self, buffers: Sequence[torch.Tensor], limit: WaitLimit) -> Pending:
        """Begin to send or receive; see `Group.broadcast`."""
        del limit  # gloo only enqueues the broadcast
        if self.ended is not None:
            raise group_ended(self.ended)
        works = [self._gloo.broadcast(buffer, 0) for buffer in buffers]

        def ready() -> bool:
            if self.ended is not None:
                raise group_ended(self.ended)
            failure = None
            if all(work.is_completed() for work in works):
                try:
                    for work in works:
                        work.wait()
                    return True
                except RuntimeError as error:
                    failure = f"gloo says {str(error).splitlines()[0]}"
            # Liveness is checked after completion: a peer may leave once it has sent
            # everything. Its reason arrives before gloo finds the connection closed.
            failure = self._rendezvous.liveness.fault() or failure
            if failure is not None:
                raise group_ended(failure)
            return False

        return ready

    def follow(self) -> None:
        """Do nothing: a CPU has no streams."""

    def abort(self, reason: str) -> None:
        """Leave at once; gloo's thread ends later, at its own timeout.

        Gloo cannot be interrupted. Its destructor waits for its thread, so a background
        thread runs the destructor.
        """
        if self.ended is None:
            gloo = [self._gloo]
            self._leave(reason)
            in_background(gloo.clear)

    def close(self) -> None:
        """Leave the group; gloo is idle, so it ends at once."""
        if self.ended is None:
            self._leave("has left the group")

    def _leave(self, reason: str) -> None:
        self.ended = reason
        self._rendezvous.end(reason)
        self._gloo = None


def _connected(rendezvous: Member, limit: WaitLimit) -> Any:
    """Torch's process group of all ranks; raises `TransferFault` or `OSError`."""
    options = _Gloo._Options()
    # The interface through which this host reaches the trainer. The host's own name
    # may belong to another interface.
    options._devices = [_Gloo.create_device(hostname=rendezvous.own_address())]
    options._timeout = timedelta(seconds=limit.timeout_s)
    options._threads = 1  # one bucket after another
    store, rank, world_size = (
        rendezvous.store,
        rendezvous.rank,
        rendezvous.terms.world_size,
    )
    connecting = in_background(lambda: _Gloo(store, rank, world_size, options))
    try:
        return limit.result(connecting, "gloo to connect all ranks")
    except RuntimeError as error:
        raise TransferFault(f"gloo could not connect all ranks: {error}") from error
