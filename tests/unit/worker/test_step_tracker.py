"""The stream that steps, used by a thread that changes weights between two steps."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.shadow_on_host import Sets, version
from vllm.inflight.patch.worker_rpc import inflight_adapter, inflight_read
from vllm.inflight.worker.integrity.outside_writes import overwriting
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.step_tracker import StepTracker
from vllm.inflight.worker.worker_state import WorkerState


class Stream:
    """What stands in for a stream; notes that it was waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """What stands in for a GPU's streams: `current.stream`, of each thread its own."""
    current = threading.local()
    default = Stream()

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        before = getattr(current, "stream", default)
        current.stream = chosen or before
        yield
        current.stream = before

    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: getattr(current, "stream", default)
    )
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return current


@pytest.fixture
def steps(current: threading.local) -> StepTracker:
    """Of a worker that another thread has made a step of; `steps.stream` is its own."""
    steps = StepTracker(torch.device("cuda"))

    def step() -> None:
        with steps.running():
            current.stream = Stream()  # chosen in the first step

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    return steps


def test_weights_are_exchanged_on_the_stream_that_steps_in_another_thread(
    current: threading.local, steps: StepTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena)
        sets.stager.steps = steps
        sets.stage(version(1).items())
        seen: list[Any] = []
        staged = sets.stager.versions.staged

        def flip() -> float:
            seen.append(current.stream)
            return float(staged.flip())

        seeing = replace(staged, flip=flip)
        sets.stager.versions = sets.stager.versions._replace(staged=seeing)
        sets.stager.flip()
    assert seen == [steps.stream]


@pytest.mark.parametrize(
    "call",
    [
        lambda worker: overwriting(worker),
        lambda worker: inflight_adapter(worker, "propose", None),
        lambda worker: inflight_read(worker, "checksums"),
    ],
)
def test_adapter_loads_and_upstreams_reads_and_writes_use_the_step_stream(
    current: threading.local,
    steps: StepTracker,
    call: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def see(*_: Any) -> None:
        seen.append((current.stream, current.stream.num_waits))

    monkeypatch.setattr("vllm.inflight.worker.lora.step", see)
    monkeypatch.setattr("vllm.inflight.worker.verify.readback.checksums", see)
    runner = SimpleNamespace(lora_config=None, get_model=lambda: torch.nn.Module())
    stager = SimpleNamespace(steps=steps)
    model = SimpleNamespace(model="here", model_weights="", revision=None)
    worker = SimpleNamespace(
        vllm_inflight=WorkerState(stager=stager),
        model_runner=runner,
        vllm_config=SimpleNamespace(model_config=model),
    )
    answer = call(worker)
    if isinstance(answer, AbstractContextManager):
        with answer:
            see()
    assert seen == [(steps.stream, 0)]
    assert steps.stream.num_waits == 1  # done, for whoever looks at it elsewhere


def test_work_that_fails_between_two_steps_is_waited_for_too(
    current: threading.local, steps: StepTracker
) -> None:
    with pytest.raises(ValueError, match="of a test"), steps.between():
        raise ValueError("of a test")
    assert steps.stream is not None and steps.stream.num_waits == 1


def test_a_call_before_the_first_step_uses_the_callers_stream(
    current: threading.local,
) -> None:
    steps = StepTracker(torch.device("cuda"))
    current.stream = Stream()
    with steps.between():
        assert not current.stream.num_waits
    assert current.stream.num_waits == 1
