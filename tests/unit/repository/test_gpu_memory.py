"""What the memory benchmark and the test of memory read from the GPU's driver."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import memory


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int | None]]]:
    """Per GPU the processes of the driver, and the bytes that each holds."""
    gpus: list[list[tuple[int, int | None]]] = [[], []]

    def processes(gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=p, usedGpuMemory=held) for p, held in gpus[gpu]]

    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )
    monkeypatch.setattr(memory, "pynvml", driver)
    return gpus


def test_what_a_process_holds_is_that_of_all_gpus_and_of_no_other_process(running):
    own = os.getpid()
    running[0] += [(own, 100), (own + 1, 1000)]
    running[1] += [(own, 10)]
    assert memory.held_by({own}) == 110


@pytest.mark.parametrize("told", [[], [(os.getpid(), None)]])
def test_a_driver_that_does_not_tell_is_named_and_not_taken_for_zero(running, told):
    running[0] += told
    with pytest.raises(RuntimeError, match="does not tell"):
        memory.held_by({os.getpid()})
