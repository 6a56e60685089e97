"""Tensors that differ in chosen places, and what their delta must say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm.inflight import delta, ops
from vllm.inflight.delta.parts import named
from vllm.inflight.ops import INTEGERS
from vllm.inflight.update import Manifest, TensorSpec

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
]


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, flat, as integers of their width."""
    return tensor.reshape(-1).view(INTEGERS[tensor.element_size()])


def random_bits(dtype: torch.dtype, size: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    shape = (size * dtype.itemsize,)
    return torch.randint(high, shape, dtype=torch.uint8, generator=generator).view(
        dtype
    )


def with_changes(
    old: torch.Tensor, places: torch.Tensor | Sequence[int], *, most: int = 0
) -> torch.Tensor:
    """A copy that differs in exactly these places.

    Args:
        old: a flat tensor.
        places: numbers of the elements to change.
        most: largest change in units in the last place; 0: any bits.

    """
    new = old.clone()
    at = torch.as_tensor(places, dtype=torch.int64)
    bits = integers(new)
    generator = torch.Generator().manual_seed(len(at))
    if old.dtype is torch.bool:
        bits[at] ^= 1
    elif most:
        steps = torch.randint(1, most + 1, at.shape, generator=generator)
        signs = torch.randint(0, 2, at.shape, generator=generator) * 2 - 1
        bits[at] += (steps * signs).to(bits.dtype)
    else:
        high = 2 ** min(8 * old.element_size() - 1, 62)
        bits[at] ^= torch.randint(1, high, at.shape, generator=generator).to(bits.dtype)
    return new


def scattered(size: int, share: float, seed: int = 0) -> torch.Tensor:
    """About that share of all places."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(size, generator=generator) < share).nonzero().squeeze(1)


def parts_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], **options: object
) -> list[delta.Part]:
    """The parts of a delta between tensors, numbered from 0."""
    encoder = delta.Encoder(**options)  # type: ignore[arg-type]
    parts = []
    for number, (old, new) in enumerate(pairs):
        parts += encoder.add(number, old, new)
    return parts + list(encoder.finish())


def decoded(
    parts: Sequence[delta.Part], tensors: Sequence[torch.Tensor]
) -> list[delta.Changes]:
    """All changes of checked parts."""
    counts = [tensor.numel() for tensor in tensors]
    widths = [tensor.element_size() for tensor in tensors]
    changes = []
    for part in parts:
        part.check(counts, widths)
        changes += delta.decode(part)
    return changes


def applied(
    parts: Sequence[delta.Part], olds: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copies of the old tensors with a delta applied."""
    copies = [old.clone() for old in olds]
    for changes in decoded(parts, olds):
        delta.apply(changes, copies[changes.number].view(-1))
    return copies


def delta_between(
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    base: str,
    **options: object,
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """The manifest of a delta made by hand, and the tensors to send.

    Args:
        old: the version that is served.
        new: the version to lead to.
        base: the digest of `old`.
        options: of the encoder.

    """
    encoder = delta.Encoder(**options)  # type: ignore[arg-type]
    parts: list[delta.Part] = []
    specs: dict[str, TensorSpec] = {}
    for name, tensor in new.items():
        parts += encoder.add(len(specs), old[name], tensor)
        if encoder.has_changed:
            dtype = str(tensor.dtype).removeprefix("torch.")
            digest = ops.digest([tensor])[0].hex()
            specs[name] = TensorSpec(name, tuple(tensor.shape), dtype, digest)
    parts += encoder.finish()
    return Manifest(specs, base=base).to_dict(), dict(named(parts))


def stepped(
    weights: Mapping[str, torch.Tensor], seed: int, share: float = 0.02
) -> dict[str, torch.Tensor]:
    """The weights after a step: a share of all elements moves by a few units in the
    last place. Shapes that a checkpoint has as a tensor stay."""
    random = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        flat = tensor.view(-1)
        chosen = torch.rand(flat.shape, generator=random) < share
        by = torch.randint(-40, 41, flat.shape, generator=random, dtype=torch.int16)
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            chosen &= flat.abs() > 1e-9  # a neighbour of zero is no number of a model
            bits = integers(flat)
            bits[chosen] += by[chosen].to(bits.dtype)
        elif tensor.element_size() == 1:
            _step_bytes(flat, chosen, by)
        elif tensor.dtype is torch.int32:  # int4 numbers, eight in each element
            flat[chosen] ^= 1 << (by[chosen].abs().to(torch.int32) % 31)
    return new


def _step_bytes(flat: torch.Tensor, chosen: torch.Tensor, by: torch.Tensor) -> None:
    """Move bytes by up to three units; floats keep their sign, and stay finite."""
    bits = flat.view(torch.uint8)
    if flat.dtype.is_floating_point:
        sizes = (bits & 0x7F).to(torch.int16) + by % 4
        moved = (bits & 0x80) | sizes.clamp(1, 0x7E).to(torch.uint8)
    else:
        moved = (flat.to(torch.int16) + by % 4).clamp(-127, 127).to(torch.int8)
    bits[chosen] = moved.view(torch.uint8)[chosen]
