"""A group over gloo: CPU memory over TCP, for tests, laptops and CPU engines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.collective.rendezvous import Member
from vllm.inflight.transport.group import LARGE, Pending, lost, told_why
from vllm.inflight.transport.waiting import WaitLimit, in_background

_Gloo: Any = torch.distributed.ProcessGroupGloo  # its options are untyped


class GlooGroup:
    """Implements `Group`. Gloo has a thread of its own, so nothing here blocks."""

    large = LARGE

    def __init__(self, meeting: Member, device: torch.device, watch: WaitLimit) -> None:
        self.terms = meeting.terms
        self.device = device
        self.ended: str | None = None
        self._meeting = meeting
        with told_why(meeting.lifeline):
            self._gloo: Any = _connected(meeting, watch)

    def broadcast(self, buffers: Sequence[torch.Tensor], watch: WaitLimit) -> Pending:
        """Begin to send or receive; see `Group.broadcast`."""
        del watch  # gloo only enters it in a queue
        if self.ended is not None:
            raise lost(self.ended)
        works = [self._gloo.broadcast(buffer, 0) for buffer in buffers]

        def ready() -> bool:
            if self.ended is not None:
                raise lost(self.ended)
            failure = None
            if all(work.is_completed() for work in works):
                try:
                    for work in works:
                        work.wait()
                    return True
                except RuntimeError as error:
                    failure = f"gloo says {str(error).splitlines()[0]}"
            # Looked at second: who has sent everything may leave. Who leaves says
            # why before gloo finds the connection closed.
            failure = self._meeting.lifeline.fault() or failure
            if failure is not None:
                raise lost(failure)
            return False

        return ready

    def follow(self) -> None:
        """There are no streams on a CPU."""

    def abort(self, reason: str) -> None:
        """Let go; gloo's thread ends by itself when its own time is up.

        Gloo cannot be interrupted, and to wait for its thread is all its destructor
        does, so a thread of ours does the waiting.
        """
        if self.ended is None:
            gloo = [self._gloo]
            self._leave(reason)
            in_background(gloo.clear)

    def close(self) -> None:
        """Leave; gloo is idle and gone at once."""
        if self.ended is None:
            self._leave("has left the group")

    def _leave(self, reason: str) -> None:
        self.ended = reason
        self._meeting.end(reason)
        self._gloo = None


def _connected(meeting: Member, watch: WaitLimit) -> Any:
    """Torch's process group of all ranks; raises `TransferFault`, `OSError`."""
    options = _Gloo._Options()
    # The address that the trainer reaches us by; the host's own name may lead to
    # another interface.
    options._devices = [_Gloo.create_device(hostname=meeting.own_address())]
    options._timeout = timedelta(seconds=watch.timeout_s)
    options._threads = 1  # one bucket after another
    store, rank, world_size = meeting.store, meeting.rank, meeting.terms.world_size
    connecting = in_background(lambda: _Gloo(store, rank, world_size, options))
    try:
        return watch.result(connecting, "gloo to connect all ranks")
    except RuntimeError as error:
        raise TransferFault(f"gloo could not connect all ranks: {error}") from error
