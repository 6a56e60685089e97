"""What one rank of a trainer has of each tensor: its own shards, without gathering.

A shard is a box in its tensor. FSDP2, tensor parallelism and both together make such
boxes, along any dimension and of uneven sizes. Several ranks may have the same box.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.errors import ConfigError
from vllm.inflight.ops import INTEGERS
from vllm.inflight.ops.gpu_digest import PAGE_BYTES, GpuDigest
from vllm.inflight.ops.reference import row_major

DIGEST_ELEMENTS = 1 << 24
"""Elements of a shard on a GPU that are digested at once."""


@dataclass(frozen=True)
class Box:
    """The place of a shard in its tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the shard's first element."""
    size: tuple[int, ...]
    """Of the shard, in each dimension."""

    @classmethod
    def of_all(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return prod(self.size)

    def meets(self, other: Box) -> bool:
        """Whether two boxes of one tensor have an element in common."""
        spans = zip(self.offset, self.size, other.offset, other.size, strict=True)
        return all(max(a, b) < min(a + n, b + m) for a, n, b, m in spans)

    def places(self, own: torch.Tensor) -> torch.Tensor:
        """Numbers in the whole tensor of elements that have these in the shard."""
        runs, start = self.runs()
        if runs in ([], [(self.numel, 1)]):
            return own + start
        found, inner = torch.full_like(own, start), self.numel
        for size, stride in runs:
            inner //= size
            found += own // inner % size * stride
        return found

    def runs(self) -> tuple[list[tuple[int, int]], int]:
        """(size, stride) of each dimension of more than one element; the first element.

        Neighbours are joined where the shard has all of the inner one, so cuts of
        dimension 0 have one run.
        """
        strides = row_major(self.shape)
        start = sum(at * by for at, by in zip(self.offset, strides, strict=True))
        runs: list[tuple[int, int]] = []
        for size, stride in zip(self.size, strides, strict=True):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                size *= runs.pop()[0]
            runs.append((size, stride))
        return runs, start


@dataclass(frozen=True, eq=False)
class OwnShard:
    """A shard that this rank has."""

    name: str
    tensor: torch.Tensor
    """Detached, on the trainer's device."""
    box: Box

    @property
    def first_byte(self) -> int | None:
        """Number of its first byte in the tensor, if its elements are a run there.

        None, if they are none, or if the kernel for runs cannot begin there.
        """
        runs, start = self.box.runs()
        width = self.tensor.element_size()
        is_run = runs in ([], [(self.box.numel, 1)])
        fits = (start + self.box.numel) * width <= PAGE_BYTES
        return start * width if is_run and fits and start * width % 8 == 0 else None

    def digest_by_changes(self) -> ops.Digest:
        """What the shard adds to the digest of its tensor, by the kernel for changes.

        A run of elements has a faster kernel on a GPU; see `shard_digests`.
        """
        tensor, box = self.tensor, self.box
        width = tensor.element_size()
        bits = tensor.contiguous().view(-1).view(INTEGERS[width])
        strides = row_major(box.shape)
        start = sum(at * by for at, by in zip(box.offset, strides, strict=True))
        # It adds up the terms of all elements, as if they had been zero before.
        total = ops.counts_of_part(box.size, strides, start, width)
        for first in range(0, len(bits), DIGEST_ELEMENTS):
            some = bits[first : first + DIGEST_ELEMENTS]
            own = torch.arange(first, first + len(some), device=some.device)
            zeros = torch.zeros_like(some)
            places = box.places(own)
            total += ops.digest_of_changes(places, zeros, some, width)
        return total


def shard_digests(shards: Iterable[OwnShard]) -> dict[str, ops.Digest]:
    """Name → what the shard adds to the digest of its tensor.

    Of runs on a GPU, the host waits once for all.
    """
    found: dict[str, ops.Digest] = {}
    runs: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    first_bytes: dict[str, int] = {}
    for one in shards:
        tensor, first_byte = one.tensor, one.first_byte
        if tensor.device.type == "cpu":
            found[one.name] = ops.digest_slice(tensor, one.box.shape, one.box.offset)
        elif first_byte is None:
            found[one.name] = one.digest_by_changes()
        else:
            runs.setdefault(tensor.device, []).append((one.name, tensor))
            first_bytes[one.name] = first_byte
    for device, pairs in runs.items():
        on_gpu = GpuDigest(device, {})
        on_gpu.add(pairs, first_bytes)
        found |= {name: digest for name, digest, _ in on_gpu.results()}
    return found


def own_shard(name: str, tensor: torch.Tensor) -> OwnShard | None:
    """What this rank has of a tensor; None: nothing.

    Args:
        name: of the tensor.
        tensor: a `DTensor`, or a tensor that every rank has whole.

    Raises:
        ConfigError: it is shared out in another way.

    """
    if hasattr(tensor, "ds_id"):
        raise ConfigError(
            f"{name!r} is shared out as ZeRO-3 does it, so no rank has a box of it; "
            "leave delta_shards out"
        )
    if not hasattr(tensor, "full_tensor"):
        return OwnShard(name, tensor.detach(), Box.of_all(tuple(tensor.shape)))
    sharded: Any = tensor
    mesh, shape = sharded.device_mesh, tuple(sharded.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    offset, size = [0] * len(shape), list(shape)
    # Strided ones cut what the others have cut, as FSDP2 does after tensor parallelism.
    cuts = sorted(
        zip(sharded.placements, coordinate, range(mesh.ndim), strict=True),
        key=lambda cut: hasattr(cut[0], "split_factor"),
    )
    for placement, at, dim in cuts:
        if placement.is_replicate():
            continue
        if hasattr(placement, "dim"):
            cut = placement.dim
            chunk = -(-size[cut] // mesh.size(dim))
            first = min(at * chunk, size[cut])
            offset[cut] += first
            size[cut] = max(0, min(chunk, size[cut] - first))
        else:
            raise ConfigError(
                f"{name!r} has the placement {placement}, which is no shard; leave "
                "delta_shards out"
            )
    local = sharded.to_local().detach()
    box = Box(shape, tuple(offset), tuple(size))
    if box.numel != local.numel() or (box.numel and tuple(local.shape) != box.size):
        raise ConfigError(
            f"{name!r} has a shard of {list(local.shape)} where one of {list(size)} "
            f"was expected ({sharded.placements}); leave delta_shards out"
        )
    return OwnShard(name, local, box) if box.numel else None
