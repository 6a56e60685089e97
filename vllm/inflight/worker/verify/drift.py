"""Drift: how far a version has moved from the one served before it.

    drift = |new - old| / |old|      (Euclidean norms, over a sample)

Of every checkpoint tensor the same few thousand elements are kept, evenly spread: runs
of 64, so that memory is read in whole lines. For an update that moves most of its
elements the estimate is good to a few per cent; one that changes only a few of them may
not show, and the digest is what tells that anything changed at all.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.inflight.worker.replay_plan import Plan

NUM_RUNS, RUN = 64, 64
SIZE = NUM_RUNS * RUN
"""Most elements that are kept of a tensor."""
AT_ONCE, AT_ONCE_ON_GPU = 16, 1024
"""Samples that are compared in one go. They should fit a CPU's cache; on a GPU, which
lends 0.12 GB for it, what counts is to make few calls."""

_LAYER = re.compile(r"(.*?\.\d+)\.")

Pair = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Samples:
    """What is kept of one version, on the engine's device.

    On a GPU they stay there: of all that staging does, comparing them on the CPU took
    longest. And with a tensor for each of them, of a model with many experts, there
    would be ten thousand objects more for every collection of garbage to look through.
    """

    blocks: Sequence[torch.Tensor]
    """Each `[rows, size]`: a row is at most `SIZE` elements, in its tensor's dtype."""
    places: Mapping[str, tuple[int, int]]
    """Checkpoint name → its block, and the row there."""

    def __getitem__(self, name: str) -> torch.Tensor:
        block, row = self.places[name]
        return self.blocks[block][row]

    def only(self, wanted: Callable[[str], bool]) -> Samples:
        """Those with the names wanted."""
        places = {name: at for name, at in self.places.items() if wanted(name)}
        return Samples(self.blocks, places)

    def over(self, base: Samples) -> Samples:
        """These, and those of `base` that have other names."""
        first = len(base.blocks)
        own = {name: (first + block, row) for name, (block, row) in self.places.items()}
        places = {**base.places, **own}
        # A block that nothing is left of goes.
        kept = sorted({block for block, _ in places.values()})
        number = {block: n for n, block in enumerate(kept)}
        blocks = [*base.blocks, *self.blocks]
        return Samples(
            [blocks[block] for block in kept],
            {name: (number[block], row) for name, (block, row) in places.items()},
        )


class Sampler:
    """Takes the sample of one update, where its tensors are.

    Args:
        views: of the samples of tensors that stay where they are; filled at first use.
        plan: knows which those are.
        device: where samples are kept, wherever their tensors came from; the CPU if
            it is not given.

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
        """Enqueue the copy of a sample of each, one for those of one kind together.

        They may be written over as soon as the current stream has read them. What
        was received in place is not, and is sampled when the samples are asked for:
        then all of it takes a few calls.
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
        """What was taken, once the current stream has come there."""
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


def drift(old: Samples | None, new: Samples) -> dict[str, object] | None:
    """`{"overall", "layers"}`, ratios; None without an old version to compare with.

    A layer is what its tensors' names have in common up to their index; what has none
    counts by its own name. Tensors that only one of the versions has are left out.
    """
    if old is None:
        return None
    # Few and large calls leave the interpreter to others.
    alike: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for name, (now_in, now_at) in new.places.items():
        if (place := old.places.get(name)) is not None:
            was_in, was_at = place
            alike.setdefault((was_in, now_in), []).append((name, was_at, now_at))
    compared: list[str] = []
    squares: list[torch.Tensor] = []
    for (was_in, now_in), group in alike.items():
        blocks = old.blocks[was_in], new.blocks[now_in]
        if blocks[0].shape[1] != blocks[1].shape[1]:
            continue  # of another size now
        for part in _parts(group, blocks[1]):
            names, *rows = zip(*part, strict=True)
            was, now = (
                _rows(block, at).float() for block, at in zip(blocks, rows, strict=True)
            )
            compared += names
            squares.append(torch.stack([now - was, was]).square().sum(2))
    moved: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    if squares:
        # Asked for all at once: to ask a GPU for a number waits for it.
        for name, step, size in zip(
            compared, *torch.cat(squares, 1).tolist(), strict=True
        ):
            layer = _layer(name)
            moved[layer] += step
            lengths[layer] += size
    return {
        "overall": _ratio(moved.total(), lengths.total()),
        "layers": {layer: _ratio(moved[layer], lengths[layer]) for layer in moved},
    }


def _rows(block: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows of a block; as they usually are, one behind the other, no copy."""
    first, last = rows[0], rows[-1]
    if list(rows) == list(range(first, last + 1)):
        return block[first : last + 1]
    return block[torch.tensor(rows, device=block.device)]


def _parts(
    group: list[tuple[str, int, int]], block: torch.Tensor
) -> Iterator[list[tuple[str, int, int]]]:
    """As many at once as it takes least time for."""
    at_once = AT_ONCE if block.is_cpu else AT_ONCE_ON_GPU
    for first in range(0, len(group), at_once):
        yield group[first : first + at_once]


def _ratio(moved: float, length: float) -> float | None:
    """None where there was nothing but zeros, or something that is no number."""
    if not (math.isfinite(moved) and math.isfinite(length)):
        return None
    if not length:
        return 0.0 if not moved else None
    return float(f"{math.sqrt(moved / length):.4g}")


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
