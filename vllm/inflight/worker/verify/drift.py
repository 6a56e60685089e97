"""Drift: how far a version has moved from the live version before it.

    drift = |new - old| / |old|      (Euclidean norms, over a sample)

A few thousand elements of every checkpoint tensor are kept. They are evenly spread, in
runs of 64, so that memory is read in whole lines. If an update moves most elements, the
estimate is good to a few per cent. An update that changes a few elements may not show
in the drift; the digest shows every change.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.worker.replay_plan import Plan

NUM_RUNS, RUN = 64, 64
SIZE = NUM_RUNS * RUN
"""Most elements that are kept of a tensor."""
AT_ONCE, AT_ONCE_ON_GPU = 16, 1024
"""Samples that are compared at once.

They should fit a CPU cache. A GPU needs 0.12 GB for its number; there it matters to
make few calls.
"""

SMALL_BYTES, HUGE_BYTES = 1 << 20, 10 << 20
"""On a GPU, PyTorch gets 20 MiB for memory of a size between these, and keeps them. So
blocks of such a size are made of smaller ones."""

OF_KERNEL = torch.bfloat16, torch.float16, torch.float32
"""Dtypes of samples that a kernel compares on a GPU; see triton_kernels.py."""

NONE = np.zeros(0, dtype=np.int64)

_LAYER = re.compile(r"(.*?\.\d+)\.")

Pair = tuple[str, torch.Tensor]
Numbers = NDArray[np.int64]

Place = tuple[int, int]
"""The block of a sample, and the row in the block."""


class Places(dict[str, Place]):
    """Checkpoint name → the place of its sample; it does not change once it is made.

    Versions that deltas lead to have the places of the version before them.
    """

    @functools.cached_property
    def table(self) -> tuple[tuple[str, ...], Numbers]:
        """The names, and their places as int64 [names, 2]."""
        return tuple(self), _table(self.values())

    def both(self, other: Places) -> tuple[tuple[str, ...], Numbers, Numbers]:
        """The names that are in both, with their places here and there."""
        if self is other:
            names, at = self.table
            return names, at, at
        names = tuple(filter(other.__contains__, self))
        return names, _table(map(self.get, names)), _table(map(other.get, names))


def _table(places: Iterable[Place | None]) -> Numbers:
    """Places as int64 [places, 2]."""
    return np.array([*places], dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one version, on the engine's device.

    On a GPU they stay on the GPU: comparing them on the CPU took longest of all that
    staging does. They are kept in few blocks. With one tensor per sample, a model with
    many experts would give every garbage collection ten thousand more objects to look
    through.
    """

    blocks: Sequence[torch.Tensor]
    """Each `[rows, size]`: a row is at most `SIZE` elements, in its tensor's dtype."""
    places: Places
    """Where the sample of each tensor is."""

    def __getitem__(self, name: str) -> torch.Tensor:
        block, row = self.places[name]
        return self.blocks[block][row]

    def only(self, wanted: Callable[[str], bool]) -> Samples:
        """The samples whose name is `wanted`."""
        places = ((name, at) for name, at in self.places.items() if wanted(name))
        return Samples(self.blocks, Places(places))

    def over(self, base: Samples) -> Samples:
        """These samples, and the samples of `base` that have other names."""
        if self.places.keys() >= base.places.keys():
            return self
        first = len(base.blocks)
        own = {name: (first + block, row) for name, (block, row) in self.places.items()}
        places = {**base.places, **own}
        # A block without any sample left is dropped.
        kept = sorted({block for block, _ in places.values()})
        number = {block: n for n, block in enumerate(kept)}
        blocks = [*base.blocks, *self.blocks]
        return Samples(
            [blocks[block] for block in kept],
            Places((name, (number[b], row)) for name, (b, row) in places.items()),
        )


class Sampler:
    """Takes the samples of one update, on the device of its tensors.

    Args:
        views: checkpoint name → the view that samples a tensor received in place;
            filled
            at first use.
        plan: knows which tensors are received in place.
        device: where samples are kept; the CPU by default.

    """

    def __init__(
        self,
        views: dict[str, torch.Tensor] | None = None,
        plan: Plan | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._taken: list[tuple[list[str], torch.Tensor]] = []
        self._views = {} if views is None else views
        self._plan = plan
        self._staying: list[str] = []

    def add(self, pairs: Sequence[Pair]) -> None:
        """Enqueue a copy of the sample of each tensor, one copy per kind of tensor.

        A tensor may be overwritten as soon as the current stream has read it. A tensor
        that was received in place is not overwritten; it is sampled when the samples
        are asked for, with a few calls for all such tensors.
        """
        alike: dict[tuple[torch.device, torch.dtype, int], list[Pair]] = {}
        for name, tensor in pairs:
            if self._plan is not None and self._plan.is_home(name, tensor):
                if name not in self._views:
                    self._views[name] = _runs(tensor)
                self._staying.append(name)
                continue
            kind = tensor.device, tensor.dtype, min(tensor.numel(), SIZE)
            alike.setdefault(kind, []).append((name, _runs(tensor)))
        for group in alike.values():
            taken = torch.stack([view for _, view in group])
            self._taken.append(([name for name, _ in group], taken))

    def samples(self) -> Samples:
        """The samples, once the current stream has taken them."""
        kinds: dict[tuple[torch.dtype, torch.Size], list[str]] = {}
        for name in self._staying:
            view = self._views[name]
            kinds.setdefault((view.dtype, view.shape), []).append(name)
        for group in kinds.values():
            taken = torch.stack([self._views[name] for name in group])
            self._taken.append((group, taken))
        self._staying.clear()
        alike: dict[object, tuple[list[str], list[torch.Tensor]]] = {}
        for names, taken in self._taken:
            rows = taken.flatten(1)
            kind = rows.dtype, rows.shape[1], rows.device
            known, parts = alike.setdefault(kind, ([], []))
            known += names
            parts.append(rows)
        self._taken.clear()
        joined = [
            (known[first : first + len(block)], block)
            for known, parts in alike.values()
            for first, block in _joined(parts)
        ]
        places = Places(
            (name, (number, row))
            for number, (names, _) in enumerate(joined)
            for row, name in enumerate(names)
        )
        return Samples([block.to(self._device) for _, block in joined], places)


def _joined(parts: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks of the rows of these parts, each with the number of its first row."""
    most = SMALL_BYTES
    if sum(part.nbytes for part in parts) > HUGE_BYTES:
        most = sys.maxsize
    together: list[torch.Tensor] = []
    first = num_bytes = 0
    for part in parts:
        if together and num_bytes + part.nbytes > most:
            yield first, (block := torch.cat(together))
            first, num_bytes, together = first + len(block), 0, []
        together.append(part)
        num_bytes += part.nbytes
    yield first, torch.cat(together)


def drift(old: Samples | None, new: Samples | None) -> dict[str, object] | None:
    """`{"overall", "layers"}`, ratios; None unless both versions have samples.

    A layer is what the names of its tensors have in common up to an index. A tensor
    without an index counts by its own name. Tensors that only one of the versions has
    are left out.
    """
    return None if old is None or new is None else Drift(old, new).result()


class Drift:
    """The comparison of two versions: enqueued here, and read by `result`.

    Whoever has other work to do meanwhile does not wait for the GPU.

    Args:
        old: samples of the live version.
        new: samples of the version that follows.

    """

    def __init__(self, old: Samples, new: Samples) -> None:
        names, now, was = new.places.both(old.places)
        self._layers, layer_of = _layers(names)
        kinds = was[:, 0] * len(new.blocks) + now[:, 0]
        pairs: list[tuple[int, int, Numbers]] = []
        """A block of the old samples and one of the new, and the tensors there."""
        for kind in np.unique(kinds).tolist():
            was_in, now_in = divmod(kind, len(new.blocks))
            # Else it is of another size now.
            if old.blocks[was_in].shape[1] == new.blocks[now_in].shape[1]:
                pairs.append((was_in, now_in, np.flatnonzero(kinds == kind)))
        compared = [group for *_, group in pairs]
        self._numbers = layer_of[np.concatenate([NONE, *compared])]
        """The layer of each tensor that is compared."""
        self._squares: torch.Tensor | None = None
        self._read: torch.cuda.Event | None = None
        if not pairs:
            return
        # Few and large calls leave the interpreter to other threads.
        is_known = all(
            _has_kernel(old.blocks[was_in], new.blocks[now_in])
            for was_in, now_in, _ in pairs
        )
        found = (squares_by_kernel if is_known else squares_by_torch)(
            [
                (old.blocks[i], new.blocks[j], was[group, 1], now[group, 1])
                for i, j, group in pairs
            ]
        )
        # Read all at once: each read of a number waits for the GPU.
        self._squares = found.to("cpu", non_blocking=True)
        if found.is_cuda:
            self._read = torch.cuda.Event(blocking=True)
            self._read.record(torch.cuda.current_stream(found.device))

    def result(self) -> dict[str, object]:
        """What `drift` returns; waits for the GPU."""
        if self._squares is None:
            return {"overall": _ratio(0.0, 0.0), "layers": {}}
        if self._read is not None:
            self._read.synchronize()
        moved, lengths = (
            np.bincount(self._numbers, weights=row).tolist()
            for row in self._squares.double().numpy()
        )
        known = sorted(set(self._numbers.tolist()))
        return {
            "overall": _ratio(sum(moved), sum(lengths)),
            "layers": {self._layers[n]: _ratio(moved[n], lengths[n]) for n in known},
        }


Alike = tuple[torch.Tensor, torch.Tensor, Numbers, Numbers]
"""A block of the version before and one of the version after, and the rows in them of
each tensor that is compared."""


def squares_by_torch(kinds: Sequence[Alike]) -> torch.Tensor:
    """For each tensor the sum of the squares of what has moved, and that of what it was
    before; float64 [2, tensors]."""
    squares: list[torch.Tensor] = []
    for old, new, was, now in kinds:
        for part in _parts(len(was), new):
            before, after = _rows(old, was[part]).float(), _rows(new, now[part]).float()
            squares.append(torch.stack([after - before, before]).square().sum(2))
    return torch.cat(squares, 1).double()


def squares_by_kernel(kinds: Sequence[Alike]) -> torch.Tensor:
    """The same by one launch for each dtype, float32; a GPU takes few calls then."""
    from vllm.inflight.worker.verify import triton_kernels as kernels

    tables: dict[torch.dtype, list[Numbers]] = {}
    num = 0
    for old, new, was, now in kinds:
        rows = np.empty((len(was), kernels.COLUMNS), dtype=np.int64)
        size, width = old.shape[1], old.element_size()
        rows[:, 0] = old.data_ptr() + was * old.stride(0) * width
        rows[:, 1] = new.data_ptr() + now * new.stride(0) * width
        rows[:, 2], rows[:, 3] = size, np.arange(num, num + len(was))
        tables.setdefault(old.dtype, []).append(rows)
        num += len(was)
    device = kinds[0][1].device
    found = torch.empty((2, num), dtype=torch.float32, device=device)
    launches = Launches(device)
    for dtype, table in tables.items():
        launch = functools.partial(kernels.squares, found=found, dtype=dtype)
        launches.add(np.concatenate(table), launch)
    launches.run()
    return found


def _has_kernel(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether a kernel compares the samples of these blocks."""
    is_there = new.is_cuda and old.device == new.device
    return is_there and old.dtype == new.dtype and new.dtype in OF_KERNEL


def warm(device: torch.device) -> None:
    """Compile the kernels now, and not while decoding."""
    for dtype in OF_KERNEL:
        block = torch.zeros((1, RUN), dtype=dtype, device=device)
        samples = Samples([block], Places({"": (0, 0)}))
        Drift(samples, samples).result()


def _rows(block: torch.Tensor, rows: Numbers) -> torch.Tensor:
    """These rows of a block; no copy if they are consecutive, as they usually are."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    if end - first == len(rows) and (np.diff(rows) == 1).all():
        return block[first:end]
    return block[torch.from_numpy(rows).to(block.device)]


def _parts(num: int, block: torch.Tensor) -> Iterator[slice]:
    """So many rows in parts of the size that takes least time."""
    at_once = AT_ONCE if block.is_cpu else AT_ONCE_ON_GPU
    for first in range(0, num, at_once):
        yield slice(first, first + at_once)


def _ratio(moved: float, length: float) -> float | None:
    """The ratio of two norms from their squares; None without a finite ratio."""
    if not (math.isfinite(moved) and math.isfinite(length)):
        return None
    if not length:
        return 0.0 if not moved else None
    return float(f"{math.sqrt(moved / length):.4g}")


@functools.lru_cache(maxsize=8)
def _layers(names: tuple[str, ...]) -> tuple[list[str], Numbers]:
    """The layers of these tensors, and for each tensor the number of its layer.

    The versions of an engine have the same tensors in the same order.
    """
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(_layer(name), len(numbers)) for name in names]
    return list(numbers), np.array(found, dtype=np.int64)


@functools.lru_cache(maxsize=1 << 16)
def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else name.removesuffix(".weight")


def _runs(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() < SIZE:
        return flat
    return flat.as_strided(
        (NUM_RUNS, RUN), (flat.numel() // NUM_RUNS, 1), flat.storage_offset()
    )
