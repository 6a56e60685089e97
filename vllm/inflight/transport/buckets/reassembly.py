"""The assembly of a transfer: what arrives in pieces is put together to whole tensors.

A tensor may be larger than a bucket, or sent in slices (see tensor_slices.py). One that
lies in a bucket whole is used where it is; others are put together in scratch memory,
or in their place if that is known.
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
"""Index and bytes of a whole tensor."""

WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""What elements are moved as, by their bytes: torch cannot copy every dtype."""


@dataclass(frozen=True, slots=True)
class Destination:
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


Place = Callable[[str, tuple[int, ...], torch.dtype], Destination | None]
"""The home of a tensor of that name and form, if it is known."""


class Reassembly:
    """What the pieces of one transfer become.

    Args:
        announced: what is sent.
        buckets: in which pieces.
        scratch: kept by whoever receives, from transfer to transfer.
        rank: whose own slices are taken where several ranks hold the same.

    """

    def __init__(
        self,
        announced: TensorList,
        buckets: Sequence[Bucket],
        scratch: Buffers,
        rank: int | None,
    ) -> None:
        self._buckets = buckets
        self._scratch = scratch
        self.wholes = announced.wholes()
        self._slices: dict[int, tuple[int, TensorSlice]] = {
            part.entry: (number, part)
            for number, whole in enumerate(self.wholes)
            for part in whole.taken(rank)
        }
        """Of the entries that are taken: of which tensor they are, and where in it."""
        self.homes: dict[int, Destination] = {}
        """Of tensors that are put where they end up."""
        self._in_place: dict[int, int] = {}
        """Of entries that are received there: where in it they begin, in bytes."""
        self._left = [whole.num_bytes for whole in self.wholes]
        """Bytes of each tensor that have not come yet."""
        self._in_pieces: set[int] = set()
        """The tensors that are put together in scratch memory."""
        self._open = torch.empty(0)
        """Where that is done with the last of them."""
        self._num_opened = 0

    @property
    def empty(self) -> list[int]:
        """The tensors without elements, which no bucket brings."""
        return [n for n, whole in enumerate(self.wholes) if not whole.num_bytes]

    def into(self, place: Place) -> None:
        """Find the places of those that travel alone."""
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces]
        alone = {piece.tensor for piece in pieces if piece.is_alone}
        taken = {entry: self._slices[entry] for entry in alone & self._slices.keys()}
        for number in {number for number, _ in taken.values()}:
            whole = self.wholes[number]
            found = place(whole.name, whole.shape, whole.dtype)
            if found is not None:
                self.homes[number] = found
        for entry, (number, part) in taken.items():
            if number in self.homes and part.num_rows == 1:
                self._in_place[entry] = part.first * self.wholes[number].dtype.itemsize

    def make_room(self) -> None:
        """For tensors that come in pieces, unless they have a place.

        Before a broadcast is under way, for CUDA may then wait for the whole device;
        and kept. Two, since a model looks at one tensor until it asks for the next.
        """
        num_pieces = Counter(
            self._slices[piece.tensor][0]
            for bucket in self._buckets
            for piece in bucket.pieces
            if piece.tensor in self._slices
        )
        self._in_pieces = {n for n, count in num_pieces.items() if count > 1}
        self._in_pieces -= self.homes.keys()
        self._scratch.grow(2, max((self._left[n] for n in self._in_pieces), default=0))

    def received(self, bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where the messages of a bucket go: to their place, or into `buffer`."""
        received = []
        for message in bucket.messages:
            first = message[0]
            if first.tensor not in self._in_place:
                received.append(buffer[extent(message)])
                continue
            number, _ = self._slices[first.tensor]
            home = self.homes[number].data
            if first.num_bytes < self.wholes[number].num_bytes:
                start = self._in_place[first.tensor] + first.start
                home = home[start : start + first.num_bytes]
            received.append(home)
        return received

    def complete(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[list[Data]]:
        """The tensors that are whole with this bucket.

        One from scratch memory ends its batch: the next but one is put together there.
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
        """Bring a piece to its place; the tensor that is whole with it, if one is."""
        if piece.tensor not in self._slices:
            return  # a copy of what the worker takes from another rank
        number, part = self._slices[piece.tensor]
        whole, home = self.wholes[number], self.homes.get(number)
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
