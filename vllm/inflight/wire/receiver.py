"""The receiving end: buckets come in while the tensors of earlier ones are loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from vllm.inflight.wire.announcement import Announcement, Pair
from vllm.inflight.wire.buckets import Bucket, plan
from vllm.inflight.wire.group import Group, Pending
from vllm.inflight.wire.slots import Slots, bucket_slots
from vllm.inflight.wire.watch import Watch


class Receiver:
    """One worker's end of a group; to make it is collective."""

    def __init__(self, group: Group, num_buckets: int, watch: Watch) -> None:
        self.group = group
        self._slots = bucket_slots(group, num_buckets, watch)
        self._whole = Slots(0, 0, group.device)
        """For tensors that a bucket is too small for."""

    def tensors(self, announced: Announcement, watch: Watch) -> Iterator[Pair]:
        """What was announced, as it arrives; tensors without elements come first.

        They are views into a bucket, or into a buffer of their own if a bucket was
        too small. The current stream may still be reading one when the next is asked
        for. To leave this before its end breaks the group: buckets are in flight.

        Args:
            announced: what the trainer is going to send.
            watch: bounds the wait for each bucket.

        Raises:
            TransferFault: a peer died, left or stalled; the group was aborted.
            Cancelled: likewise.

        """
        try:
            for index, data in self._transfer(announced.sizes).run(watch):
                typed = data.view(announced.dtypes[index])
                del data  # who holds it keeps its bucket from being used again
                yield announced.names[index], typed.view(announced.shapes[index])
                del typed
            # What the next transfer writes comes after what is still being read.
            self.group.follow()
        except BaseException as error:
            self.group.abort(f"stopped receiving: {error or type(error).__name__}")
            raise

    def _transfer(self, sizes: list[int]) -> _Transfer:
        buckets = plan(sizes, self.group.terms.bucket_bytes)
        split = [
            sizes[piece.tensor]
            for bucket in buckets
            for piece in bucket.pieces
            if piece.num_bytes < sizes[piece.tensor]
        ]
        # Allocated once, before a broadcast is under way, for CUDA may then wait for
        # the whole device. Two, since a model looks at one tensor until it asks for
        # the next.
        if max(split, default=0) > self._whole.num_bytes:
            self._whole = Slots(2, max(split), self.group.device)
        return _Transfer(self.group, self._slots, self._whole, sizes, buckets)


class _Transfer:
    """One pass through the buckets."""

    def __init__(
        self,
        group: Group,
        slots: Slots,
        whole: Slots,
        sizes: list[int],
        buckets: list[Bucket],
    ) -> None:
        self._group = group
        self._slots = slots
        self._whole = whole
        self._sizes = sizes
        self._buckets = buckets
        self._split = torch.empty(0)
        """The buffer of the tensor that is being put together."""
        self._num_split = 0
        self._begun = 0
        self._in_flight: deque[tuple[torch.Tensor, Pending]] = deque()

    def run(self, watch: Watch) -> Iterator[tuple[int, torch.Tensor]]:
        """The index and the bytes of every tensor."""
        for index, size in enumerate(self._sizes):
            if size == 0:
                yield (
                    index,
                    torch.empty(0, dtype=torch.uint8, device=self._group.device),
                )
        for number, bucket in enumerate(self._buckets):
            self._begin(number, watch)
            buffer, pending = self._in_flight.popleft()
            watch.until(pending, f"bucket {number + 1} of {len(self._buckets)}")
            del pending
            for index, data in self._complete(bucket, buffer):
                yield index, data
                del data
                self._begin(number, watch)

    def _begin(self, number: int, watch: Watch) -> None:
        """Begin as many broadcasts as there is room for, beside bucket `number`.

        A bucket that is still looked at is left alone while others are in flight.
        """
        last = min(len(self._buckets), number + self._slots.count)
        while self._begun < last and (
            not self._in_flight or self._slots.is_free(self._begun)
        ):
            buffer = self._slots.take(self._begun)
            received = buffer[: self._buckets[self._begun].num_bytes]
            pending = self._group.broadcast(received, watch)
            self._in_flight.append((buffer, pending))
            self._begun += 1

    def _complete(
        self, bucket: Bucket, buffer: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors that are whole with this bucket."""
        for piece in bucket.pieces:
            size = self._sizes[piece.tensor]
            data = buffer[piece.place : piece.place + piece.num_bytes]
            if piece.num_bytes < size:
                whole = self._split
                if piece.start == 0:
                    self._num_split += 1
                    whole = self._split = self._whole.take(self._num_split)
                end = piece.start + piece.num_bytes
                whole[piece.start : end].copy_(data)
                if end < size:
                    continue
                data = whole[:size]
            yield piece.tensor, data
            del data
