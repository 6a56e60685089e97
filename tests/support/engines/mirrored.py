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
from vllm.inflight.worker.shadow.parameters import make_copy, mirror_parameters
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
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        vars(upstream).pop(name, None)  # a test may have found them unpatched
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
        mirror_parameters(self.live, self.module, make_copy)
        self._processed = True
        return None

    return build


class ContentFlip:
    """Exchanges the contents of live and shadow parameters; their memory stays."""

    def __init__(self, stager: StagingWorker) -> None:
        shadow = stager.shadow
        assert shadow.module is not None
        both = zip(parameters(shadow.live), parameters(shadow.module), strict=True)
        self._pairs = [(a, b) for (*_, a), (*_, b) in both]

    def __call__(self) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            for a, b in self._pairs:
                kept = a.data.clone()
                a.data.copy_(b.data)
                b.data.copy_(kept)
        return time.perf_counter() - started
