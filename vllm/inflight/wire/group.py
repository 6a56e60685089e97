"""A group: the trainer and its workers, and the one thing they do, a broadcast.

Made anew after every failure: a group that was aborted stays so, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed import DistError

from vllm.inflight.errors import TransferFault
from vllm.inflight.wire.lifeline import Lifeline
from vllm.inflight.wire.meeting import Terms
from vllm.inflight.wire.watch import Watch

Pending = Callable[[], bool]
"""Whether a broadcast has ended here; raises `TransferFault` if it never will."""


class Group(Protocol):
    """What a wire has to offer. One thread at a time, but any may abort."""

    terms: Terms
    device: torch.device
    ended: str | None
    """Why nothing can be sent any more; None while it can."""
    large: int
    """Bytes from which a tensor is a message of its own; the same at both ends."""

    def broadcast(self, buffers: Sequence[torch.Tensor], watch: Watch) -> Pending:
        """Begin to send the trainer's `buffers` into everybody's, all at once.

        It comes after all that the current stream was given so far, and after the
        broadcasts before it. `watch` bounds the beginning, not the broadcast.

        Args:
            buffers: uint8, contiguous, as many and as long on every rank; they have
                to live until the broadcast has ended.

        """
        ...

    def follow(self) -> None:
        """Let what is broadcast from now on come after the current stream's work."""
        ...

    def abort(self, reason: str) -> None:
        """Give up, at once, whatever is under way; the others get to know why."""
        ...

    def close(self) -> None:
        """Leave in peace, with nothing under way."""
        ...


@contextmanager
def told_why(lifeline: Lifeline) -> Iterator[None]:
    """Around calls of the transport: a peer's own reason replaces their error.

    A peer that leaves says why before its connections close. What the transport then
    reports is only that they are closed.

    Raises:
        TransferFault: a peer has ended, and why; or as the transport raised it.

    """
    try:
        yield
    except (TransferFault, DistError, OSError) as error:
        fault = lifeline.fault()
        if fault is not None:
            raise lost(fault) from error
        raise


def lost(reason: str) -> TransferFault:
    """The error of a group that has ended because of `reason`."""
    return TransferFault(f"the transfer group has ended: {reason}; connect again")
