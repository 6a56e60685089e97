"""A worker extension for CPU engines of several ranks whose matrices are not packed."""

from typing import Any

from tests.support.engines.transport import Extension
from tests.support.engines.unpacked import unpack
from vllm.inflight.worker.shadow.swap import Swap

unpack()  # a worker imports this before it loads its model


class Unpacked(Extension):
    """It also refuses a swap or loses the weights when it is asked to."""

    model_runner: Any
    rank: int

    def tests_refuse_next_swap(self) -> None:
        """Have the next swap of the last rank refuse."""
        swap = Swap.__call__

        def refuse(_: Swap) -> float:
            Swap.__call__ = swap  # type: ignore[method-assign]
            raise RuntimeError("the swap of this rank alone")

        if self.rank == 1:
            Swap.__call__ = refuse  # type: ignore[method-assign]

    def tests_fail_as_it_writes(self) -> None:
        """Leave the weights half written."""
        for param in list(self.model_runner.get_model().parameters())[::2]:
            param.data.fill_(7.0)
        raise RuntimeError("it broke off")
