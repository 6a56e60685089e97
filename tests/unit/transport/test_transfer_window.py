"""The window grows while the wire is waited for, and shrinks while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.transports.peers import connect, engine, send, tensors, update
from vllm.inflight.transport.buckets.receiver import BucketWindow
from vllm.inflight.transport.waiting import WaitLimit, in_background


def sizes(window: BucketWindow, *waits: float) -> list[int]:
    """Its size after each wait."""
    seen = []
    for waited_s in waits:
        window.note(waited_s)
        seen.append(window.size)
    return seen


def test_the_window_shrinks_to_two_buckets_while_buckets_are_ready():
    assert sizes(BucketWindow(4, 0.002), 0.0, 0.0, 0.0, 0.0) == [3, 2, 2, 2]


def test_the_window_grows_up_to_its_limit_while_buckets_are_waited_for():
    window = BucketWindow(4, 0.002)
    window.size = 2
    assert sizes(window, 0.003, 0.1, 0.1) == [3, 4, 4]
    assert window.total_s == 0.003 + 0.1 + 0.1


def test_a_short_wait_keeps_the_size_of_the_window():
    window = BucketWindow(4, 0.002)
    window.size = 3
    assert sizes(window, 0.001, 0.002) == [3, 3]


def test_a_window_with_memory_for_one_bucket_stays_at_one():
    assert sizes(BucketWindow(1, 0.002), 0.0, 1.0, 0.0) == [1, 1, 1]


def test_an_engine_reports_its_bucket_window(monkeypatch: pytest.MonkeyPatch):
    worker, named = engine(), tensors(1)
    assert worker.gauges == {}
    sender = connect(worker, num_buckets=5)
    asked, until = threading.Event(), WaitLimit.until

    def noted(self: WaitLimit, ready: Callable[[], bool], *args: Any, **options: Any):
        def looked() -> bool:
            is_ready = ready()
            if not is_ready and threading.current_thread() is receiver:
                asked.set()
            return is_ready

        return until(self, looked, *args, **options)

    def late() -> None:
        assert asked.wait(60)
        send(sender, named)

    receiver = threading.current_thread()
    monkeypatch.setattr(WaitLimit, "until", noted)
    sending = in_background(late)  # so that the first bucket is waited for
    update(worker, named)
    sending.result(timeout=60)
    gauges = worker.gauges
    assert 2 <= gauges["window"] <= 5
    assert gauges["window_bytes"] == gauges["window"] * sender.group.terms.bucket_bytes
    assert gauges["bucket_wait_ms"] >= 0
    assert gauges["wire_s"] > 0
    sender.group.close()
    worker.shutdown()
