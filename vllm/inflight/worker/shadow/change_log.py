"""The change log: the elements that an update changes, in place of a second set.

With `--inflight-staging delta` a rank has one set of weights. An update is staged as
places in the live parameters, with the bits that they will have. The commit exchanges
the bits of the log with those of the parameters (swap.py). From then on the log holds
what was served before: it is the way back. The next update is logged from the other end
of the memory, so the way back stays until that update is committed, or until both find
no room.

Every update is swapped in, and few are rolled back. So where the memory beside the
weights has no room for both, some of the way back is moved out of it, into host memory:
as much as an update of the same size needs. An update goes on there itself if it alone
is larger, or if the host has no room for the way back.

Every element has a number in the log. At that number, its old and its new bits
contribute to a digest (docs/digest.md). The sum is known when the update is staged, and
the swap computes it once more from the bits that it meets.

Host memory comes in blocks. A block is allocated when it is first needed, and kept.
Blocks of a GPU's log are page-locked: kernels read and write them by their addresses,
as they do memory of the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight import ops
from vllm.inflight.errors import ChangeLogFull, OutOfDeviceMemory
from vllm.inflight.worker.shadow.log_entries import (
    ALIGNMENT,
    LogEntries,
    Logged,
    Numbers,
    Pieces,
    aligned,
    sizes_of,
)

SUMS = 3
"""int64 values of the sums on a GPU: both halves of the digest, and the elements."""

GIB = 1 << 30

BLOCK_BYTES = 1 << 28
"""Bytes of a block of host memory. To page-lock much at once would stop decoding."""

MOVE_BYTES = 1 << 24
"""Bytes of the way back that one copy moves. A step's own copies may wait for those
that are enqueued: 0.3 ms each over PCIe."""

LEAST_NOTES_BYTES, MOST_NOTES_BYTES = 1 << 21, 1 << 23
"""Enough for tensors of 64 and of 256 MiB: a 32nd of them. See `MOST_NOTED` in
worker/delta/compare_kernels.py."""

LEAST_MOVED = 8
"""An update may be larger than the last one, and need room several times. Each time a
part of the way back moves: one of so many parts at least, as each move takes a wait."""


class Reserved(NamedTuple):
    """Memory for elements of several parameters, to be filled.

    Attributes:
        offsets: addresses of the offsets, int64 [parameters].
        bits: addresses of the bits.
        firsts: number of the first element of each parameter in the log.

    """

    offsets: Numbers
    bits: Numbers
    firsts: Numbers


class Keeping(NamedTuple):
    """What happens to the way back while an update is logged beside it.

    Attributes:
        give_up: called when there is no room for it; it calls `drop_kept`.
        rest: called while it is moved, with the bytes whose copies are enqueued since
            the update has begun.
        moved: called with the entries of the way back, some of them in other memory,
            from where its swap takes them from then on; it waits until they are copied.
            An exception from it, or from `rest`, leaves the way back where it was.

    """

    give_up: Callable[[], None]
    rest: Callable[[int], None]
    moved: Callable[[LogEntries], None]


class Area:
    """Memory of two logs: each takes from an end of its own.

    Args:
        memory: bytes.

    Attributes:
        num_kept: bytes that are taken for the log that is kept.

    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._used = 0
        """Bytes that are taken for the other log, from the top or from the bottom."""
        self._is_from_top = False
        self.num_kept = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken or kept."""
        return not self._used and not self.num_kept

    @property
    def num_left(self) -> int:
        """Bytes that can be taken."""
        return len(self.memory) - self._used - self.num_kept

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        own, other = self.memory.untyped_storage(), tensor.untyped_storage()
        return own.data_ptr() == other.data_ptr()

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """So many bytes; None if there is no room for them."""
        if num_bytes > self.num_left:
            return None
        self._used += num_bytes
        return self._last(num_bytes, self._used, is_from_top=self._is_from_top)

    def take_kept(self, num_bytes: int) -> torch.Tensor:
        """So many bytes for the log that is kept; there is room for them."""
        self.num_kept += num_bytes
        return self._last(num_bytes, self.num_kept, is_from_top=not self._is_from_top)

    def last_kept(self, pieces: Pieces, num_bytes: int) -> tuple[int, int]:
        """Stretches that were taken last for the log that is kept.

        Args:
            pieces: the ones of it that were taken last, and are still here.
            num_bytes: that they have at least, if so many are in these pieces.

        Returns:
            the first of them, and the end. No others are between them and what can be
            taken.

        """
        ends, num = pieces.ends, len(pieces.params)
        if self._is_from_top:  # so what is kept is at the bottom
            return int(np.searchsorted(ends, ends[-1] - num_bytes, side="right")), num
        return 0, min(int(np.searchsorted(ends, num_bytes)) + 1, num)

    def _last(self, num_bytes: int, used: int, *, is_from_top: bool) -> torch.Tensor:
        """The last so many of the bytes that are used from one end."""
        start = len(self.memory) - used if is_from_top else used - num_bytes
        return self.memory[start : start + num_bytes]

    def keep(self) -> None:
        """Keep what is taken; what comes now takes from the other end."""
        self.num_kept, self._used = self._used, 0
        self._is_from_top = not self._is_from_top

    def drop_kept(self) -> None:
        """Keep nothing."""
        self.num_kept = 0

    def empty(self) -> None:
        """Take nothing."""
        self._used = 0


class ChangeLog:
    """The change log of one rank.

    Args:
        device: of the live weights.
        capacity: bytes of its memory, which is allocated here. It is given back for a
            sleep alone.
        host_capacity: most bytes of host memory that it goes on in.

    """

    def __init__(
        self, device: torch.device, capacity: int, host_capacity: int = 0
    ) -> None:
        # With its number: tensors are compared with it.
        self.device = torch.empty(0, device=device).device
        self.capacity = capacity
        self.host_capacity = host_capacity
        self._memory: Area | None = None
        self._notes = torch.empty(0, dtype=torch.int16, device=self.device)
        """Part of what is allocated, beside the capacity."""
        self._notes_stream: torch.cuda.Stream | None = None
        """The stream whose work uses them."""
        self.holds_way_back = False
        """Whether what is logged is the way back: its update is committed."""
        self._kept: LogEntries | None = None
        """Of the log before this one; None if that is not there any more."""
        self._keeping: Keeping | None = None
        self._may_move = False
        """Whether the way back may be moved into host memory."""
        self._num_copied = 0
        """Bytes that were copied for that since the update has begun."""
        self._blocks: list[Area] = []
        """In host memory."""
        self._lack = ""
        """Why the host gave no block, for messages."""
        self.has_room = True
        """Whether all elements found room."""
        self.number = 0
        """Changes whenever the log is emptied, and with the live weights."""
        self._pieces: list[Pieces] = []
        self.num_bytes = 0
        """Bytes of the elements, whether the log has room for them or not."""
        self.num_elements = 0
        self._terms = ops.Digest.ZERO
        self._num_counted = 0
        self.sums: torch.Tensor | None = None
        """On a GPU: the sums over elements whose bits the host has not seen."""
        self._known: list[int] | None = None
        """These sums, if they were read since somebody has asked for their memory."""
        self.allocate()

    def allocate(self) -> None:
        """Get memory, unless there is some; raises `OutOfDeviceMemory`."""
        if self._memory is not None:
            return
        num_bytes = self.allocated_bytes
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise OutOfDeviceMemory(
                f"there is no memory for a log of {num_bytes} bytes: {error}",
                missing_bytes=num_bytes,
            ) from error
        self._memory = Area(memory[: self.capacity])
        self._notes = memory[_aligned(self.capacity) :].view(torch.int16)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that `allocate` takes: those of the capacity and of the notes."""
        return _aligned(self.capacity) + notes_bytes(self.capacity)

    def free(self) -> None:
        """Give the memory back; `allocate` gets it again."""
        self.clear()
        self._memory, self._notes = None, self._notes.new_empty(0)

    def take_notes(self) -> torch.Tensor:
        """Scratch memory for whoever compares tensors, until it is taken again; int16.

        On a GPU it is for the current stream, which waits for the one that had it.
        """
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._notes_stream not in (None, stream):
                stream.wait_stream(self._notes_stream)
            self._notes_stream = stream
        return self._notes

    def clear(self) -> None:
        """Empty the log: there is no way back any more."""
        self.drop_kept()
        self._empty()

    def begin(self, keeping: Keeping) -> None:
        """Begin to log an update, and keep the way back.

        Args:
            keeping: what happens to that when it is in the way.

        """
        if self.holds_way_back:  # else an update was aborted since
            for area in self._areas:
                area.keep()
            self._kept = self.entries
        self._keeping, self._may_move, self._num_copied = keeping, True, 0
        self._empty()

    @property
    def keeps(self) -> bool:
        """Whether the way back is kept beside what is logged."""
        return self._kept is not None and not self.holds_way_back

    def drop_kept(self) -> None:
        """Keep the way back no longer, while an update is logged."""
        self._kept, self._keeping = None, None
        for area in self._areas:
            area.drop_kept()

    @property
    def _areas(self) -> list[Area]:
        return [*filter(None, [self._memory]), *self._blocks]

    def _empty(self) -> None:
        self.number += 1
        self.holds_way_back = False
        for area in self._areas:
            area.empty()
        self._pieces = []
        self.num_bytes = self.num_elements = self._num_counted = 0
        self.has_room, self._lack = True, ""
        self._terms, self.sums, self._known = ops.Digest.ZERO, None, None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the log has by now."""
        return sum(len(block.memory) for block in self._blocks)

    @property
    def room_beside_weights(self) -> int:
        """Bytes that can be taken beside the weights, without host memory.

        The way back may have to be moved out for them, where the host has room for it.
        """
        if self._memory is None or not self.has_room:
            return 0
        movable = self._memory.num_kept if self.keeps and self._may_move else 0
        return self._memory.num_left + movable

    def are_beside_weights(self, addresses: Numbers) -> NDArray[np.bool_]:
        """Which addresses of reserved memory are beside the weights."""
        assert self._memory is not None
        memory = self._memory.memory
        first = memory.data_ptr()
        found: NDArray[np.bool_] = (addresses >= first) & (
            addresses < first + memory.numel()
        )
        return found

    def require_room(self) -> None:
        """Raise `ChangeLogFull` unless all elements found room."""
        if self.has_room:
            return
        needed = self.num_bytes / GIB
        raise ChangeLogFull(
            f"the update changes {self.num_elements} elements on this rank, and their "
            f"log takes {self.num_bytes} bytes; there is room for {self.capacity}, and "
            f"for {self.host_capacity} in host memory{self._lack}. "
            f"--inflight-delta-gib {_rounded_up(needed)} has room for them",
            missing_bytes=max(
                ALIGNMENT, self.num_bytes - self.capacity - self.host_capacity
            ),
        )

    @property
    def entries(self) -> LogEntries:
        """What is logged by now."""
        return LogEntries(tuple(self._pieces))

    def reserve(self, param: str, num: int, width: int) -> Logged | None:
        """Memory for elements of a parameter, to be filled; None if there is no room.

        Elements without room are counted, so that the error can say how much is
        missing.
        """
        if self.reserve_all([param], np.array([num]), np.array([width])) is None:
            return None
        (logged,) = self._pieces[-1].stretches()
        return logged

    def reserve_all(
        self, params: Sequence[str], counts: Numbers, widths: Numbers
    ) -> Reserved | None:
        """Memory for elements of several parameters; None if there is no room for all.

        Args:
            params: the parameter of each stretch.
            counts: its elements.
            widths: bytes of one of them.

        """
        sizes = sizes_of(counts, widths)
        num_bytes, num = int(sizes.sum()), int(counts.sum())
        if len(params) > 1 and not (self.has_room and self._makes_room(num_bytes)):
            # Host memory is taken stretch by stretch, as blocks have to be filled.
            each = [
                self.reserve_all([param], counts[n : n + 1], widths[n : n + 1])
                for n, param in enumerate(params)
            ]
            found = [one for one in each if one is not None]
            if len(found) < len(each):
                return None
            return Reserved(*map(np.concatenate, zip(*found, strict=True)))
        firsts = self.num_elements + np.cumsum(counts) - counts
        self.num_elements += num
        self.num_bytes += num_bytes
        space = self._take(num_bytes) if self.has_room else None
        if space is None:
            self.has_room = False
            return None
        offsets = space.data_ptr() + np.cumsum(sizes) - sizes
        bits = offsets + aligned(4 * counts)
        rows = np.stack((offsets, bits, counts, firsts, widths), 1)
        self._pieces.append(Pieces(tuple(params), rows, space))
        return Reserved(offsets, bits, firsts)

    def add(
        self, param: str, offsets: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Log elements of a parameter.

        Args:
            param: its name.
            offsets: places in its memory; each only once per update.
            old: the bits that are served there, as integers.
            new: the bits that the update brings.

        """
        num, width = len(offsets), new.element_size()
        if not num or (logged := self.reserve(param, num, width)) is None:
            return
        # Converted first: a copy to the host would convert there.
        logged.offsets.copy_(offsets.to(torch.int32), non_blocking=True)
        logged.bits.copy_(new, non_blocking=True)
        first = logged.first
        numbers = torch.arange(first, first + num, device=self.device)
        self._num_counted += num
        if self.device.type == "cpu":
            self._terms += ops.digest_of_changes(numbers, old, new, width)
            return
        from vllm.inflight.ops.triton_kernels import add_changes

        add_changes(numbers, old.contiguous(), new.contiguous(), self.sums_on_device())

    def _take(self, num_bytes: int) -> torch.Tensor | None:
        """Memory beside the weights, or else host memory; None if there is none.

        Where there is none for two logs, the way back is given up, unless that would
        not help.
        """
        assert self._memory is not None
        if self._makes_room(num_bytes):
            return self._memory.take(num_bytes)
        if (block := self._block(num_bytes)) is not None:
            return block.take(num_bytes)
        helps = any(area.num_kept for area in self._areas)
        helps &= self.num_bytes <= self.capacity + self.host_capacity
        if not self.keeps or not helps:
            return None
        assert self._keeping is not None
        self._keeping.give_up()
        return self._take(num_bytes)

    def _makes_room(self, num_bytes: int) -> bool:
        """Whether there is room beside the weights; moves the way back out if needed.

        Args:
            num_bytes: that shall be taken.

        """
        assert self._memory is not None
        lack = num_bytes - self._memory.num_left
        return lack <= 0 or (
            lack <= self._memory.num_kept and self._move_way_back(lack)
        )

    def _move_way_back(self, lack: int) -> bool:
        """Move some of the way back into host memory; returns whether that had room.

        If it had not, or if an exception ends the move, nothing has moved.

        Args:
            lack: bytes that are missing beside the weights.

        """
        if not self.keeps or not self._may_move:
            return False
        self._may_move = False  # room that is not there now will not come
        memory, way_back, keeping = self._memory, self._kept, self._keeping
        assert memory is not None and way_back is not None and keeping is not None
        # An update is about as large as the one before.
        num_before = sum(map(len, way_back.memory))
        expected = num_before + memory.num_kept - len(memory.memory)
        taken: list[tuple[Area, int]] = []
        try:
            for wanted in (max(lack, expected, num_before // LEAST_MOVED), lack):
                moves = self._moves(way_back, memory, wanted, taken)
                if moves is not None:
                    break
                _give_back(taken)
            else:
                return False
            self._copy(moves, keeping.rest)
            moved = LogEntries(tuple(target for _, target in moves))
            keeping.moved(moved)
            self._kept = moved
            memory.num_kept -= sum(num_bytes for _, num_bytes in taken)
            taken.clear()
            self._may_move = True
        finally:
            _give_back(taken)
        return True

    def _moves(
        self,
        way_back: LogEntries,
        memory: Area,
        wanted: int,
        taken: list[tuple[Area, int]],
    ) -> list[tuple[Pieces, Pieces]] | None:
        """Where the way back lies and where it will; None if the host has no room.

        Args:
            way_back: its entries, in the order in which they were taken. Those in host
                memory stay where they are.
            memory: that beside the weights.
            wanted: bytes that it shall have left, if so many of the way back are there.
            taken: gets the blocks of which memory was taken, and how much.

        """
        moves: list[tuple[Pieces, Pieces]] = []
        for pieces in reversed(way_back.pieces):
            left = wanted - sum(num_bytes for _, num_bytes in taken)
            first = end = num = len(pieces.params)
            if left > 0 and memory.has(pieces.memory):
                first, end = memory.last_kept(pieces, left)
            placed = self._placed(pieces, first, end, taken)
            if placed is None:
                return None
            stay = pieces.part(0, first), pieces.part(end, num)
            before, after = ([(part, part)] * bool(part.params) for part in stay)
            moves = [*before, *placed, *after, *moves]
        return moves

    def _placed(
        self, pieces: Pieces, first: int, end: int, taken: list[tuple[Area, int]]
    ) -> list[tuple[Pieces, Pieces]] | None:
        """Some stretches, and the same in host memory; None if that has no room."""
        placed: list[tuple[Pieces, Pieces]] = []
        ends = pieces.ends
        start = int(ends[first - 1]) if first else 0
        while first < end:
            if (block := self._block(int(ends[first]) - start)) is None:
                return None
            # As many stretches as the block has room for.
            fits = int(np.searchsorted(ends, start + block.num_left, side="right"))
            part = pieces.part(first, min(fits, end))
            num_bytes = len(part.memory)
            placed.append((part, part.at(block.take_kept(num_bytes))))
            taken.append((block, num_bytes))
            first, start = min(fits, end), start + num_bytes
        return placed

    def _copy(
        self, moves: Sequence[tuple[Pieces, Pieces]], rest: Callable[[int], None]
    ) -> None:
        """Copy pieces that move; `rest` as in `Keeping`."""
        num_rested = self._num_copied
        for source, target in moves:
            if source is target:
                continue
            for at in range(0, len(source.memory), MOVE_BYTES):
                part = source.memory[at : at + MOVE_BYTES]
                place = target.memory[at : at + MOVE_BYTES]
                place.copy_(part, non_blocking=True)
                self._num_copied += len(part)
                if self._num_copied >= num_rested + MOVE_BYTES:
                    rest(self._num_copied)
                    num_rested = self._num_copied
        rest(self._num_copied)

    def _block(self, num_bytes: int) -> Area | None:
        """Host memory with room for so many bytes; None if there is none."""
        for block in self._blocks:
            if num_bytes <= block.num_left:
                return block
        fresh = self._new_block(num_bytes)
        if fresh is not None:
            self._blocks.append(fresh)
        return fresh

    def _new_block(self, num_bytes: int) -> Area | None:
        """A block with room for so many bytes; None if there is no memory for it."""
        if self.host_capacity - self.host_bytes < num_bytes:
            # Blocks that nothing refers to are too short.
            self._blocks = [block for block in self._blocks if not block.is_empty]
        left = self.host_capacity - self.host_bytes
        if left < num_bytes:
            return None
        size = min(left, max(num_bytes, BLOCK_BYTES))
        try:
            is_pinned = self.device.type == "cuda"
            memory = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._lack = f", which the host does not have ({error})"
            return None
        return Area(memory)

    def sums_on_device(self) -> torch.Tensor:
        """The sums on the GPU: int64 [SUMS]; whoever fills `reserve` adds to them."""
        if self.sums is None:
            self.sums = torch.zeros(SUMS, dtype=torch.int64, device=self.device)
        self._known = None
        return self.sums

    def know(self, sums: list[int]) -> None:
        """These are the sums on the GPU; somebody has read them with other numbers."""
        self._known = sums

    def expected(self) -> tuple[ops.Digest, int]:
        """What a swap has to find: the sum over all elements, and their number."""
        terms, num = self._terms, self._num_counted
        if self.sums is not None:
            a, b, others = self._known or self.sums.tolist()
            terms, num = terms + ops.Digest(a % 2**64, b % 2**64), num + others
        return terms, num


def capacity_of(gib: float, num_bytes: int) -> int:
    """Bytes of the log of a rank.

    Args:
        gib: `--inflight-delta-gib`; 0 means a twentieth of the weights. The notes have
            a 128th of that. What those of a small log take more is beside it.
        num_bytes: of the weights of this rank.

    """
    if gib:
        return _aligned(int(gib * GIB))
    both = max(num_bytes // 20, 1 << 16)
    return (both - min(both // 128, notes_bytes(both))) // ALIGNMENT * ALIGNMENT


def notes_bytes(capacity: int) -> int:
    """Bytes of the notes beside a log of that capacity."""
    least = min(LEAST_NOTES_BYTES, capacity // 8)
    return _aligned(max(least, min(capacity // 128, MOST_NOTES_BYTES)))


def host_capacity_of(gib: float, num_bytes: int) -> int:
    """Most bytes of host memory that the log of a rank goes on in.

    Args:
        gib: `--inflight-delta-host-gib`; -1 means a quarter of the weights.
        num_bytes: of the weights of this rank.

    """
    return _aligned(num_bytes // 4 if gib < 0 else int(gib * GIB))


def _give_back(taken: list[tuple[Area, int]]) -> None:
    """Give memory back that was taken for what is kept."""
    for area, num_bytes in taken:
        area.num_kept -= num_bytes
    taken.clear()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _rounded_up(gib: float) -> str:
    """A number of GiB that is no less, with three decimals."""
    return f"{math.ceil(gib * 1000) / 1000:g}"
