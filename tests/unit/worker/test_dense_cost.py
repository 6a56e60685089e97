"""What whole tensors cost the staging thread with delta staging, batch by batch.

Decoding shares the interpreter with that thread, and each wait for the GPU lets it
fall behind. So both are counted, where the next version comes in the same memory.
"""

from typing import Any

import pytest
import torch

from tests.support.deltas import random_bits, scattered, with_changes
from tests.support.triton_interpreter import succeeds
from tests.unit.worker.test_delta_cost import Counted
from vllm.inflight.ops import launch_tables
from vllm.inflight.worker.delta import dense
from vllm.inflight.worker.delta.destinations import KnownDestinations
from vllm.inflight.worker.replay_plan import Copied, Entry, Zeroed, view_of
from vllm.inflight.worker.shadow.change_log import ChangeLog

CPU = torch.device("cpu")
NOTHING = torch.empty(0)
MOST_OPS = 10
"""Operators of torch that may be called for a batch."""


class Launched:
    """A kernel whose launches are counted, and not what it calls to interpret them."""

    def __init__(self, kernel: Any, counted: Counted) -> None:
        self._kernel, self._counted = kernel, counted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._counted.kernel(self._kernel[grid])


def model() -> tuple[dict[str, torch.Tensor], list[dense.Came]]:
    """Live parameters, and a bucket of tensors for them, with padding and a turned one.

    They are of two widths, and not all are read in words.
    """
    live, bucket = {}, []
    for number, dtype in enumerate([torch.bfloat16, torch.float32] * 3):
        name = f"w{number}"
        rows = random_bits(dtype, 24 * 40, number).view(24, 40)
        live[name] = rows
        view = rows.t() if number == 3 else rows[:20]
        tensor = view.clone(memory_format=torch.contiguous_format)
        copied = Copied(name, view_of(view), view_of(tensor), NOTHING, is_exact=True)
        zeros = [] if number == 3 else [Zeroed(name, view_of(rows[20:]), NOTHING)]
        entry = Entry(tensor.shape, dtype, [copied], zeros, is_proved=True)
        bucket.append(dense.Came(name, entry, tensor))
    return live, bucket


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    from vllm.inflight.worker.delta import compare_kernels as kernels

    live, bucket = model()
    counted = Counted()
    log, known, tables = ChangeLog(CPU, 1 << 20), KnownDestinations(), None
    if hasattr(dense, "KnownTables"):
        tables = dense.KnownTables()
    with pytest.MonkeyPatch.context() as patch:

        def tallied(module: Any, name: str, what: str) -> None:
            real = getattr(module, name)

            def call(*args: Any) -> Any:
                counted.counts[what] += 1
                return real(*args)

            patch.setattr(module, name, call)

        tallied(dense, "to_host", "waits")
        tallied(dense, "to_device", "copies")
        tallied(launch_tables, "to_device", "copies")
        for name in ("_count", "_log"):
            patch.setattr(kernels, name, Launched(getattr(kernels, name), counted))
        for seed in range(3):
            for came in bucket:
                new = with_changes(came.tensor.view(-1), scattered(100, 0.2, seed))
                came.tensor.view(-1).copy_(new)
            log.clear()
            more = () if tables is None else (tables,)
            comparison = dense.Comparison(log, live, known, *more)
            comparison._has_kernels = True
            counted.counts.clear()
            with counted.running():
                comparison.log_differences(bucket)
            assert log.num_elements > 0
    assert counted.counts["waits"] == 1
    assert counted.counts["copies"] == 1  # the room in the log
    assert counted.counts["launches"] <= 2 * 4
    assert counted.counts["ops"] <= MOST_OPS, counted.counts


@pytest.mark.seconds
def test_a_batch_in_known_memory_takes_one_wait_one_table_and_few_calls():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:check")


def test_tables_that_the_last_update_did_not_use_are_forgotten():
    tables = dense.KnownTables()
    made: list[int] = []

    def find(number: int) -> None:
        tables.find(((None, (number,)),), lambda: made.append(number) or made)

    for numbers in ([1, 2], [2, 3], [2, 1]):
        tables.begin()
        for number in numbers:
            find(number)
    assert made == [1, 2, 3, 1]
