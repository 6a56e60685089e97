"""The version that was published last: what the next delta starts from.

Its tensors are the memory of the snapshot's file, which needs no name any more. The
memory is given back with this object, or when the process ends. A delta that is
committed is applied to them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.delta.decode import Changes, apply
from vllm.inflight.trainer.snapshot import DTYPES, Snapshot
from vllm.inflight.update import Manifest, TensorSpec

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class PublishedVersion:
    """The tensors and the digests of one version.

    Args:
        snapshot: the file of the version; it may be removed afterwards.
        manifest: of the whole version, with the digest of every tensor.

    """

    def __init__(self, snapshot: Snapshot, manifest: Manifest) -> None:
        self.specs = dict(manifest.tensors)
        """Name → shape, dtype and digest."""
        self.digest = _version_digest(self.specs)
        """Of the version."""
        self._tensors = _tensors(snapshot.mapped(), *snapshot.header())

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, in the file; None if the version has none."""
        return self._tensors.get(name)

    def advance(
        self, changes: Iterable[tuple[str, Changes]], specs: Mapping[str, TensorSpec]
    ) -> None:
        """Apply the changes of a delta; `specs` are the changed tensors afterwards."""
        for name, some in changes:
            apply(some, self._tensors[name].view(-1))
        self.specs |= specs
        self.digest = _version_digest(self.specs)


def _version_digest(specs: Mapping[str, TensorSpec]) -> str:
    return ops.manifest_digest(
        (spec.name, spec.dtype, spec.shape, _digest(spec)) for spec in specs.values()
    )


def _digest(spec: TensorSpec) -> ops.Digest:
    assert spec.digest is not None
    return ops.Digest.from_hex(spec.digest)


def _tensors(
    memory: mmap.mmap, header: Mapping[str, Any], start: int
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that is mapped into memory."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    found = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        flat = whole[start + first : start + end]
        found[name] = flat.view(TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])
    return found
