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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.worker.replay_plan import Plan

NUM_RUNS, RUN = 64, 64
SIZE = NUM_RUNS * RUN
"""Most elements that are kept of a tensor."""
AT_ONCE, AT_ONCE_ON_GPU = 16, 1024
"""Samples that are compared at once.

They should fit a CPU cache. A GPU needs 0.12 GB for its number; there it matters to
make few calls.
"""

_LAYER = re.compile(r"(.*?\.\d+)\.")

Pair = tuple[str, torch.Tensor]


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
    places: Mapping[str, tuple[int, int]]
    """Checkpoint name → its block, and the row in the block."""

    def __getitem__(self, name: str) -> torch.Tensor:
        block, row = self.places[name]
        return self.blocks[block][row]

    def only(self, wanted: Callable[[str], bool]) -> Samples:
        """The samples whose name is `wanted`."""
        places = {name: at for name, at in self.places.items() if wanted(name)}
        return Samples(self.blocks, places)

    def over(self, base: Samples) -> Samples:
        """These samples, and the samples of `base` that have other names."""
        first = len(base.blocks)
        own = {name: (first + block, row) for name, (block, row) in self.places.items()}
        places = {**base.places, **own}
        # A block without any sample left is dropped.
        kept = sorted({block for block, _ in places.values()})
        number = {block: n for n, block in enumerate(kept)}
        blocks = [*base.blocks, *self.blocks]
        return Samples(
            [blocks[block] for block in kept],
            {name: (number[block], row) for name, (block, row) in places.items()},
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
        alike: dict[tuple[torch.dtype, int], list[Pair]] = {}
        for name, tensor in pairs:
            if self._plan is not None and self._plan.is_home(name, tensor):
                if name not in self._views:
                    self._views[name] = _runs(tensor)
                self._staying.append(name)
                continue
            kind = tensor.dtype, min(tensor.numel(), SIZE)
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
        places = {
            name: (block, row)
            for block, (names, _) in enumerate(alike.values())
            for row, name in enumerate(names)
        }
        blocks = [torch.cat(parts).to(self._device) for _, parts in alike.values()]
        return Samples(blocks, places)


def sample_places(numel: int, device: torch.device) -> torch.Tensor:
    """The elements of a row-major tensor that its sample consists of, int64."""
    if numel < SIZE:
        return torch.arange(numel, device=device)
    first = torch.arange(NUM_RUNS, device=device) * (numel // NUM_RUNS)
    return (first[:, None] + torch.arange(RUN, device=device)).view(-1)


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
        # Few and large calls leave the interpreter to other threads.
        alike: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for name, (now_in, now_at) in new.places.items():
            if (place := old.places.get(name)) is not None:
                was_in, was_at = place
                alike.setdefault((was_in, now_in), []).append((name, was_at, now_at))
        self._compared: list[str] = []
        squares: list[torch.Tensor] = []
        for (was_in, now_in), group in alike.items():
            blocks = old.blocks[was_in], new.blocks[now_in]
            if blocks[0].shape[1] != blocks[1].shape[1]:
                continue  # of another size now
            for part in _parts(group, blocks[1]):
                names, *rows = zip(*part, strict=True)
                was, now = (
                    _rows(block, at).float()
                    for block, at in zip(blocks, rows, strict=True)
                )
                self._compared += names
                squares.append(torch.stack([now - was, was]).square().sum(2))
        self._squares: torch.Tensor | None = None
        self._read: torch.cuda.Event | None = None
        if squares:
            # Read all at once: each read of a number waits for the GPU.
            found = torch.cat(squares, 1).double()
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
        layers, numbers = _layers(tuple(self._compared))
        moved, lengths = (
            np.bincount(numbers, weights=row).tolist() for row in self._squares.numpy()
        )
        return {
            "overall": _ratio(sum(moved), sum(lengths)),
            "layers": dict(zip(layers, map(_ratio, moved, lengths), strict=True)),
        }


def _rows(block: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows of a block; no copy if they are consecutive, as they usually are."""
    first, last = rows[0], rows[-1]
    if list(rows) == list(range(first, last + 1)):
        return block[first : last + 1]
    return block[torch.tensor(rows, device=block.device)]


def _parts(
    group: list[tuple[str, int, int]], block: torch.Tensor
) -> Iterator[list[tuple[str, int, int]]]:
    """The group in parts of the size that takes least time."""
    at_once = AT_ONCE if block.is_cpu else AT_ONCE_ON_GPU
    for first in range(0, len(group), at_once):
        yield group[first : first + at_once]


def _ratio(moved: float, length: float) -> float | None:
    """The ratio of two norms from their squares; None without a finite ratio."""
    if not (math.isfinite(moved) and math.isfinite(length)):
        return None
    if not length:
        return 0.0 if not moved else None
    return float(f"{math.sqrt(moved / length):.4g}")


@functools.lru_cache(maxsize=8)
def _layers(names: tuple[str, ...]) -> tuple[list[str], NDArray[np.int64]]:
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
