"""The receiving end: buckets come in while the tensors of earlier ones are loaded.

What leaves it are whole tensors: those that are sent in slices are put together here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from vllm.inflight.transport.buckets.buffers import Buffers, bucket_slots
from vllm.inflight.transport.buckets.plan import Bucket, plan
from vllm.inflight.transport.buckets.reassembly import Data, Place, Reassembly
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.group import Group, Pending
from vllm.inflight.transport.waiting import WaitLimit

LEAST = 2
"""One is looked at while the next one comes."""


class BucketWindow:
    """Between `LEAST` and `most` buckets; starts at `most`.

    Args:
        most: buckets there is memory for.
        target_s: longest wait for a bucket that is no reason for one more.

    """

    def __init__(self, most: int, target_s: float) -> None:
        self.most = most
        self.target_s = target_s
        self.size = most
        self.waited_s = 0.0
        """For the last bucket."""
        self.total_s = 0.0
        """For all buckets of this update."""

    def note(self, waited_s: float) -> None:
        """A bucket was waited for, or (0) was there already."""
        self.waited_s = waited_s
        self.total_s += waited_s
        if waited_s > self.target_s:
            self.size = min(self.size + 1, self.most)
        elif waited_s == 0.0:
            self.size = max(self.size - 1, min(LEAST, self.most))


T = TypeVar("T")


class Receiver:
    """One worker's end of a group; to make it is collective."""

    def __init__(
        self,
        group: Group,
        num_buckets: int,
        watch: WaitLimit,
        *,
        target_s: float = 0.002,
    ) -> None:
        self.group = group
        self._slots = bucket_slots(group, num_buckets, watch)
        self.window = BucketWindow(num_buckets, target_s)
        self._scratch = Buffers(0, 0, group.device)
        """For tensors that come in pieces."""

    def tensors(
        self, announced: TensorList, watch: WaitLimit, rank: int | None = None
    ) -> Incoming:
        """What was announced, as it arrives.

        Args:
            announced: what the trainer is going to send.
            watch: bounds the wait for each bucket.
            rank: the tensor-parallel rank of this worker, whose own slices it takes
                where several ranks hold the same.

        Raises:
            Malformed: it is absurdly large; nothing of it was received.

        """
        terms = self.group.terms
        announced.require_buckets(terms.bucket_bytes)
        buckets = plan(announced.sizes, terms.bucket_bytes, large=self.group.large)
        assembly = Reassembly(announced, buckets, self._scratch, rank)
        transfer = _Transfer(self.group, self._slots, self.window, buckets, assembly)
        return Incoming(self.group, assembly, transfer.run(watch))


class Incoming:
    """Tensors of one transfer: an iterator of pairs, or of the pairs of a bucket.

    They are views into a bucket, or into a buffer of their own if they came in pieces;
    those without elements come first. The current stream may still be reading
    one when the next is asked for. To leave this before its end breaks the group:
    buckets are in flight.

    Once it was told where tensors end up, those that are large come in there; what is
    handed over is then that memory.

    Raises:
        TransferFault: a peer died, left or stalled; the group was aborted.
        Cancelled: likewise.

    """

    def __init__(
        self, group: Group, assembly: Reassembly, run: Iterator[list[Data]]
    ) -> None:
        self._group = group
        self._assembly = assembly
        self._batches = self._typed(run)
        self._pairs = (pair for batch in self._batches for pair in _taken(batch))

    def __iter__(self) -> Iterator[Pair]:
        return self

    def __next__(self) -> Pair:
        return next(self._pairs)

    def into(self, place: Place) -> None:
        """Receive in place what `place` knows; to be called before the first tensor."""
        self._assembly.into(place)

    def batches(self) -> Iterator[list[Pair]]:
        """The same, as many as became whole at once."""
        return self._batches

    def _typed(self, run: Iterator[list[Data]]) -> Iterator[list[Pair]]:
        try:
            for arrived in run:
                batch = []
                for number, data in _taken(arrived):
                    home = self._assembly.homes.get(number)
                    whole = self._assembly.wholes[number]
                    if home is None:
                        tensor = data.view(whole.dtype).view(whole.shape)
                    else:
                        tensor = home.tensor
                    batch.append((whole.name, tensor))
                    # Who holds it keeps its bucket from being used again.
                    del data, tensor
                yield batch
                batch.clear()
            # What the next transfer writes comes after what is still being read.
            self._group.follow()
        except BaseException as error:
            self._group.abort(f"stopped receiving: {error or type(error).__name__}")
            raise


def _taken(items: list[T]) -> Iterator[T]:
    """Every item, which the list does not hold any more."""
    items.reverse()
    while items:
        yield items.pop()


class _Transfer:
    """One pass through the buckets."""

    def __init__(
        self,
        group: Group,
        slots: Buffers,
        window: BucketWindow,
        buckets: Sequence[Bucket],
        assembly: Reassembly,
    ) -> None:
        self._group = group
        self._slots = slots
        self._window = window
        self._buckets = buckets
        self._assembly = assembly
        self._begun = 0
        self._in_flight: deque[tuple[torch.Tensor, Pending]] = deque()

    def run(self, watch: WaitLimit) -> Iterator[list[Data]]:
        """The index and the bytes of every tensor, as many as may be looked at."""
        self._assembly.make_room()
        empty = torch.empty(0, dtype=torch.uint8, device=self._group.device)
        if without := [(number, empty) for number in self._assembly.empty]:
            yield without
        for number, bucket in enumerate(self._buckets):
            self._begin(number, watch)
            buffer, pending = self._in_flight.popleft()
            what = f"bucket {number + 1} of {len(self._buckets)}"
            self._window.note(watch.until(pending, what))
            # The next ones are on their way while this one is looked at.
            self._begin(number, watch)
            del pending
            yield from self._assembly.complete(bucket, buffer)

    def _begin(self, number: int, watch: WaitLimit) -> None:
        """Begin as many broadcasts as there is room for, beside bucket `number`.

        A bucket that is still looked at is left alone while others are in flight.
        """
        last = min(len(self._buckets), number + self._window.size)
        while self._begun < last and (
            not self._in_flight or self._slots.is_free(self._begun)
        ):
            buffer = self._slots.take(self._begun)
            received = self._assembly.received(self._buckets[self._begun], buffer)
            pending = self._group.broadcast(received, watch)
            self._in_flight.append((buffer, pending))
            self._begun += 1
