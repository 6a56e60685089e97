"""Tensors that arrive after their version is live: they are compared, and never loaded.

A trainer may send tensors that fill no parameter last. Such a tensor may be tied to a
parameter, as a head is to the embedding. Then it has to be equal to that parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from vllm.inflight import ops
from vllm.inflight.ops.gpu_digest import GpuDigest, Pair
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.verify.checks import IS_TIED, rejection
from vllm.inflight.worker.verify.content import Content, Facts


class ServedComparison:
    """Compares the tensors of one call with the live weights, on one rank.

    Args:
        shadow: the shadow model, which a transport gives its tensors to.
        served: the content of the live weights, if it is known tensor by tensor.
        verify: whether contents are compared.

    """

    def __init__(
        self, shadow: ShadowModel, served: Content | None, *, verify: bool
    ) -> None:
        self._shadow = shadow
        self._served = served
        self._verify = verify
        self._facts: dict[str, Facts] = {}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context: this object is in place of the model's `load_weights`."""
        module = self._shadow.module
        assert module is not None
        module.load_weights = self._take  # type: ignore[assignment]
        try:
            yield
        finally:
            vars(module).pop("load_weights", None)

    def judge(self) -> None:
        """Raise `WeightsMismatch` if a tensor differs from what it is tied to."""
        if self._served is None or not self._verify:
            return
        served = set(self._served.facts.values())
        wrong = {
            name: IS_TIED
            for name, facts in self._facts.items()
            if self._shadow.ignored.is_tied(name) and facts not in served
        }
        if wrong:
            raise rejection({}, wrong, [], [], {}, num_asked=0)

    def _take(self, weights: Iterable[Pair]) -> None:
        for name, tensor in weights:
            dtype = str(tensor.dtype).removeprefix("torch.")
            digest = self._digest(name, tensor)
            self._facts[name] = dtype, tuple(tensor.shape), (digest.a, digest.b)

    def _digest(self, name: str, tensor: torch.Tensor) -> ops.Digest:
        if not self._verify:
            return ops.Digest.ZERO
        if not tensor.is_cuda:
            return ops.digest([tensor], num_threads=self._shadow.num_threads)[0]
        digest = GpuDigest(tensor.device, {})
        digest.add([(name, tensor)])
        return digest.results()[0][1]
