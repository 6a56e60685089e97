"""A worker extension for CPU engines of several ranks whose matrices are not packed."""

from dataclasses import replace

from tests.support.engines.damaged_ranks import Damaged
from tests.support.engines.unpacked import unpack
from vllm.inflight.delta import Changes
from vllm.inflight.worker.delta.writer import DeltaWriter

unpack()  # a worker imports this before it loads its model


class Unpacked(Damaged):
    """It also alters what it receives when it is asked to."""

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
