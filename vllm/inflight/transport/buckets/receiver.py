"""The receiving end: buckets arrive while tensors of earlier buckets are loaded.

It hands out whole tensors. Tensors that were sent in slices are put together first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from vllm.inflight.transport.buckets.buffers import Buffers, bucket_buffers
from vllm.inflight.transport.buckets.plan import Bucket, plan
from vllm.inflight.transport.buckets.reassembly import Data, Place, Reassembly
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.group import Group, Pending
from vllm.inflight.transport.waiting import WaitLimit

MIN_BUCKETS = 2
"""One bucket is loaded while the next one arrives."""


class BucketWindow:
    """How many broadcasts are under way at once, from `MIN_BUCKETS` to `most`.

    A broadcast that begins early takes processors of the GPU from decoding until its
    bytes have arrived. So the window shrinks by one when a bucket was there before it
    was needed, and grows by one after a wait longer than `target_s`. It starts at
    `most`.

    Args:
        most: the number of buckets that there is memory for.
        target_s: the longest wait for a bucket that leaves the window as it is.

    """

    def __init__(self, most: int, target_s: float) -> None:
        self.most = most
        self.target_s = target_s
        self.size = most
        self.waited_s = 0.0
        """The wait for the last bucket, in seconds."""
        self.total_s = 0.0
        """The waits for all buckets of this update, in seconds."""

    def note(self, waited_s: float) -> None:
        """Adapt the window to the wait for a bucket, in seconds; 0 if it was there."""
        self.waited_s = waited_s
        self.total_s += waited_s
        if waited_s > self.target_s:
            self.size = min(self.size + 1, self.most)
        elif waited_s == 0.0:
            self.size = max(self.size - 1, min(MIN_BUCKETS, self.most))


T = TypeVar("T")


class Receiver:
    """One worker's end of a group; the constructor is collective."""

    def __init__(
        self,
        group: Group,
        num_buckets: int,
        limit: WaitLimit,
        *,
        target_s: float = 0.002,
    ) -> None:
        self.group = group
        self._slots = bucket_buffers(group, num_buckets, limit)
        self.window = BucketWindow(num_buckets, target_s)
        self._scratch = Buffers(0, 0, group.device)
        """Memory for tensors that come in pieces."""

    def tensors(
        self, tensor_list: TensorList, limit: WaitLimit, rank: int | None = None
    ) -> Incoming:
        """The tensors of a transfer, as they arrive.

        Args:
            tensor_list: the tensors that the trainer is about to send.
            limit: bounds the wait for each bucket.
            rank: this worker's tensor-parallel rank. Where several ranks hold the same
                slice, the slice of this rank is used.

        Raises:
            Malformed: the tensors would need too many buckets; nothing was received.

        """
        terms = self.group.terms
        tensor_list.require_buckets(terms.bucket_bytes)
        buckets = plan(tensor_list.sizes, terms.bucket_bytes, large=self.group.large)
        reassembly = Reassembly(tensor_list, buckets, self._scratch, rank)
        transfer = _Transfer(self.group, self._slots, self.window, buckets, reassembly)
        return Incoming(self.group, reassembly, transfer.run(limit))


class Incoming:
    """Tensors of one transfer: an iterator of (name, tensor), or of batches of them.

    A tensor is a view into a bucket, or into scratch memory if it came in pieces.
    Tensors without elements come first. The current stream may still be reading a
    tensor when the next one is taken. Stopping before the end breaks the group, because
    buckets are in flight.

    After `into`, large tensors are received at their destinations, and the tensors
    handed out are that memory.

    Raises:
        TransferFault: a peer died, left or stalled; the group was aborted.
        Cancelled: the update was cancelled; the group was aborted.

    """

    def __init__(
        self, group: Group, reassembly: Reassembly, run: Iterator[list[Data]]
    ) -> None:
        self._group = group
        self._reassembly = reassembly
        self._batches = self._typed(run)
        self._pairs = (pair for batch in self._batches for pair in _taken(batch))

    def __iter__(self) -> Iterator[Pair]:
        return self

    def __next__(self) -> Pair:
        return next(self._pairs)

    def into(self, place: Place) -> None:
        """Receive tensors at the destinations that `place` gives; call it first."""
        self._reassembly.into(place)

    def batches(self) -> Iterator[list[Pair]]:
        """The same tensors, in lists of those that became whole together."""
        return self._batches

    def _typed(self, run: Iterator[list[Data]]) -> Iterator[list[Pair]]:
        try:
            for arrived in run:
                batch = []
                for number, data in _taken(arrived):
                    home = self._reassembly.destinations.get(number)
                    whole = self._reassembly.wholes[number]
                    if home is None:
                        tensor = data.view(whole.dtype).view(whole.shape)
                    else:
                        tensor = home.tensor
                    batch.append((whole.name, tensor))
                    # A reference would keep its bucket from being used again.
                    del data, tensor
                yield batch
                batch.clear()
            # The next transfer must write after the reads of this one.
            self._group.follow()
        except BaseException as error:
            self._group.abort(f"stopped receiving: {error or type(error).__name__}")
            raise


def _taken(items: list[T]) -> Iterator[T]:
    """Every item, removed from the list."""
    items.reverse()
    while items:
        yield items.pop()


class _Transfer:
    """One pass through the buckets of a plan."""

    def __init__(
        self,
        group: Group,
        slots: Buffers,
        window: BucketWindow,
        buckets: Sequence[Bucket],
        reassembly: Reassembly,
    ) -> None:
        self._group = group
        self._slots = slots
        self._window = window
        self._buckets = buckets
        self._reassembly = reassembly
        self._begun = 0
        self._in_flight: deque[tuple[torch.Tensor, Pending]] = deque()

    def run(self, limit: WaitLimit) -> Iterator[list[Data]]:
        """The index and bytes of every tensor, in batches that are valid together."""
        self._reassembly.make_room()
        empty = torch.empty(0, dtype=torch.uint8, device=self._group.device)
        if without := [(number, empty) for number in self._reassembly.empty]:
            yield without
        for number, bucket in enumerate(self._buckets):
            self._begin(number, limit)
            buffer, pending = self._in_flight.popleft()
            what = f"bucket {number + 1} of {len(self._buckets)}"
            self._window.note(limit.until(pending, what))
            # The next buckets arrive while this one is loaded.
            self._begin(number, limit)
            del pending
            yield from self._reassembly.complete(bucket, buffer)

    def _begin(self, number: int, limit: WaitLimit) -> None:
        """Begin the broadcasts that the window allows, from bucket `number` on.

        While broadcasts are in flight, a buffer that still has views is not used.
        """
        last = min(len(self._buckets), number + self._window.size)
        while self._begun < last and (
            not self._in_flight or self._slots.is_free(self._begun)
        ):
            buffer = self._slots.take(self._begun)
            received = self._reassembly.received(self._buckets[self._begun], buffer)
            pending = self._group.broadcast(received, limit)
            self._in_flight.append((buffer, pending))
            self._begun += 1
