"""Encoding a delta: finding what changed, and filling parts with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from vllm.inflight.delta import compression
from vllm.inflight.delta.part import HEADER, ROW, ZSTD, Part, ValueForm, block_elements
from vllm.inflight.ops import INTEGERS, native_core

if TYPE_CHECKING:
    from vllm.inflight.delta.device_encode import DeviceSearch

MAX_PART_BYTES = 32 << 20
"""Most bytes of a part, unless a caller sets another limit."""
LEAST_PART_BYTES = 64 << 10
"""A smaller limit would leave no room for a block of a useful size."""

MOST_PLACE = 1 << 63
"""More than the number of any element."""

VALUES = {"auto": 0, "raw": int(ValueForm.RAW), "difference": int(ValueForm.DIFFERENCE)}
"""What a caller asks for -> what the coders call it."""


class Coder(Protocol):
    """Encodes blocks, which wait until a part takes them.

    Attributes:
        blocks_at_once: blocks of a call of `add`, so that not much more than a part is
            in memory.

    """

    blocks_at_once: int

    def add(
        self, number: int, start: int, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode the changes between two flat tensors of integers from `start` on."""

    def add_places(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode changes with known places."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a part of all blocks that wait; 0 without any."""

    def take(self, limit: int) -> Part:
        """The first blocks that wait and fit into `limit` bytes, as a part."""


class Search(NamedTuple):
    """Tensors whose changes are looked for."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    """Each tensor before and now: flat, of integers."""
    on_device: DeviceSearch | None
    """Looks for them on a GPU; None: the host does that when it encodes them."""


class Encoder:
    """Makes the parts of one delta; not for several threads at once.

    Tensors come in the order of their numbers, each once. The methods are generators:
    they work while their parts are taken.

    Args:
        max_part_bytes: most bytes of a part before compression, at least 65536.
        values: "raw" for new bits, "difference" for new minus old bits, "auto" for the
            smaller one of each block.
        compress: level of zstd; None: no compression. It needs the package zstandard.
        num_threads: threads that share the blocks on the host.

    """

    def __init__(
        self,
        max_part_bytes: int = MAX_PART_BYTES,
        values: Literal["auto", "raw", "difference"] = "auto",
        compress: int | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        if max_part_bytes < LEAST_PART_BYTES:
            raise ValueError(f"max_part_bytes must be at least {LEAST_PART_BYTES}")
        if values not in VALUES:
            raise ValueError(f"values must be one of {', '.join(VALUES)}")
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if compress is not None:
            compression.require()
        self._limit, self._values, self._compress = max_part_bytes, values, compress
        self._num_threads = num_threads
        self._coder: Coder | None = None
        self._device: torch.device | None = None
        self._last = (-1, -1)
        """(number, element) up to which the delta is encoded."""
        self.has_changed = False
        """Whether the tensor that was added last has a changed element. If it has none,
        the next tensor may have its number."""
        self.have_changed: list[bool] = []
        """The same of each tensor of the last call of `add_all` or `add_found`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a part of all that is encoded and waits; 0 without any."""
        return 0 if self._coder is None else self._coder.num_bytes

    def add(self, number: int, old: torch.Tensor, new: torch.Tensor) -> Iterator[Part]:
        """Encode the changes of one tensor.

        Args:
            number: number of the tensor in the delta's list of names.
            old: the tensor before, contiguous.
            new: the tensor now: same shape, dtype and device, contiguous.

        Yields:
            Parts that are full.

        """
        before, now = _pair(old, new)
        self.has_changed = False
        self._advance(number, 0, max(before.numel() - 1, 0))
        yield from self._on(before.device)
        assert self._coder is not None
        step = block_elements(self._limit, before.element_size())
        step *= self._coder.blocks_at_once
        for start in range(0, before.numel(), step):
            stretch = slice(start, start + step)
            num_bytes = self._coder.num_bytes
            self._coder.add(number, start, before[stretch], now[stretch])
            self.has_changed |= self._coder.num_bytes > num_bytes
            yield from self._full()
        if not self.has_changed:
            self._last = (number, -1)

    def add_all(
        self, first: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[Part]:
        """Encode the changes of several tensors of one device.

        A tensor without a change gets no number; the others are numbered from `first`
        on. On a GPU this takes a few waits in all, and not a few for each tensor.

        Args:
            first: number of the first tensor that has changed.
            pairs: each tensor before and now, as in `add`.

        Yields:
            Parts that are full.

        """
        yield from self.add_found(first, self.search(pairs))

    def search(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Search:
        """Begin to look for the changes of several tensors of one device.

        A GPU looks for them while the host does something else. The host begins in
        `add_found`.

        Args:
            pairs: each tensor before and now, as in `add`; none may change before
                `add_found` has ended.

        """
        flat = [_pair(*pair) for pair in pairs]
        devices = {before.device for before, _ in flat}
        if len(devices) > 1:
            raise ValueError("the tensors of one call have to be on one device")
        if all(device.type == "cpu" for device in devices):
            return Search(flat, None)
        from vllm.inflight.delta.device_encode import Compared, DeviceSearch

        compared = [Compared(0, 0, *pair) for pair in flat]
        return Search(flat, DeviceSearch(compared, self._limit))

    def add_found(self, first: int, search: Search) -> Iterator[Part]:
        """Encode what a search finds, as `add_all` does.

        Args:
            first: number of the first tensor that has changed.
            search: of this encoder, once.

        Yields:
            Parts that are full.

        """
        self.have_changed = []
        if search.on_device is None:
            for before, now in search.pairs:
                yield from self.add(first + sum(self.have_changed), before, now)
                self.have_changed.append(self.has_changed)
            return
        from vllm.inflight.delta.device_encode import DeviceCoder

        self._advance(first, 0, -1)
        yield from self._on(search.pairs[0][0].device)
        assert isinstance(self._coder, DeviceCoder)
        self.have_changed, steps = self._coder.add_found(first, search.on_device)
        if num := sum(self.have_changed):
            self._last = (first + num - 1, MOST_PLACE)
        for _ in steps:
            yield from self._full()

    def add_places(
        self,
        number: int,
        positions: torch.Tensor,
        old_bits: torch.Tensor,
        new_bits: torch.Tensor,
    ) -> Iterator[Part]:
        """Encode changes whose places are known.

        Args:
            number: number of the tensor in the delta's list of names. It may come
                again with later positions.
            positions: numbers of the changed elements, strictly increasing; int64.
            old_bits: the elements before, of any dtype of their width.
            new_bits: the elements now, of the same dtype.

        Yields:
            Parts that are full.

        """
        before, now = _pair(old_bits, new_bits)
        kind = (positions.shape, positions.dtype, positions.device)
        if kind != (before.shape, torch.int64, before.device):
            raise ValueError(
                "positions must be an int64 for each changed element, on its device"
            )
        if not len(positions):
            return
        self._advance(number, int(positions[0]), int(positions[-1]))
        yield from self._on(before.device)
        assert self._coder is not None
        self._coder.add_places(number, positions.contiguous(), before, now)
        yield from self._full()

    def finish(self) -> Iterator[Part]:
        """Yield what is left; the next delta may begin then."""
        while self._coder is not None and self._coder.num_bytes:
            yield self._take()
        self._coder, self._last = None, (-1, -1)

    def _advance(self, number: int, first: int, last: int) -> None:
        if not 0 <= number < 1 << 32 or (number, first) <= self._last:
            raise ValueError(
                f"tensor {number} from element {first} on is not behind what was "
                "encoded before; tensors come in the order of their numbers"
            )
        self._last = (number, last)

    def _on(self, device: torch.device) -> Iterator[Part]:
        """Make the coder for a device; blocks of another device leave before."""
        if self._coder is not None and device == self._device:
            return
        while self._coder is not None and self._coder.num_bytes:
            yield self._take()
        self._device = device
        options = (self._limit, VALUES[self._values])
        if device.type == "cpu":
            self._coder = _HostCoder(*options, self._num_threads)
        else:
            from vllm.inflight.delta.device_encode import DeviceCoder

            self._coder = DeviceCoder(*options)

    def _full(self) -> Iterator[Part]:
        while self._coder is not None and self._coder.num_bytes > self._limit:
            yield self._take()

    def _take(self) -> Part:
        assert self._coder is not None
        part = self._coder.take(self._limit)
        if self._compress is None:
            return part
        return compressed(part, self._compress)


def changed(old: torch.Tensor, new: torch.Tensor, *, num_threads: int = 1) -> int:
    """The number of elements whose bits differ between two contiguous tensors."""
    before, now = _pair(old, new)
    if before.device.type != "cpu":
        return int((before != now).sum())
    return native_core().delta_count(
        *(before.data_ptr(), now.data_ptr(), before.numel()),
        *(before.element_size(), num_threads),
    )


class _HostCoder:
    """Encodes with the native core."""

    def __init__(self, limit: int, values: int, num_threads: int) -> None:
        self._limit, self._values, self._num_threads = limit, values, num_threads
        self.blocks_at_once = 4 * num_threads
        self._core = native_core()
        self._queue = self._core.delta_open()
        self.num_bytes = 0

    def add(
        self, number: int, start: int, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        self.num_bytes = self._core.delta_encode(
            *(self._queue, number, start, old.data_ptr(), new.data_ptr()),
            *(old.numel(), *self._options(old.element_size())),
        )

    def add_places(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        self.num_bytes = self._core.delta_encode_places(
            *(self._queue, number, places.data_ptr(), old.data_ptr(), new.data_ptr()),
            *(old.numel(), *self._options(old.element_size())),
        )

    def _options(self, width: int) -> tuple[int, int, int, int]:
        per_block = block_elements(self._limit, width)
        return width, per_block, self._values, self._num_threads

    def take(self, limit: int) -> Part:
        num_rows, num_bytes = self._core.delta_first(self._queue, limit)
        table_bytes = HEADER.size + num_rows * ROW.size
        table, data = (
            torch.empty(size, dtype=torch.uint8, device="cpu")
            for size in (table_bytes, num_bytes)
        )
        taken = (num_rows, table.data_ptr(), data.data_ptr())
        self.num_bytes = self._core.delta_take(self._queue, *taken)
        return Part(table, data)


def _pair(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors as flat integers."""
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        raise ValueError(
            f"a delta is between tensors of one shape, dtype and device, not "
            f"{tuple(old.shape)} {old.dtype} {old.device} and "
            f"{tuple(new.shape)} {new.dtype} {new.device}"
        )
    if not (old.is_contiguous() and new.is_contiguous()):
        raise ValueError("a delta is between contiguous tensors")
    if old.element_size() not in INTEGERS or old.is_complex():
        raise ValueError(f"a delta has no elements of {old.dtype}")
    integers = INTEGERS[old.element_size()]
    flat = (each.detach().reshape(-1).view(integers) for each in (old, new))
    before, now = flat
    return before, now


def compressed(part: Part, level: int) -> Part:
    """The part with compressed data on the host, if that is smaller."""
    table, data = part.table.cpu().clone(), part.data.cpu()
    packed = compression.compress(data, level)
    if packed.numel() >= data.numel():
        return part
    header = table.numpy().data
    fields = list(HEADER.unpack_from(header))
    fields[2], fields[-1] = ZSTD, packed.numel()
    HEADER.pack_into(header, 0, *fields)
    return Part(table, packed)
