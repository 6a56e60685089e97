"""The pace of staging: it rests while steps run, and only then."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch

from vllm.inflight.config import InflightConfig
from vllm.inflight.worker.model.kinds import cpu_packing
from vllm.inflight.worker.staging import throttle as paces
from vllm.inflight.worker.staging.throttle import (
    BREAK_S,
    IDLE_S,
    LONGEST_REST_S,
    DeviceThrottle,
    Throttle,
    free_cores,
    pace_of,
)
from vllm.inflight.worker.step_tracker import StepTracker


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of every rest; none is slept."""
    seconds: list[float] = []
    monkeypatch.setattr(paces.time, "sleep", seconds.append)
    return seconds


def work_and_rest(pace: Throttle) -> None:
    """Work for so long that the longest rest is owed at a share of 1 %."""
    begun = time.thread_time()
    while time.thread_time() - begun < LONGEST_REST_S / 99:
        pass
    pace.rest(0)


def settled(share: float, steps: StepTracker) -> Throttle:
    pace = Throttle(share, steps)
    with pace.settled():
        return pace  # the thread ends with all that was settled


def in_a_thread(work: Callable[[], None]) -> None:
    """Settling changes the calling thread, which is not to be the tests'."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_the_middle(steps: StepTracker, pace: Throttle) -> None:
    with steps.running():
        work_and_rest(pace)


def in_one_begun_before(steps: StepTracker, pace: Throttle) -> None:
    with steps.running():
        pace.rest(0)
        work_and_rest(pace)


def around_one(steps: StepTracker, pace: Throttle) -> None:
    with steps.running():
        pass
    work_and_rest(pace)


def until_one_ends(steps: StepTracker, pace: Throttle) -> None:
    with steps.running():
        pace.rest(0)
    work_and_rest(pace)


def around_one_that_fails(steps: StepTracker, pace: Throttle) -> None:
    with suppress(ZeroDivisionError), steps.running():
        raise ZeroDivisionError
    work_and_rest(pace)


@pytest.mark.parametrize(
    "work",
    [
        in_the_middle,
        in_one_begun_before,
        around_one,
        until_one_ends,
        around_one_that_fails,
    ],
)
def test_the_throttle_rests_after_work_beside_a_step(
    work: Any, naps: list[float]
) -> None:
    steps = StepTracker()
    in_a_thread(lambda: work(steps, settled(0.01, steps)))
    assert naps[-1] == LONGEST_REST_S


def test_the_throttle_does_not_rest_between_steps(
    naps: list[float],
) -> None:
    steps = StepTracker()
    with steps.running():
        pass

    def work() -> None:
        pace = settled(0.01, steps)
        work_and_rest(pace)
        work_and_rest(pace)

    ended = threading.Event()
    spinning = threading.Thread(target=lambda: all(not ended.is_set() for _ in count()))
    spinning.start()
    in_a_thread(work)
    ended.set()
    spinning.join()
    assert not naps


def test_a_rest_owed_from_between_two_steps_is_taken_beside_the_next_step(
    naps: list[float],
) -> None:
    steps = StepTracker()

    def work() -> None:
        pace = settled(0.01, steps)
        work_and_rest(pace)
        with steps.running():
            pace.rest(0)

    in_a_thread(work)
    assert naps == [LONGEST_REST_S]


@pytest.mark.parametrize(("share", "hurry_s"), [(1, 3600), (0.01, 0)])
def test_staging_at_full_share_or_past_its_hurry_time_never_rests(
    share: float, hurry_s: float, naps: list[float]
) -> None:
    steps = StepTracker()

    def work() -> None:
        pace = settled(share, steps)
        pace.hurry_after(hurry_s)
        in_the_middle(steps, pace)

    in_a_thread(work)
    assert not any(naps)


def test_staging_has_at_least_one_free_core():
    assert free_cores()
    assert free_cores() <= set(range(os.cpu_count() or 1))


PACES = [lambda steps: DeviceThrottle(100.0, steps), lambda steps: Throttle(0.5, steps)]


@pytest.mark.parametrize("make", PACES, ids=["device", "CPU"])
def test_staging_takes_a_break_between_slices_unless_it_must_hurry(
    make: Callable[[StepTracker], Any], naps: list[float]
) -> None:
    steps = StepTracker()
    pace = make(steps)
    with steps.running():
        pace.take_break()
        assert naps == [BREAK_S]
        pace.hurry_after(0.0)
        pace.take_break()
        assert naps == [BREAK_S]


@pytest.mark.parametrize("make", PACES, ids=["device", "CPU"])
def test_there_are_breaks_while_steps_follow_each_other_and_none_on_an_idle_engine(
    make: Callable[[StepTracker], Any],
    naps: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(paces.time, "monotonic", lambda: now)
    steps = StepTracker()
    pace = make(steps)
    pace.take_break()
    assert not naps  # nothing has been decoded yet
    with steps.running():
        pass
    for _ in range(2):  # the next step may begin at any moment
        pace.take_break()
    assert naps == [BREAK_S] * 2
    now += IDLE_S
    pace.take_break()
    assert naps == [BREAK_S] * 2
    with steps.running():
        now += 10 * IDLE_S  # a long prefill
        pace.take_break()
    assert naps == [BREAK_S] * 3


@pytest.mark.parametrize(("staging", "expected"), [("host", 3), ("auto", 1)])
def test_staging_on_the_host_of_a_gpu_copies_with_several_threads(
    staging: str, expected: int
) -> None:
    config = InflightConfig(staging=staging)
    pace = pace_of(config, torch.device("cuda"), StepTracker(), 3)
    seen: list[int] = []

    def stage() -> None:
        cpu_packing.set_threads(1)
        with pace.settled():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    in_a_thread(stage)
    assert seen == [expected, 1]
