"""A worker extension for CPU engines of several ranks whose matrices are not packed."""

import hashlib
from dataclasses import replace
from typing import Any

import torch

from tests.support.engines.transport import Extension
from tests.support.engines.unpacked import unpack
from vllm.inflight.delta import Changes
from vllm.inflight.worker.delta.writer import DeltaWriter
from vllm.inflight.worker.shadow.swap import Swap

unpack()  # a worker imports this before it loads its model


class Unpacked(Extension):
    """It also does damage when it is asked to."""

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
            norm = self.model_runner.get_model().model.norm.weight
            norm.data.view(torch.int16).add_(1)
            return swap(the_swap)

        if self.rank == 1:
            Swap.__call__ = write  # type: ignore[method-assign]

    def tests_bits(self) -> str:
        """A hash of all live bits but those of the last norm."""
        found = hashlib.sha256()
        for name, param in self.model_runner.get_model().named_parameters():
            if name != "model.norm.weight":
                found.update(param.data.contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def tests_alter_next_delta(self, name: str, units: list[int]) -> None:
        """Have the next delta's first bits of a tensor arrive altered.

        Args:
            name: of the tensor.
            units: for each rank, what is added to the bits of each element.

        """
        write = DeltaWriter._write_on_host

        def altered(writer: DeltaWriter, changes: Changes) -> None:
            if writer._specs[changes.number].name == name:
                DeltaWriter._write_on_host = write  # type: ignore[method-assign]
                changes = replace(changes, bits=changes.bits + units[self.rank])
            write(writer, changes)

        DeltaWriter._write_on_host = altered  # type: ignore[method-assign]

    def tests_fail_as_it_writes(self) -> None:
        """Leave the weights half written."""
        for param in list(self.model_runner.get_model().parameters())[::2]:
            param.data.fill_(7.0)
        raise RuntimeError("it broke off")
