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
from collections.abc import Iterator, Mapping, Sequence

import torch

from vllm.inflight.stage.plan import Plan

NUM_RUNS, RUN = 64, 64
SIZE = NUM_RUNS * RUN
"""Most elements that are kept of a tensor."""
AT_ONCE, AT_ONCE_ON_GPU = 16, 1024
"""Samples that are compared in one go. They should fit a CPU's cache; on a GPU, which
lends 0.12 GB for it, what counts is to make few calls."""

_LAYER = re.compile(r"(.*?\.\d+)\.")

Pair = tuple[str, torch.Tensor]
Samples = Mapping[str, torch.Tensor]
"""Checkpoint name → at most `SIZE` elements, in the tensor's dtype, on the engine's
device: of all that staging for a GPU does, comparing them on the CPU took longest."""


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
        return {
            name: row
            for names, parts in alike.values()
            for name, row in zip(
                names, torch.cat(parts).to(self._device).unbind(), strict=True
            )
        }


def drift(old: Samples | None, new: Samples) -> dict[str, object] | None:
    """`{"overall", "layers"}`, ratios; None without an old version to compare with.

    A layer is what its tensors' names have in common up to their index; what has none
    counts by its own name. Tensors that only one of the versions has are left out.
    """
    if old is None:
        return None
    # Those of one size together: few and large calls leave the interpreter to others.
    alike: dict[object, list[str]] = {}
    for name, after in new.items():
        before = old.get(name)
        if before is not None and before.shape == after.shape:
            alike.setdefault((after.shape, after.dtype, before.dtype), []).append(name)
    compared: list[str] = []
    squares: list[torch.Tensor] = []
    for names in (part for group in alike.values() for part in _parts(group, new)):
        was, now = (_stacked([of[n] for n in names]).float() for of in (old, new))
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


def _stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    """`torch.stack`, without a copy of those that lie one behind the other anyway."""
    first, last = rows[0], rows[-1]
    begin, step = first.data_ptr(), first.nbytes
    is_one = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    if step and is_one and first.is_contiguous():
        places = range(begin, begin + step * len(rows), step)
        if all(row.data_ptr() == at for row, at in zip(rows, places, strict=True)):
            return first.as_strided((len(rows), len(first)), (len(first), 1))
    return torch.stack(rows)


def _parts(names: list[str], samples: Samples) -> Iterator[list[str]]:
    """As many at once as it takes least time for."""
    at_once = AT_ONCE if samples[names[0]].is_cpu else AT_ONCE_ON_GPU
    for first in range(0, len(names), at_once):
        yield names[first : first + at_once]


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
