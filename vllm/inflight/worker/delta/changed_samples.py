"""The samples of a version, which a delta turns into those of the next version.

A sample consists of a few thousand elements of a tensor (verify/drift.py). A delta
names every element that changes. So the samples that are kept of the served version
become those of the next one, and no weights are read. A rank that serves a part of a
tensor has the sample of all of it, as it has after a whole version.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from vllm.inflight import ops
from vllm.inflight.delta import Changes
from vllm.inflight.delta.decoded import DecodedPart, Numbers
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.worker.verify.drift import NUM_RUNS, RUN, SIZE, Samples

NOWHERE = -1, 0
"""Block and row of a tensor that has no sample."""


class ChangedSamples:
    """A copy of samples, into which changed elements are written.

    Args:
        served: the samples of the version that the delta starts from.
        names: of the tensors that the delta changes, by number.
        sizes: elements of each of them.

    """

    def __init__(self, served: Samples, names: Sequence[str], sizes: Numbers) -> None:
        self._places = served.places
        self._blocks = [block.clone() for block in served.blocks]
        self._of = [served.places.get(name, NOWHERE) for name in names]
        blocks, rows = np.array(self._of, dtype=np.int64).reshape(-1, 2).T
        kinds = [(b.data_ptr(), b.shape[1], b.element_size()) for b in self._blocks]
        at, self._sizes, self._widths = np.array([*kinds, (0, 0, 0)], dtype=np.int64)[
            blocks
        ].T
        self._addresses = at + rows * self._sizes * self._widths
        self._steps = np.where(sizes < SIZE, RUN, sizes // NUM_RUNS)
        """From the beginning of a run to that of the next one. A short tensor is its
        own sample, as if its runs followed each other."""

    def write(self, changes: DecodedPart, launches: Launches) -> None:
        """Write the changes of one part, on a GPU, when the launches are run.

        Places of malformed data may be any numbers. No other memory is written then.
        """
        from vllm.inflight.worker.delta import triton_kernels as kernels

        launches.held += self._blocks
        groups, place_bytes = changes.groups, changes.places.element_size()
        numbers = groups.numbers
        rows = np.zeros((len(groups), kernels.SAMPLE_COLUMNS), dtype=np.int64)
        rows[:, :2] = changes.addresses
        rows[:, 2], rows[:, 3] = groups.counts, groups.are_differences
        rows[:, 4], rows[:, 5] = self._addresses[numbers], self._sizes[numbers]
        rows[:, 6] = self._steps[numbers]
        for width in np.unique(groups.widths).tolist():
            own = (groups.widths == width) & (self._widths[numbers] == width)
            launch = functools.partial(
                kernels.sample, width=width, place_bytes=place_bytes
            )
            if own.any():
                launches.add(rows[own], launch)

    def write_on_host(self, changes: Changes) -> None:
        """Write the changes of one tensor, with torch."""
        block, row = self._of[changes.number]
        width = changes.bits.element_size()
        if block < 0 or self._widths[changes.number] != width:
            return
        sample = self._blocks[block][row].view(ops.INTEGERS[width])
        step = int(self._steps[changes.number])
        here, to = _in_sample(changes.places.numpy(), step)
        here, to = here[to < len(sample)], to[to < len(sample)]
        bits = changes.bits[torch.from_numpy(here)]
        at = torch.from_numpy(to)
        sample[at] = sample[at] + bits if changes.are_differences else bits

    def samples(self) -> Samples:
        """The samples of the version that the delta leads to."""
        return Samples(self._blocks, self._places)


def _in_sample(places: Numbers, step: int) -> tuple[Numbers, Numbers]:
    """Which of these places a sample has, and where in the sample they are.

    Args:
        places: of a tensor, increasing.
        step: from the beginning of a run to that of the next one.

    """
    firsts = np.arange(NUM_RUNS) * step
    low = np.searchsorted(places, firsts)
    counts = np.searchsorted(places, firsts + RUN) - low
    run = np.repeat(np.arange(NUM_RUNS), counts)
    before = np.cumsum(counts) - counts
    here = np.arange(len(run)) - before[run] + low[run]
    return here, run * RUN + places[here] - firsts[run]
