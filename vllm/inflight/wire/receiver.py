"""The receiving end: buckets come in while the tensors of earlier ones are loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from vllm.inflight.wire.announcement import Announcement, Pair
from vllm.inflight.wire.buckets import Bucket, extent, plan
from vllm.inflight.wire.group import Group, Pending
from vllm.inflight.wire.slots import Slots, bucket_slots
from vllm.inflight.wire.watch import Watch
from vllm.inflight.wire.window import Window

T = TypeVar("T")
Piece = tuple[int, torch.Tensor]
"""Index and bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a tensor ends up, whole and contiguous.

    Made once and kept: every call of torch lets go of the interpreter, and beside
    decoding it is a while until it comes back.
    """

    tensor: torch.Tensor
    data: torch.Tensor
    """Its bytes: uint8 [nbytes]."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Of a contiguous tensor."""
        return cls(tensor, tensor.view(-1).view(torch.uint8))


Place = Callable[[str, tuple[int, ...], torch.dtype], Home | None]
"""The home of a tensor of that name and form, if it is known."""


class Receiver:
    """One worker's end of a group; to make it is collective."""

    def __init__(
        self, group: Group, num_buckets: int, watch: Watch, *, target_s: float = 0.002
    ) -> None:
        self.group = group
        self._slots = bucket_slots(group, num_buckets, watch)
        self.window = Window(num_buckets, target_s)
        self._whole = Slots(0, 0, group.device)
        """For tensors that a bucket is too small for."""

    def tensors(self, announced: Announcement, watch: Watch) -> Incoming:
        """What was announced, as it arrives.

        Args:
            announced: what the trainer is going to send.
            watch: bounds the wait for each bucket.

        """
        return Incoming(self.group, announced, self._transfer(announced), watch)

    def _transfer(self, announced: Announcement) -> _Transfer:
        terms = self.group.terms
        buckets = plan(announced.sizes, terms.bucket_bytes, large=self.group.large)
        return _Transfer(
            self.group, self._slots, self._whole, self.window, announced, buckets
        )


class Incoming:
    """Tensors of one transfer: an iterator of pairs, or of the pairs of a bucket.

    They are views into a bucket, or into a buffer of their own if a bucket was too
    small; those without elements come first. The current stream may still be reading
    one when the next is asked for. To leave this before its end breaks the group:
    buckets are in flight.

    Once it was told where tensors end up, those that are large come in there; what is
    handed over is then that memory.

    Raises:
        TransferFault: a peer died, left or stalled; the group was aborted.
        Cancelled: likewise.

    """

    def __init__(
        self,
        group: Group,
        announced: Announcement,
        transfer: _Transfer,
        watch: Watch,
    ) -> None:
        self._group = group
        self._transfer = transfer
        self._batches = self._typed(announced, transfer.run(watch))
        self._pairs = (pair for batch in self._batches for pair in _taken(batch))

    def __iter__(self) -> Iterator[Pair]:
        return self

    def __next__(self) -> Pair:
        return next(self._pairs)

    def into(self, place: Place) -> None:
        """Receive in place what `place` knows; to be called before the first tensor."""
        self._transfer.into(place)

    def batches(self) -> Iterator[list[Pair]]:
        """The same, as many as became whole at once."""
        return self._batches

    def _typed(
        self, announced: Announcement, run: Iterator[list[Piece]]
    ) -> Iterator[list[Pair]]:
        try:
            for pieces in run:
                batch = []
                for index, data in _taken(pieces):
                    home = self._transfer.homes.get(index)
                    if home is None:
                        shape = announced.shapes[index]
                        tensor = data.view(announced.dtypes[index]).view(shape)
                    else:
                        tensor = home.tensor
                    batch.append((announced.names[index], tensor))
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
        slots: Slots,
        whole: Slots,
        window: Window,
        announced: Announcement,
        buckets: list[Bucket],
    ) -> None:
        self._group = group
        self._slots = slots
        self._whole = whole
        self._window = window
        self._announced = announced
        self._sizes = announced.sizes
        self._buckets = buckets
        self.homes: dict[int, Home] = {}
        """Of tensors that are received where they end up."""
        self._split = torch.empty(0)
        """The buffer of the tensor that is being put together."""
        self._num_split = 0
        self._begun = 0
        self._in_flight: deque[tuple[torch.Tensor, Pending]] = deque()

    def into(self, place: Place) -> None:
        """Find the places of those that travel alone."""
        announced = self._announced
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        for index in {piece.tensor for piece in pieces if piece.is_alone}:
            form = announced.shapes[index], announced.dtypes[index]
            found = place(announced.names[index], *form)
            if found is not None:
                self.homes[index] = found

    def run(self, watch: Watch) -> Iterator[list[Piece]]:
        """The index and the bytes of every tensor, bucket by bucket."""
        self._make_room()
        empty = torch.empty(0, dtype=torch.uint8, device=self._group.device)
        if without := [(i, empty) for i, size in enumerate(self._sizes) if size == 0]:
            yield without
        for number, bucket in enumerate(self._buckets):
            self._begin(number, watch)
            buffer, pending = self._in_flight.popleft()
            what = f"bucket {number + 1} of {len(self._buckets)}"
            self._window.note(watch.until(pending, what))
            # The next ones are on their way while this one is looked at.
            self._begin(number, watch)
            del pending
            yield list(self._complete(bucket, buffer))

    def _make_room(self) -> None:
        """For tensors that no bucket holds whole, unless they have a place.

        Before a broadcast is under way, for CUDA may then wait for the whole device;
        and kept. Two, since a model looks at one tensor until it asks for the next.
        """
        split = [
            self._sizes[piece.tensor]
            for bucket in self._buckets
            for piece in bucket.pieces
            if piece.num_bytes < self._sizes[piece.tensor]
            and piece.tensor not in self.homes
        ]
        self._whole.grow(2, max(split, default=0))

    def _begin(self, number: int, watch: Watch) -> None:
        """Begin as many broadcasts as there is room for, beside bucket `number`.

        A bucket that is still looked at is left alone while others are in flight.
        """
        last = min(len(self._buckets), number + self._window.size)
        while self._begun < last and (
            not self._in_flight or self._slots.is_free(self._begun)
        ):
            buffer = self._slots.take(self._begun)
            received = self._received(self._buckets[self._begun], buffer)
            pending = self._group.broadcast(received, watch)
            self._in_flight.append((buffer, pending))
            self._begun += 1

    def _received(self, bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where the messages of a bucket go: to their place, or into `buffer`."""
        received = []
        for message in bucket.messages:
            first = message[0]
            home = self.homes.get(first.tensor)
            if home is None:
                received.append(buffer[extent(message)])
            elif first.num_bytes == self._sizes[first.tensor]:
                received.append(home.data)
            else:
                end = first.start + first.num_bytes
                received.append(home.data[first.start : end])
        return received

    def _complete(
        self, bucket: Bucket, buffer: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors that are whole with this bucket."""
        for piece in bucket.pieces:
            size = self._sizes[piece.tensor]
            home = self.homes.get(piece.tensor)
            if home is not None:
                if piece.start + piece.num_bytes == size:
                    yield piece.tensor, home.data
                continue
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
