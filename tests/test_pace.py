"""The pace of staging: it rests while the process decodes, and only then."""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vllm.inflight.stage.pace import LONGEST_REST_S, DevicePace, Pace, free_cores

TRIES = 20
PATIENCE_S = 60.0
"""On a busy machine a thread may not run for a while, and so look idle."""


def rested(pace: Pace) -> float:
    """Work a little and rest from it; the seconds of the rest."""
    begun = time.thread_time()
    while time.thread_time() - begun < 0.01:
        pass
    start = time.monotonic()
    pace.rest(0)
    return time.monotonic() - start


def in_a_thread(work: object) -> None:
    """Settling changes the calling thread, which is not to be the tests'."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@contextmanager
def decoding() -> Iterator[None]:
    """A thread of this process that computes without the interpreter's lock."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 20000)

    thread = threading.Thread(target=compute)
    thread.start()
    yield
    ended.set()
    thread.join()


def settled(share: float) -> Pace:
    pace = Pace(share)
    with pace.settled():
        return pace  # the thread ends with all that was settled


def test_it_rests_while_the_process_decodes():
    rests = []

    def work():
        pace = settled(0.01)
        deadline = time.monotonic() + PATIENCE_S
        while max(rests, default=0.0) < LONGEST_REST_S:
            rests.append(rested(pace))
            assert time.monotonic() < deadline

    with decoding():
        in_a_thread(work)
    assert rests[-1] >= LONGEST_REST_S


def test_it_does_not_rest_in_an_idle_process():
    rests = []

    def work():
        pace = settled(0.01)
        rests.extend(rested(pace) for _ in range(TRIES))

    in_a_thread(work)
    assert min(rests) < LONGEST_REST_S


@pytest.mark.parametrize(("share", "hurry_s"), [(1, 3600), (0.01, 0)])
def test_at_full_share_or_late_it_never_rests(share, hurry_s):
    rests = []

    def work():
        pace = settled(share)
        pace.hurry_after(hurry_s)
        rests.extend(rested(pace) for _ in range(TRIES))

    with decoding():
        in_a_thread(work)
    assert sorted(rests)[TRIES // 2] < LONGEST_REST_S


def test_staging_has_a_core_to_run_on():
    assert free_cores()
    assert free_cores() <= set(range(os.cpu_count() or 1))


def test_a_device_s_pace_has_the_interpreter_switch_more_often_only_while_it_stages():
    before = sys.getswitchinterval()
    pace = DevicePace(100.0)
    with pace.settled():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
