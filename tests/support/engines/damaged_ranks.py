"""A worker extension for engines of several ranks, which damages one when asked to."""

import hashlib
from typing import Any

import torch

from tests.support.engines.transport import Extension
from vllm.inflight.worker.shadow.swap import Swap

WRITTEN = "model.norm.weight", "model.final_layernorm.weight"
"""The parameter that the write of `tests_write_before_next_swap` changes; families name
it otherwise."""


class Damaged(Extension):
    """Of two ranks, the last is the one whose swap fails."""

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

    def tests_write_before_next_swap(self) -> None:
        """Have the last rank's next swap meet bits that nobody has staged."""
        swap = Swap.__call__

        def write(the_swap: Swap) -> float:
            Swap.__call__ = swap  # type: ignore[method-assign]
            params = dict(self.model_runner.get_model().named_parameters())
            (norm,) = (params[name] for name in WRITTEN if name in params)
            norm.data.view(torch.int16).add_(1)
            return swap(the_swap)

        if self.rank == 1:
            Swap.__call__ = write  # type: ignore[method-assign]

    def tests_bits(self, but_for_the_write: bool = False) -> str:
        """A hash of all live bits.

        Args:
            but_for_the_write: whether to hash the bits that there were before
                `tests_write_before_next_swap` has changed some.

        """
        found = hashlib.sha256()
        for name, param in self.model_runner.get_model().named_parameters():
            bits = param.data.reshape(-1)
            if but_for_the_write and name in WRITTEN and self.rank == 1:
                bits = bits.view(torch.int16) - 1
            found.update(bits.view(torch.uint8).cpu().numpy().data)
        return found.hexdigest()

    def tests_fail_as_it_writes(self) -> None:
        """Leave the weights half written."""
        for param in list(self.model_runner.get_model().parameters())[::2]:
            param.data.fill_(7.0)
        raise RuntimeError("it broke off")
