"""The version that was published last: what the next delta starts from.

Its tensors are in the memory of the process: copies on a device, or the memory of a
snapshot's file, which needs no name any more. The memory is given back with this
object, or when the process ends. A delta that is committed is applied to them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import torch

from vllm.inflight import ops
from vllm.inflight.delta.application import apply_all
from vllm.inflight.delta.part import Part
from vllm.inflight.errors import ConfigError
from vllm.inflight.ops.gpu_digest import GpuDigest
from vllm.inflight.trainer.snapshot import (
    DTYPES,
    NUM_DIGEST_THREADS,
    Snapshot,
    header_of,
    mapped,
)
from vllm.inflight.update import Manifest, TensorSpec

SCRUB_EVERY = 100
"""Deltas from one scrub of the kept version to the next."""

logger = logging.getLogger(__name__)

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class PublishedVersion:
    """The tensors and the digests of one version.

    Args:
        tensors: of the whole version, contiguous. A delta that is committed changes
            them.
        specs: shape, dtype and digest of every tensor.

    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]
    ) -> None:
        self.specs = dict(specs)
        """Name → shape, dtype and digest."""
        self.digest = version_digest(self.specs)
        """Of the version."""
        self._tensors = tensors

    @classmethod
    def of_file(cls, snapshot: Snapshot, manifest: Manifest) -> PublishedVersion:
        """The version of a file, which may be removed afterwards.

        Args:
            snapshot: the file.
            manifest: of the whole version, with the digest of every tensor.

        """
        return cls(tensors_of_file(snapshot.owner), manifest.tensors)

    def copied_to(self, device: torch.device) -> PublishedVersion:
        """The same version in memory of its own on a device."""
        tensors = {name: t.to(device, copy=True) for name, t in self.pairs()}
        if device.type == "cuda":  # it may be compared under another stream
            torch.cuda.current_stream(device).synchronize()
        return PublishedVersion(tensors, self.specs)

    def free(self) -> None:
        """Give the memory of its tensors back: there is no version any more."""
        self._tensors = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under its name."""
        return iter(self._tensors.items())

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of that name itself; None if the version has none."""
        return self._tensors.get(name)

    def damaged(self) -> list[str]:
        """Names of tensors whose content is no longer that of their digest."""
        found = digests_of(list(self.pairs()))
        return [
            name
            for name, digest in zip(self._tensors, found, strict=True)
            if digest.hex() != self.specs[name].digest
        ]

    def advance(self, parts: Sequence[Part], specs: Mapping[str, TensorSpec]) -> None:
        """Apply a delta to the tensors. If this fails, they are no version any more.

        Args:
            parts: of the delta, which were checked.
            specs: the changed tensors afterwards, in the order of their numbers.

        """
        apply_all(parts, [self._tensors[name] for name in specs])
        self.specs |= specs
        self.digest = version_digest(self.specs)


class KeptScrubs:
    """Reads the kept version again after every so many deltas.

    A delta is proved from the version before. If the kept one has lost a bit, a change
    of it may be missed. Whole versions start the count anew.

    Args:
        every: deltas from one scrub to the next; 0: no scrubs.

    Raises:
        ConfigError: this is no such number.

    """

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(
                f"delta_scrub_every is a number of deltas, or 0, got {every!r}"
            )
        self._every = every
        self._num_deltas = 0

    def is_due(self, *, is_delta: bool) -> bool:
        """Count a version that was committed; whether the kept one is to be read."""
        self._num_deltas = self._num_deltas + 1 if is_delta else 0
        if not self._every or self._num_deltas < self._every:
            return False
        self._num_deltas = 0
        return True

    def is_sound(self, version: PublishedVersion, *, is_delta: bool) -> bool:
        """Count a version that was committed; whether a delta may start from it."""
        damaged = version.damaged() if self.is_due(is_delta=is_delta) else []
        if damaged:
            note_damage(damaged)
        return not damaged


def note_damage(names: Sequence[str]) -> None:
    """Log that kept tensors have changed."""
    logger.error(
        "the next version is sent whole: what is kept of the last one has changed "
        "since, in %d tensors (%s); is the memory of this host sound?",
        len(names),
        ", ".join(names[:3]),
    )


class Digests:
    """Digests of tensors that come one after another.

    Those on a GPU are read when they are asked for: the host waits once for all.
    """

    def __init__(self) -> None:
        self._found: dict[str, ops.Digest] = {}
        self._on_device: dict[torch.device, GpuDigest] = {}

    def add(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add tensors of one device, which may be overwritten afterwards.

        What overwrites a tensor on a GPU has to be on the current stream.
        """
        devices = {tensor.device for _, tensor in pairs}
        if all(device.type == "cpu" for device in devices):
            tensors = [tensor for _, tensor in pairs]
            found = ops.digest(tensors, num_threads=NUM_DIGEST_THREADS)
            self._found |= zip((name for name, _ in pairs), found, strict=True)
            return
        (device,) = devices
        if device not in self._on_device:
            self._on_device[device] = GpuDigest(device, {})
        self._on_device[device].add(pairs)

    def results(self) -> dict[str, ops.Digest]:
        """Name → digest of every tensor."""
        for digest in self._on_device.values():
            self._found |= {name: found for name, found, _ in digest.results()}
        self._on_device.clear()
        return self._found


def digests_of(pairs: Sequence[tuple[str, torch.Tensor]]) -> list[ops.Digest]:
    """The digest of each tensor, in order; all are on one device."""
    digests = Digests()
    digests.add(pairs)
    found = digests.results()
    return [found[name] for name, _ in pairs]


def version_digest(specs: Mapping[str, TensorSpec]) -> str:
    """The digest of a version with these tensors, each of which has its digest."""
    return ops.manifest_digest(
        (spec.name, spec.dtype, spec.shape, _digest(spec)) for spec in specs.values()
    )


def _digest(spec: TensorSpec) -> ops.Digest:
    assert spec.digest is not None
    return ops.Digest.from_hex(spec.digest)


def tensors_of_file(file: IO[bytes]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped: what is written there is in the file.

    They are valid after the file is closed, too.
    """
    header, start = header_of(file)
    whole = torch.frombuffer(mapped(file), dtype=torch.uint8)
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        flat = whole[start + first : start + end]
        found[name] = flat.view(TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])
    return found
