"""CPU engines with shadow parameters, as on a GPU: loads are replayed, and deltas are
written element by element.

Only the flip is another one. A GPU exchanges pages; here the contents of every pair of
parameters are exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.engines.unpacked import unpacked
from vllm.inflight import upstream
from vllm.inflight.worker.model.layers import parameters
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.shadow.parameters import mirror_parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.worker import StagingWorker


def mirror(patch: pytest.MonkeyPatch | None = None) -> None:
    """Have engines that start be such engines; until `patch` is undone, or for good."""
    patch = patch or pytest.MonkeyPatch()
    patch.setattr(ShadowModel, "_build", _build(ShadowModel._build))
    patch.setattr(StagingWorker, "make_flip", lambda self: ContentFlip(self))


@contextmanager
def mirrored() -> Iterator[None]:
    """Context: engines that start are such engines, until they end."""
    with unpacked(), pytest.MonkeyPatch.context() as patch:
        mirror(patch)
        yield


def _build(original: Any) -> Any:
    def build(self: ShadowModel, vllm_config: upstream.VllmConfig) -> str | None:
        self.plan = Plan()
        if (reason := original(self, vllm_config)) is not None:
            return str(reason)
        assert self.module is not None and self.log is None
        for layer in self.module.modules():
            upstream.get_layerwise_info(layer).restore_device = self.device
        mirror_parameters(self.live, self.module, Copies())
        self._processed = True
        return None

    return build


class Copies:
    """Copies of tensors, which share memory where the tensors do.

    Latent attention has views of a weight as further parameters.
    """

    def __init__(self) -> None:
        self._made: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, at the same place of a copy of its storage."""
        storage = tensor.untyped_storage()
        copy = self._made.setdefault(storage.data_ptr(), storage.clone())
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(copy, *place)


class ContentFlip:
    """Exchanges the contents of live and shadow parameters; their memory stays."""

    def __init__(self, stager: StagingWorker) -> None:
        shadow = stager.shadow
        assert shadow.module is not None
        both = zip(parameters(shadow.live), parameters(shadow.module), strict=True)
        pairs = [(a, b) for (*_, a), (*_, b) in both]
        # Memory that several parameters share is exchanged once.
        self._pairs = {
            a.untyped_storage().data_ptr(): (content(a), content(b)) for a, b in pairs
        }

    def __call__(self) -> float:
        started = time.perf_counter()
        for a, b in self._pairs.values():
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
        return time.perf_counter() - started


def content(param: torch.Tensor) -> torch.Tensor:
    """All memory of a parameter's storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(param.untyped_storage())
