"""Digests on a GPU: sums and non-finite values of an update, read back once.

Reading a number from a GPU waits for the GPU. So the sums of every tensor stay there
until the end of the update, and one copy brings them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from vllm.inflight import ops
from vllm.inflight.ops.arriving import Arriving
from vllm.inflight.ops.launch_tables import LaunchTable
from vllm.inflight.ops.reference import COUNT, PLACE, page_key

AT_ONCE_BYTES = 2 << 30
"""Bytes of tensors received in place that one launch reads: a launch costs the thread
more than the GPU."""
ROWS = 1024
PAGE_BYTES = 2**35
MAX_TABLES = 4096
NUM_BAD = 2
"""Column in which the kernel counts non-finite values."""

Pair = tuple[str, torch.Tensor]
Places = tuple[tuple[int, int, int, int], ...]
"""The addresses of tensors, with their size, their limit of finite numbers and their
first chunk."""
Tables = dict[Places, LaunchTable | None]
"""The table of the kernel for some tensors.

A transport reuses its memory, so the same tables are needed over and over. A trainer
that lends other memory at each update needs others: the older ones are dropped.
"""


class Homes(Protocol):
    """Knows which tensors are received in place."""

    def is_home(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the memory where it will be served."""


class GpuDigest:
    """The digests of tensors on one device.

    Args:
        device: of the tensors.
        tables: tables of earlier digests; new ones are added.
        plan: knows which tensors are received in place.
        served_as: the dtype in which a tensor is served, by its name and its own
            dtype. A number that overflows there counts as non-finite.

    """

    def __init__(
        self,
        device: torch.device,
        tables: Tables,
        plan: Homes | None = None,
        served_as: Callable[[str, torch.dtype], torch.dtype | None] | None = None,
    ) -> None:
        self._device = device
        self._served_as = served_as or (lambda name, dtype: None)
        self._tables = tables
        self._plan = plan
        self._used: set[Places] = set()
        """The tables that were used."""
        self._pages: list[torch.Tensor] = []
        self._num_rows = 0
        """Used rows of the last page."""
        self._stream: torch.cuda.Stream | None = None
        """The stream that was used last."""
        self._added: list[tuple[str, int, int, int]] = []
        """(name, bytes, page, row) of every tensor."""
        self._first_bytes: dict[str, int] = {}
        """Number of the first byte of what is a part of a tensor."""
        self._staying: list[Pair] = []
        self._staying_bytes = 0

    def add(
        self, pairs: Sequence[Pair], first_bytes: Mapping[str, int] | None = None
    ) -> None:
        """Compute the sums of these tensors on the current stream.

        A part of a tensor that is a run of its elements has the number of its first
        byte there in `first_bytes`, a multiple of 8. Its digest is its share of that of
        the tensor.

        A tensor may be overwritten as soon as the stream has read it. A tensor that was
        received in place is read later: when there are enough of them, and at the
        latest when the results are asked for.
        """
        plan = self._plan
        self._first_bytes |= first_bytes or {}
        passing: list[Pair] = []
        for pair in pairs:
            if plan is None or not plan.is_home(*pair):
                passing.append(pair)
                continue
            self._staying.append(pair)
            self._staying_bytes += pair[1].nbytes
        if passing:
            self._enqueue(passing)
        if self._staying_bytes >= AT_ONCE_BYTES:
            self._enqueue_staying()

    def _enqueue_staying(self) -> None:
        self._enqueue(self._staying)
        self._staying, self._staying_bytes = [], 0

    def _enqueue(self, pairs: Sequence[Pair]) -> None:
        self._follow()
        by_width: dict[int, list[Pair]] = {}
        for name, tensor in pairs:
            if self._first_bytes.get(name, 0) + tensor.nbytes > PAGE_BYTES:
                raise ValueError(
                    f"{name} has {tensor.nbytes} bytes; the digest of a GPU tensor is "
                    f"defined up to {PAGE_BYTES}"
                )
            width = nonfinite_width(tensor.dtype)
            by_width.setdefault(width, []).append((name, tensor))
        for width, group in by_width.items():
            for start in range(0, len(group), ROWS):
                self._add(width, group[start : start + ROWS])

    def _follow(self) -> None:
        """Run after the sums that were added before on another stream.

        A transport may load each of its buffers on a stream of its own.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _add(self, width: int, pairs: list[Pair]) -> None:
        from vllm.inflight.ops.triton_kernels import ROW, add_sums, make_table

        if not self._pages or self._num_rows + len(pairs) > ROWS:
            page = torch.zeros(ROWS, ROW, dtype=torch.int64, device=self._device)
            self._pages.append(page)
            self._num_rows = 0
        chunked = [_chunked(tensor) for _, tensor in pairs]
        limits = (
            ops.nonfinite_limit(t.dtype, self._served_as(name, t.dtype))
            for name, t in pairs
        )
        places = tuple(
            (t.data_ptr(), t.nbytes // 8, limit, self._first_bytes.get(name, 0) // 8)
            for (name, _), t, limit in zip(pairs, chunked, limits, strict=True)
        )
        self._used.add(places)
        if places not in self._tables:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            self._tables[places] = make_table(
                [place[:3] for place in places],
                self._device,
                firsts=[place[3] for place in places],
            )
        if (table := self._tables[places]) is not None:
            if self._stream is not None:
                # The memory may belong to another stream, and be freed before this one
                # has read it.
                for memory in (table.rows, self._pages[-1]):
                    memory.record_stream(self._stream)
            add_sums(table, self._pages[-1], self._num_rows, page_key(0), width)
        for row, (name, tensor) in enumerate(pairs, self._num_rows):
            if tensor.dtype in ops.NAN_BYTES:  # as rare as small: scales of MX formats
                self._pages[-1][row, NUM_BAD] += ops.nan_bytes(tensor)
            self._added.append((name, tensor.nbytes, len(self._pages) - 1, row))
        self._num_rows += len(pairs)

    def results(self) -> list[tuple[str, ops.Digest, int]]:
        """(name, digest, number of non-finite values) of every tensor."""
        self._enqueue_staying()
        arriving = [Arriving(page) for page in self._pages]
        pages = [page.tensor().tolist() for page in arriving]
        results = []
        for name, size, page, row in self._added:
            a, b, bad, _ = pages[page][row]
            # The part of a sum that does not depend on the content has a closed form.
            first = self._first_bytes.get(name, 0)
            a, b = a + COUNT * size, b + PLACE * size * (size + 2 * first)
            results.append((name, ops.Digest(a % 2**64, b % 2**64), bad))
        if len(self._tables) > 2 * len(self._used) > 0:
            for places in self._tables.keys() - self._used:
                del self._tables[places]
        return results


def warm(device: torch.device, dtypes: set[torch.dtype]) -> None:
    """Compile the kernels for `dtypes` now, and not while decoding."""
    digest = GpuDigest(device, {})
    dtypes = dtypes | {torch.uint8}  # the scrub, which only needs sums
    memory = torch.zeros(128, dtype=torch.uint8, device=device)
    digest.add([(str(dtype), memory.view(dtype)) for dtype in dtypes])
    digest.results()


def nonfinite_width(dtype: torch.dtype) -> int:
    """Bytes of an element in which the kernel counts non-finite values; 0 for none."""
    return dtype.itemsize if dtype in ops.NONFINITE else 0


def _chunked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in whole chunks of 8 bytes: itself, or a copy padded with zeros."""
    if tensor.is_contiguous() and not (tensor.nbytes % 8 or tensor.data_ptr() % 8):
        return tensor
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
    padded[: flat.numel()] = flat
    return padded
