"""A group: the trainer and its workers, which share one operation, a broadcast.

A group that was aborted stays aborted and keeps the reason. After a failure, the ranks
open a new group.
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
    """The settings that must be equal on all ranks of a group.

    Raises:
        ValueError: a setting is out of range.

    """

    wire: str
    """What carries the bytes: `nccl`, `gloo`, `ipc` or `files`."""
    world_size: int
    """The number of ranks: the trainer and all workers of all engines."""
    bucket_bytes: int
    """The size of a bucket; a multiple of `ALIGNMENT`."""

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
"""The alignment of a tensor in a bucket, in bytes. CUDA aligns its own allocations
alike, so kernels read whole memory lines."""


LARGE = 1 << 20
"""The size in bytes from which a tensor travels in messages of its own. At this size,
the cost of one more message is small."""


Pending = Callable[[], bool]
"""Returns whether a broadcast has ended on this rank. It raises `TransferFault` if the
broadcast can never end."""


class Group(Protocol):
    """What a transport library has to offer.

    Only one thread at a time may use a group. Any thread may abort it.
    """

    terms: Terms
    device: torch.device
    ended: str | None
    """Why the group has ended; None while it can be used."""
    large: int
    """The size in bytes from which a tensor travels in messages of its own; equal on
    all ranks."""

    def broadcast(self, buffers: Sequence[torch.Tensor], limit: WaitLimit) -> Pending:
        """Begin to copy the trainer's `buffers` into the `buffers` of every worker.

        The copies begin after all work that the current stream has by now, and after
        all earlier broadcasts.

        Args:
            buffers: uint8, contiguous; the same number and sizes on every rank. They
                must live until the broadcast has ended.
            limit: bounds the begin of the broadcast, not the broadcast.

        """
        ...

    def follow(self) -> None:
        """Order all later broadcasts after the current stream's work."""
        ...

    def abort(self, reason: str) -> None:
        """Stop all broadcasts at once, and tell the other ranks why."""
        ...

    def close(self) -> None:
        """Leave the group while no broadcast is under way."""
        ...


@contextmanager
def naming_the_peer(liveness: Liveness) -> Iterator[None]:
    """A context for library calls: the reason that a peer gave replaces their error.

    A peer that leaves sends its reason before its connections close. The library only
    reports closed connections.

    Raises:
        TransferFault: a peer has ended, with its reason; or as the library raised it.

    """
    try:
        yield
    except (TransferFault, DistError, OSError) as error:
        fault = liveness.fault()
        if fault is not None:
            raise group_ended(fault) from error
        raise


def group_ended(reason: str) -> TransferFault:
    """The error of every call on a group that has ended."""
    return TransferFault(f"the transfer group has ended: {reason}; connect again")


class CopyGroup:
    """The base of a `Group` with a single rank, which copies its own buckets.

    Nobody sends. `broadcast` of a subclass fetches the next bucket itself, from files
    or from a trainer's GPU memory, on a stream of its own. So a `Receiver` reads files
    and shared memory just as it reads a broadcast.

    Args:
        terms: the size of its buckets.
        device: the device that the copies go to.

    """

    def __init__(self, terms: Terms, device: torch.device) -> None:
        self.terms = terms
        self.device = device
        self.ended: str | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        """Order all later copies after the current stream's work."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)

    def abort(self, reason: str) -> None:
        """Begin no more copies, and wait for those under way."""
        if self.ended is None:
            self.ended = reason
            self._end()

    def close(self) -> None:
        """Wait for the copies under way; afterwards their source may be freed."""
        self._end()

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
