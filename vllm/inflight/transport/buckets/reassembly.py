"""Reassembly: whole tensors are put together from the pieces of a transfer.

A tensor may be larger than a bucket, or sent in slices (see tensor_slices.py). A tensor
that lies whole in a bucket is used there. Others are put together in scratch memory, or
at their destination if it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.buckets.plan import Bucket, Piece, extent
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.buckets.tensor_slices import TensorSlice

Data = tuple[int, torch.Tensor]
"""The index of a whole tensor, and its bytes."""

WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""Element size in bytes -> the dtype that elements are copied as. Torch cannot copy
every dtype."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory that a tensor is to be received into, whole and contiguous.

    Destinations are made once and kept. Every torch call releases the GIL, and during
    decoding it takes a while to get it back.
    """

    tensor: torch.Tensor
    data: torch.Tensor
    """The same memory as bytes: uint8 [nbytes]."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The destination that a contiguous tensor is."""
        return cls(tensor, tensor.view(-1).view(torch.uint8))


Place = Callable[[str, tuple[int, ...], torch.dtype], Destination | None]
"""(name, shape, dtype) -> the tensor's destination, or None if it is not known."""


class Reassembly:
    """Puts the tensors of one transfer together.

    Args:
        tensor_list: the tensors and slices that are sent.
        buckets: the bucket plan of the tensor list.
        scratch: memory for tensors in pieces; the receiver keeps it between transfers.
        rank: the worker's tensor-parallel rank. Where several ranks hold the same
            slice, the slice of this rank is used.

    """

    def __init__(
        self,
        tensor_list: TensorList,
        buckets: Sequence[Bucket],
        scratch: Buffers,
        rank: int | None,
    ) -> None:
        self._buckets = buckets
        self._scratch = scratch
        self.wholes = tensor_list.wholes()
        self._slices: dict[int, tuple[int, TensorSlice]] = {
            part.entry: (number, part)
            for number, whole in enumerate(self.wholes)
            for part in whole.taken(rank)
        }
        """Entry that is used -> its tensor's index, and its place in the tensor."""
        self.destinations: dict[int, Destination] = {}
        """Tensor -> its destination, for tensors that are received there."""
        self._in_place: dict[int, int] = {}
        """Entry received at the destination -> its offset there, in bytes."""
        self._left = [whole.num_bytes for whole in self.wholes]
        """The bytes of each tensor that are still missing."""
        self._in_pieces: set[int] = set()
        """Tensors that are put together in scratch memory."""
        self._open = torch.empty(0)
        """The scratch memory of the tensor that is put together now."""
        self._num_opened = 0

    @property
    def empty(self) -> list[int]:
        """Tensors without elements, which are in no bucket."""
        return [n for n, whole in enumerate(self.wholes) if not whole.num_bytes]

    def into(self, place: Place) -> None:
        """Find the destinations of tensors that travel in messages of their own."""
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        alone = {piece.tensor for piece in pieces if piece.is_alone}
        taken = {entry: self._slices[entry] for entry in alone & self._slices.keys()}
        for number in {number for number, _ in taken.values()}:
            whole = self.wholes[number]
            found = place(whole.name, whole.shape, whole.dtype)
            if found is not None:
                self.destinations[number] = found
        for entry, (number, part) in taken.items():
            if number in self.destinations and part.num_rows == 1:
                self._in_place[entry] = part.first * self.wholes[number].dtype.itemsize

    def make_room(self) -> None:
        """Allocate scratch memory for tensors that come in pieces.

        This happens before any broadcast, because during one CUDA may wait for the
        whole device. There are two buffers, since a model reads one tensor until it
        asks for the next.
        """
        num_pieces = Counter(
            self._slices[piece.tensor][0]
            for bucket in self._buckets
            for piece in bucket.pieces
            if piece.tensor in self._slices
        )
        self._in_pieces = {n for n, count in num_pieces.items() if count > 1}
        self._in_pieces -= self.destinations.keys()
        self._scratch.grow(2, max((self._left[n] for n in self._in_pieces), default=0))

    def received(self, bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where each message of a bucket is received: its destination, or `buffer`."""
        received = []
        for message in bucket.messages:
            first = message[0]
            if first.tensor not in self._in_place:
                received.append(buffer[extent(message)])
                continue
            number, _ = self._slices[first.tensor]
            home = self.destinations[number].data
            if first.num_bytes < self.wholes[number].num_bytes:
                start = self._in_place[first.tensor] + first.start
                home = home[start : start + first.num_bytes]
            received.append(home)
        return received

    def complete(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[list[Data]]:
        """The tensors that this bucket completes, in batches.

        A tensor in scratch memory ends its batch, because the scratch memory is reused
        by the tensor after the next.
        """
        batch: list[Data] = []
        for piece in bucket.pieces:
            batch += self._put(piece, buffer)
            if batch and batch[-1][0] in self._in_pieces:
                yield batch
                batch = []
        if batch:
            yield batch

    def _put(self, piece: Piece, buffer: torch.Tensor) -> Iterator[Data]:
        """Copy a piece into its tensor, and yield the tensor if it is now whole."""
        if piece.tensor not in self._slices:
            return  # the worker uses the same slice from another rank
        number, part = self._slices[piece.tensor]
        whole, home = self.wholes[number], self.destinations.get(number)
        size = whole.num_bytes
        if number in self._in_pieces and self._left[number] == size:
            self._num_opened += 1
            self._open = self._scratch.take(self._num_opened, size)
        if piece.tensor in self._in_place:
            assert home is not None
            data = home.data
        else:
            data = buffer[piece.place : piece.place + piece.num_bytes]
            if home is not None or number in self._in_pieces:
                target = self._open[:size] if home is None else home.data
                word = WORDS[whole.dtype.itemsize]
                start = piece.start // word.itemsize
                part.lay(target.view(word), start, data.view(word))
                data = target
        self._left[number] -= piece.num_bytes
        if not self._left[number]:
            yield number, data
