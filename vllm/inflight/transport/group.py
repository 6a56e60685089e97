"""A group: the trainer and its workers, and the one thing they do, a broadcast.

Made anew after every failure: a group that was aborted stays so, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed
from torch.distributed import DistError

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.liveness import Liveness
from vllm.inflight.transport.waiting import WaitLimit


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What both ends of a group must have equal; raises `ValueError`."""

    wire: str
    """The library that carries the bytes: `nccl` or `gloo`."""
    world_size: int
    """The trainer and all workers of all engines."""
    bucket_bytes: int

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(
                f"world_size counts the trainer and every worker, got {self.world_size}"
            )
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGNMENT:
            raise ValueError(
                f"bucket_bytes must be a multiple of {ALIGNMENT}, "
                f"got {self.bucket_bytes}"
            )


ALIGNMENT = 256
"""Bytes; what CUDA's own allocations are aligned to, so kernels read whole lines."""


LARGE = 1 << 20
"""Bytes from which a tensor is large: a message more costs little beside them."""


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

    def broadcast(self, buffers: Sequence[torch.Tensor], watch: WaitLimit) -> Pending:
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
def told_why(lifeline: Liveness) -> Iterator[None]:
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


class CopyGroup:
    """What those have in common that implement `Group` by copies on a stream.

    Args:
        terms: of its buckets.
        device: where to.

    """

    def __init__(self, terms: Terms, device: torch.device) -> None:
        self.terms = terms
        self.device = device
        self.ended: str | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        """Let what is copied from now on come after the current stream's work."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)

    def abort(self, reason: str) -> None:
        """Fetch no more; what is under way ends by itself, and is waited for."""
        if self.ended is None:
            self.ended = reason
            self._end()

    def close(self) -> None:
        """Wait for what is under way: its source may be gone after this."""
        self._end()

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
