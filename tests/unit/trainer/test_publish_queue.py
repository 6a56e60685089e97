"""The queue: what a publish does while another one is under way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import pairwise

import pytest

from tests.support.trainers.fake_engine import START, UPDATE, publisher, weights
from tests.support.waiting import until
from tests.unit.trainer.conftest import parcels
from vllm.inflight.api.request.rate_limit import RateLimit
from vllm.inflight.background import Background
from vllm.inflight.errors import TooManyUpdates, UpdateBusy, WeightsMismatch
from vllm.inflight.trainer import Outcome
from vllm.inflight.trainer.snapshot import Snapshot
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.seconds


def test_a_busy_engine_is_waited_for(engine):
    engine.begin_elsewhere()
    with publisher(engine) as to:
        future = to.publish("v", block=False)
        until(lambda: len(engine.bodies(START)) > 1)
        assert not future.done()
        engine.end_elsewhere()
        assert future.result().version == "v"


def test_a_publish_to_a_busy_engine_fails_at_its_timeout(engine, leaping):
    engine.faults[START] = [UpdateBusy("elsewhere", retry_after_s=8)] * 9
    with publisher(engine, timeout_s=20) as to, pytest.raises(UpdateBusy):
        to.publish()
    # Twice as it says, and then more often, until the end.
    assert 3 < len(engine.bodies(START)) < 12


def limited(left: int) -> RateLimit:
    """One update a second, after `left` at once."""
    rate = RateLimit(60)
    for _ in range(60 - left):
        rate.spend("trainer")
    return rate


@pytest.mark.parametrize("on_busy", ["wait", "latest"])
def test_a_publish_that_waits_for_a_busy_engine_keeps_its_rate(
    engine, on_busy, monkeypatch
):
    engine.rate = limited(left=2)
    spend, refused = engine.rate.spend, []

    def noted(caller: str) -> None:
        refused.append(True)
        spend(caller)
        refused[-1] = False

    monkeypatch.setattr(engine.rate, "spend", noted)
    engine.begin_elsewhere()
    with publisher(engine, on_busy=on_busy) as to:
        future = to.publish("v", block=False)
        until(lambda: len(engine.bodies(START)) > 2)
        engine.end_elsewhere()
        assert future.result().version == "v"
    # It came back when it was told to, and not before.
    assert any(refused)
    assert not any(one and next_one for one, next_one in pairwise(refused))


def test_an_engine_whose_rate_limit_is_used_up_does_not_count_as_busy(engine):
    engine.rate = limited(left=0)
    with publisher(engine, on_busy="skip") as to:
        assert to.publish("v").version == "v"


@pytest.mark.parametrize(("retry_after_s", "waits"), [(60, []), (8, [8, 8])])
def test_a_publish_fails_when_the_rate_limit_outlasts_its_timeout(
    engine, leaping, retry_after_s, waits
):
    """It fails as soon as that is known: no wait ends in nothing but the error."""
    engine.faults[START] = [TooManyUpdates("later", retry_after_s=retry_after_s)] * 9
    with publisher(engine, timeout_s=20) as to, pytest.raises(TooManyUpdates):
        to.publish("v")
    assert leaping == waits
    assert len(engine.bodies(START)) == len(waits) + 1


def test_a_snapshot_that_cannot_be_removed_fails_its_publish_and_no_other(
    engine, monkeypatch
):
    remove = Snapshot.remove

    def fail(parcel):
        remove(parcel)
        raise OSError("no")

    with publisher(engine) as to:
        with monkeypatch.context() as broken:
            broken.setattr(Snapshot, "remove", fail)
            with pytest.raises(OSError, match="no"):
                to.publish("v1", block=False).result(timeout=60)
        assert to.publish("v2").version == "v2"


def test_a_failure_that_nobody_asks_for_is_logged_before_the_publisher_closes(
    engine, logged
):
    engine.faults[UPDATE] = [WeightsMismatch("unknown: a.weight")] * 2
    with pytest.raises(WeightsMismatch), publisher(engine) as to:
        to.publish("step-7", block=False)
    (line,) = logged
    assert "'step-7'" in line and "unknown: a.weight" in line
    assert WeightsMismatch.remedy in line
    with publisher(engine) as to, pytest.raises(WeightsMismatch):
        to.publish("step-8")  # raised, and so not logged as well
    assert len(logged) == 1


def test_closing_a_publisher_waits_for_the_callbacks_of_every_future(engine):
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


def test_a_skipped_publish_makes_no_snapshot(engine):
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


def test_a_new_publish_replaces_the_waiting_one_in_mode_latest(engine):
    engine.held[UPDATE] = threading.Event()
    with publisher(engine, on_busy="latest") as to:
        futures = [to.publish(str(number), block=False) for number in range(4)]
        engine.held[UPDATE].set()
        outcomes = [future.result() for future in futures]
    # One of the first may have begun before the next came; all others were replaced.
    *first, last = [outcome.skipped for outcome in outcomes]
    assert sum(first) >= 2 and not last
    assert engine.version["weight_version"] == "3"


def test_a_new_publish_replaces_one_that_waits_for_a_busy_engine(engine):
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


def test_the_minimum_interval_between_updates_is_kept(engine):
    started = time.monotonic()  # before the first commit
    with publisher(engine, min_interval_s=0.4) as to:
        to.publish()
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


def test_a_publish_that_was_not_read_at_close_is_dropped(engine):
    reading, read_on = threading.Event(), threading.Event()

    def source():
        reading.set()
        read_on.wait(60)
        return weights()

    to = publisher(engine, source)
    publishing = in_background(to.publish)
    assert reading.wait(60)
    to.close()
    read_on.set()
    with pytest.raises(RuntimeError, match="the publisher is closed"):
        publishing.result(60)
    assert engine.calls == [] and parcels() == set()


def test_a_publish_rejected_after_close_does_not_replace_the_waiting_one(engine):
    engine.held[UPDATE] = threading.Event()
    to = publisher(engine, on_busy="latest")
    to.publish("first", block=False)
    until(lambda: engine.bodies(UPDATE))
    last = to.publish("last", block=False)
    closing = in_background(to.close)
    until(lambda: to._queue._closed)
    with pytest.raises(RuntimeError, match="closed"):
        to.publish("too late")
    engine.held[UPDATE].set()
    closing.result(60)
    assert not last.result().skipped
    assert engine.version["weight_version"] == "last"


def test_a_thread_that_cannot_start_leaves_a_publisher_that_can(engine, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with publisher(engine) as to:
        with monkeypatch.context() as patch:
            patch.setattr(Background, "start", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                to.publish(block=False)
        assert parcels() == set()
        assert to.publish("v").version == "v"


def test_a_snapshot_that_is_not_removed_ends_no_thread(engine, monkeypatch, caplog):
    def fail(parcel):
        remove(parcel)
        raise OSError("it is busy")

    remove = Snapshot.remove
    engine.held[START] = held = threading.Event()
    with publisher(engine) as to:
        first = to.publish("first", block=False)
        second = to.publish("second", block=False)
        assert second.cancel()
        monkeypatch.setattr(Snapshot, "remove", fail)
        held.set()
        with pytest.raises(OSError, match="it is busy"):
            first.result()
        until(lambda: "a snapshot was not removed: it is busy" in caplog.text)
        monkeypatch.setattr(Snapshot, "remove", remove)
        assert to.publish("third").version == "third"
