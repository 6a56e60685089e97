"""The watch over updates: none is forgotten, and whoever waits is answered."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.waiting import until
from vllm.inflight.calls import StartUpdate
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update import monitor as watch_module
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.engine.update.monitor import UpdateMonitor
from vllm.inflight.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    WeightsMismatch,
)
from vllm.inflight.messages import Status
from vllm.inflight.update import Phase


@pytest.fixture
def ranks():
    return SimpleNamespace(
        statuses=lambda: [Status()],
        cancel=lambda serial: None,
        rest=time.sleep,
        wake=lambda: None,
        are_here=False,
    )


def test_an_update_that_starts_while_the_last_one_ends_is_monitored(ranks, monkeypatch):
    ended, ledger = [], Ledger()
    watch = UpdateMonitor(ranks, ledger, lambda _, error: ended.append(error))
    first, _ = ledger.start(StartUpdate("first"), 60.0)
    ledger.move(first, Phase.STAGING)
    is_active = Update.is_active.fget

    def begin() -> None:
        second, _ = ledger.start(StartUpdate("second"), 0.1)
        ledger.move(second, Phase.STAGING)
        watch.start(second)

    beginning = threading.Thread(target=begin)

    def read(self):
        found = is_active(self)
        lets_go = sys._getframe(1).f_code is UpdateMonitor._work.__code__
        if self is first and not found and lets_go and beginning.ident is None:
            beginning.start()
            beginning.join(0.2)  # unless it waits for what is going on here
        return found

    watch.start(first)
    monkeypatch.setattr(Update, "is_active", property(read))
    watch.end(first, Cancelled("given up"))
    until(lambda: len(ended) == 2, "the second is looked after by nobody")
    assert {type(error) for error in ended} == {Cancelled, DeadlineExceeded}
    watch.close()


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_cancelled_rank_is_a_fault_unless_the_engine_cancelled_the_update(
    ranks, is_given_up
):
    left = Cancelled("the update was aborted").to_dict()
    ranks.statuses = lambda: [Status(1, "failed", error=left)]
    ranks.has_given_up = lambda serial: is_given_up
    expected = Cancelled if is_given_up else EngineFault
    ended, ledger = [], Ledger()
    watch = UpdateMonitor(ranks, ledger, lambda _, error: ended.append(error))
    update, _ = ledger.start(StartUpdate("one"), 60.0)
    ledger.move(update, Phase.STAGING)
    watch.start(update)
    for answer in (watch.when_staged(update), watch.when_carried_out(1, 60.0)):
        assert type(answer.exception(timeout=30)) is expected
    assert type(ended[0]) is expected
    watch.close()


def test_waiting_calls_fail_when_an_engine_shuts_down(ranks):
    ledger = Ledger()
    watch = UpdateMonitor(ranks, ledger, lambda *_: None)
    update, _ = ledger.start(StartUpdate("one"), 60.0)
    ledger.move(update, Phase.STAGING)
    answer = watch.when_staged(update)
    watch.close()
    with pytest.raises(EngineFault, match="shut down"):
        answer.result(timeout=30)


def test_a_wait_is_looked_after_more_often_at_first(ranks, monkeypatch):
    """A framework may make a call for each tensor, and each waits for the ranks."""
    rests, now = [], 0.0

    def rest(seconds):
        nonlocal now
        rests.append(seconds)
        now += seconds
        if now > 0.1:  # the ranks are done
            ranks.statuses = lambda: [Status(1, "staging", orders=1)]

    ranks.rest = rest
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(watch_module, "time", clock)
    ledger = Ledger()
    watch = UpdateMonitor(ranks, ledger, lambda *_: None)
    update, _ = ledger.start(StartUpdate("one"), 60.0)
    ledger.move(update, Phase.STAGING)
    update.num_commands = 1
    watch.when_received(update).result(timeout=30)
    assert rests[0] == watch_module.LEAST_POLL_S
    assert rests[:-1] == sorted(rests[:-1]) and rests[-2] == watch_module.POLL_S
    at = 0.0
    for seconds in rests:  # none is long beside what was waited before
        assert seconds <= max(watch_module.LEAST_POLL_S, at / 8 + 1e-9)
        at += seconds
    watch.close()


def test_ranks_of_this_process_are_not_looked_at_more_often(ranks):
    rests = []

    def rest(seconds):
        rests.append(seconds)
        time.sleep(0.001)

    ranks.are_here, ranks.rest = True, rest
    watch = UpdateMonitor(ranks, Ledger(), lambda *_: None)
    answer = watch.when_carried_out(1, 0.02)
    assert isinstance(answer.exception(timeout=30), DeadlineExceeded)
    assert {*rests} == {watch_module.POLL_S}
    watch.close()


def test_a_wait_ends_the_rest_of_a_thread_that_monitors_an_update(ranks):
    begins, ends = threading.Event(), threading.Event()

    def rest(seconds):
        begins.set()
        ends.wait(60.0 if seconds == watch_module.POLL_S else seconds)
        ends.clear()

    ranks.rest, ranks.wake = rest, ends.set
    ledger = Ledger()
    watch = UpdateMonitor(ranks, ledger, lambda *_: None)
    update, _ = ledger.start(StartUpdate("one"), 60.0)
    ledger.move(update, Phase.STAGING)
    update.num_commands = 1
    watch.start(update)
    assert begins.wait(30)
    ranks.statuses = lambda: [Status(1, "staging", orders=1)]
    watch.when_received(update).result(timeout=30)
    ends.set()
    watch.close()


def test_a_rejection_waits_for_those_of_other_ranks_up_to_a_limit(ranks, monkeypatch):
    assert watch_module.MORE_S <= 1

    def refusal(name: str) -> Status:
        error = WeightsMismatch(f"1 tensor; {name}", named={"missing": [name]})
        return Status(1, "failed", error=error.to_dict(), named=error.named)

    for late, more_s, causes in (
        (refusal("b"), 60.0, {"missing": 2}),
        (None, 0.0, {"missing": 1}),
    ):
        monkeypatch.setattr(watch_module, "MORE_S", more_s)
        posted = [refusal("a"), Status(1, "staging")]
        ranks.statuses = lambda posted=posted: posted
        ledger = Ledger()
        watch = UpdateMonitor(ranks, ledger, lambda *_: None)
        update, _ = ledger.start(StartUpdate("one"), 60.0)
        update.num_commands = 1
        ledger.move(update, Phase.STAGING)
        watch.start(update)
        answer = watch.when_staged(update)
        if late is not None:
            with pytest.raises(TimeoutError):
                answer.result(timeout=0.1)
            posted[1] = late
        error = answer.exception(timeout=60)
        assert isinstance(error, WeightsMismatch)
        assert error.causes == causes
        watch.close()


def test_a_cancelled_waiter_does_not_block_other_waiters(ranks):
    ledger = Ledger()
    watch = UpdateMonitor(ranks, ledger, lambda *_: None)
    update, _ = ledger.start(StartUpdate("one"), 60.0)
    ledger.move(update, Phase.STAGING)
    left, stays = watch.when_staged(update), watch.when_staged(update)
    assert left.cancel()
    watch.end(update, Cancelled("given up"))
    assert isinstance(stays.exception(timeout=30), Cancelled)
    assert watch.when_carried_out(1, 0.0).exception(timeout=30) is not None
    watch.close()


def test_waiters_are_answered_although_the_ranks_could_not_be_cancelled(ranks):
    def fail(serial):
        raise ValueError("the board is closed")

    ended, ledger = [], Ledger()
    ranks.cancel = fail
    watch = UpdateMonitor(ranks, ledger, lambda _, error: ended.append(error))
    update, _ = ledger.start(StartUpdate("one"), 0.1)
    ledger.move(update, Phase.STAGING)
    watch.start(update)
    answer = watch.when_staged(update)
    assert isinstance(answer.exception(timeout=30), DeadlineExceeded)
    assert [type(error) for error in ended] == [DeadlineExceeded]
    watch.close()
