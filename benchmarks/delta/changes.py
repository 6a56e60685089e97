"""What differs between two versions: how many elements, where, and by how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer of that width."""

STEPS = {"1": (1, 1), "2": (2, 2), "3 to 8": (3, 8), "more": (9, 1 << 40)}
"""Differences in units in the last place, and how they are called."""

Tensors = Mapping[str, torch.Tensor]


def kind_of(name: str) -> str:
    """Which of the model's parts a tensor belongs to."""
    if name.endswith("_scale"):
        return "scales"
    for kind in ("embed", "lm_head", "norm", "self_attn", "mlp"):
        if kind in name:
            return kind
    return "other"


def compared(old: Tensors, new: Tensors) -> dict[str, Any]:
    """The differences of all elements, and the entropy of naming them.

    Only the sums leave the device.
    """
    by_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    bits, steps = 0.0, dict.fromkeys(STEPS, 0)
    for name, tensor in new.items():
        integer = INTEGERS[tensor.element_size()]
        before, now = (t.reshape(-1).view(integer) for t in (old[name], tensor))
        places = (before != now).nonzero().squeeze(1)
        counts = by_kind[kind_of(name)]
        counts[0] += len(places)
        counts[1] += len(now)
        gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
        moved = (now - before)[places]
        bits += len(places) * (entropy(gaps) + entropy(moved))
        sizes = moved.long().abs()
        for key, (first, last) in STEPS.items():
            steps[key] += int(((sizes >= first) & (sizes <= last)).sum())
    changed, total = (sum(column) for column in zip(*by_kind.values(), strict=True))
    return {
        "share": changed / total,
        "share_of_kind": {kind: n / of for kind, (n, of) in by_kind.items()},
        "share_of_steps": {k: n / max(1, changed) for k, n in steps.items()},
        "entropy_bytes_per_change": bits / 8 / max(1, changed),
    }


def coded(old: Tensors, new: Tensors, found: dict[str, Any]) -> dict[str, Any]:
    """What the delta takes in this package's format; `found` is of `compared`."""
    from vllm.inflight.delta import Encoder

    report: dict[str, Any] = {}
    whole = sum(tensor.nbytes for tensor in new.values())
    changed = found["share"] * sum(tensor.numel() for tensor in new.values())
    entropy_bytes = found["entropy_bytes_per_change"] * changed
    for name, level in (("plain", None), ("zstd 3", 3)):
        encoder = Encoder(compress=level)
        pairs = [(old[name], tensor) for name, tensor in new.items()]
        parts = [*encoder.add_all(0, pairs), *encoder.finish()]
        size = sum(part.num_bytes for part in parts)
        report[f"{name}, bytes per change"] = size / max(1, changed)
        report[f"{name}, of entropy"] = size / max(1e-9, entropy_bytes)
        report[f"{name}, of whole"] = size / whole
    return report


def entropy(numbers: torch.Tensor) -> float:
    """Bits of each number, if each were coded by how often it comes."""
    if not len(numbers):
        return 0.0
    _, counts = numbers.unique(return_counts=True)
    share = counts.double() / len(numbers)
    return float(-(share * share.log2()).sum())
