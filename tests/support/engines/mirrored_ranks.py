"""A worker extension for CPU engines of several ranks with shadow parameters."""

from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.engines.mirrored import mirror
from tests.support.engines.transport import Extension
from tests.support.engines.unpacked import unpack
from vllm.inflight.worker.staging.loader import UpdateLoader

LOADED: list[str] = []
"""The tensors that updates have given to the model's own loader."""


def _noting(load: Any) -> Any:
    def noted(weights: Iterable[Any]) -> Iterator[Any]:
        for name, tensor in weights:
            LOADED.append(name)
            yield name, tensor

    return lambda self, weights: load(self, noted(weights))


unpack()  # a worker imports this before it loads its model
mirror()
UpdateLoader._load = _noting(UpdateLoader._load)  # type: ignore[method-assign]


class Mirrored(Extension):
    """It tells what was replayed, and what was loaded."""

    vllm_inflight: Any

    def tests_num_proved(self) -> int:
        """How many tensors are replayed."""
        return int(self.vllm_inflight.stager.shadow.plan.num_proved)

    def tests_num_loaded(self) -> int:
        """How many tensors were loaded since the start, but for those of other ranks.

        Each rank's loader gets the experts of the other ranks, and passes over them.
        """
        plan = self.vllm_inflight.stager.shadow.plan
        return len([name for name in LOADED if not plan.passes_over(name)])
