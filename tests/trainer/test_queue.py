"""The queue: what a publish does while another one is under way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.trainer.conftest import parcels
from tests.trainer.stand_in import (
    START,
    UPDATE,
    publisher,
    weights,
)
from tests.waiting import until
from vllm.inflight.errors import UpdateBusy, WeightsMismatch
from vllm.inflight.trainer import Outcome


def test_a_busy_engine_is_waited_for(engine):
    engine.begin_elsewhere()
    with publisher(engine) as to:
        future = to.publish("v", block=False)
        until(lambda: len(engine.bodies(START)) > 1)
        assert not future.done()
        engine.end_elsewhere()
        assert future.result().version == "v"


def test_waiting_for_a_busy_engine_ends_with_the_patience(engine):
    engine.begin_elsewhere()
    with publisher(engine, timeout_s=0.5) as to, pytest.raises(UpdateBusy):
        to.publish()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the trainer's side logs; vLLM's logging keeps it from pytest."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, listener = logging.getLogger("vllm.inflight.trainer"), Listener()
    logger.addHandler(listener)
    yield lines
    logger.removeHandler(listener)


def test_a_failure_that_nobody_asks_for_is_logged_before_the_publisher_closes(
    engine, logged
):
    engine.faults[UPDATE] = [WeightsMismatch("unknown: a.weight")] * 2
    with publisher(engine) as to:
        to.publish("step-7", block=False)
    (line,) = logged
    assert "'step-7'" in line and "unknown: a.weight" in line
    assert WeightsMismatch.remedy in line
    with publisher(engine) as to, pytest.raises(WeightsMismatch):
        to.publish("step-8")  # raised, and so not logged as well
    assert len(logged) == 1


def test_a_publisher_that_has_closed_has_told_every_future(engine):
    told = threading.Event()

    def slowly(_: Future[Outcome]) -> None:
        time.sleep(0.3)
        told.set()

    engine.delays[START] = 0.1
    with publisher(engine) as to:
        to.publish(block=False).add_done_callback(slowly)
    assert told.is_set()


def test_a_busy_engine_is_skipped(engine):
    engine.begin_elsewhere()
    with publisher(engine, on_busy="skip") as to:
        assert to.publish("v", step=3) == Outcome(version="v", step=3, skipped=True)


def test_a_publisher_under_way_skips_without_a_snapshot(engine):
    engine.held[UPDATE] = threading.Event()
    num_read = 0

    def source():
        nonlocal num_read
        num_read += 1
        return weights()

    with publisher(engine, source, on_busy="skip") as to:
        first = to.publish(block=False)
        assert to.publish().skipped
        engine.held[UPDATE].set()
        assert not first.result().skipped
        assert not to.publish().skipped, "an outcome came before its place was free"
    assert num_read == 2


def test_the_latest_replaces_the_one_that_waits(engine):
    engine.held[UPDATE] = threading.Event()
    with publisher(engine, on_busy="latest") as to:
        futures = [to.publish(str(number), block=False) for number in range(4)]
        engine.held[UPDATE].set()
        outcomes = [future.result() for future in futures]
    # One of the first may have begun before the next came; all others were replaced.
    *first, last = [outcome.skipped for outcome in outcomes]
    assert sum(first) >= 2 and not last
    assert engine.version["weight_version"] == "3"


def test_the_latest_replaces_one_that_waits_for_a_busy_engine(engine):
    engine.begin_elsewhere()
    with publisher(engine, on_busy="latest") as to:
        old = to.publish("old", block=False)
        until(lambda: engine.bodies(START))
        new = to.publish("new", block=False)
        assert old.result().skipped
        engine.end_elsewhere()
        assert not new.result().skipped


def test_one_update_at_a_time_in_the_order_of_the_calls(engine):
    engine.delays["tensor"] = 0.02
    with publisher(engine) as to:
        futures = [to.publish(str(number), block=False) for number in range(4)]
        epochs = [future.result().epoch for future in futures]
    assert (epochs, engine.most_staging) == ([1, 2, 3, 4], 1)


def test_at_most_two_snapshots_exist(engine):
    engine.delays[START] = 0.1
    most = 0

    def source():
        nonlocal most
        most = max(most, len(parcels()))
        return weights()

    with publisher(engine, source) as to:
        for _ in range(5):
            to.publish(block=False)
    assert most <= 2


def test_updates_keep_their_distance(engine):
    with publisher(engine, min_interval_s=0.4) as to:
        to.publish()
        started = time.monotonic()
        to.publish()
    assert time.monotonic() - started >= 0.4


def test_a_publish_that_waits_may_be_cancelled(engine):
    engine.held[UPDATE] = threading.Event()
    with publisher(engine) as to:
        to.publish("first", block=False)
        until(lambda: engine.bodies(UPDATE))
        second: Future[Outcome] = to.publish("second", block=False)
        assert second.cancel()
        engine.held[UPDATE].set()
    assert engine.version["weight_version"] == "first"


def test_closing_finishes_what_was_published_and_takes_no_more(engine):
    engine.delays[UPDATE] = 0.2
    to = publisher(engine)
    future = to.publish(block=False)
    to.close()
    assert future.done()
    with pytest.raises(RuntimeError, match="closed"):
        to.publish()
