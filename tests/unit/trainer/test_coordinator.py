"""A delivery: repeated until it is there, on every engine or on none."""

from __future__ import annotations

import math
import threading
import time

import pytest

from tests.support.trainers.fake_engine import (
    ABORT,
    DROP,
    FINISH,
    HELD_S,
    LOSE,
    PAGE,
    PREPARE,
    ROLLBACK,
    START,
    STARTING,
    STATUS,
    UPDATE,
    publisher,
    weights,
)
from tests.support.waiting import until
from tests.unit.trainer.conftest import noted, stopped_at_once
from vllm.inflight.errors import (
    EngineFault,
    EngineUnreachable,
    Forbidden,
    NoTransport,
    PauseConflict,
    Unauthorized,
    UpdateBusy,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher, coordinator, http_client
from vllm.inflight.trainer.http_client import HttpEngine
from vllm.inflight.trainer.retry import RetryBudget

pytestmark = pytest.mark.seconds


@pytest.mark.parametrize("fault", [DROP, LOSE, STARTING])
@pytest.mark.parametrize("path", [START, UPDATE, FINISH])
def test_a_call_whose_reply_is_lost_is_made_again_under_the_same_id(
    engine, path, fault
):
    engine.faults[path] = [fault, fault]
    with publisher(engine) as to:
        outcome = to.publish("v")
    assert len(engine.bodies(path)) == 3
    assert all(body == engine.bodies(path)[0] for body in engine.bodies(path))
    assert engine.bodies(path)[0]["update_id"] == outcome.update_id
    assert engine.version["epoch"] == 1, "it was committed more than once"


def test_a_call_that_is_not_answered_in_time_is_made_again(engine, monkeypatch):
    monkeypatch.setattr(http_client, "REPLY_S", 0.1)
    engine.held[START] = threading.Event()
    with publisher(engine) as to:
        future = to.publish(block=False)
        until(lambda: len(engine.bodies(START)) > 1)
        engine.held[START].set()
        assert future.result().epoch == 1
    assert len({body["update_id"] for body in engine.bodies(START)}) == 1


@pytest.mark.parametrize("timeout_s", [1e10, math.inf])
def test_a_publish_without_a_time_limit_still_gets_rejections(engine, timeout_s):
    engine.faults[FINISH] = [DROP]
    with publisher(engine, timeout_s=timeout_s) as to:
        assert to.publish("v").epoch == 1
        engine.faults[FINISH] = [PauseConflict("not now")]
        with pytest.raises(PauseConflict, match="not now"):
            to.publish("w")


def test_an_engine_that_is_not_there_is_named_when_patience_ends(engine):
    to = Publisher("http://127.0.0.1:9", weights(), timeout_s=0.3)
    with (
        to,
        pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9: no .* within 0\.3 s"),
    ):
        to.publish()


def lasted(publisher: Publisher, error: type[Exception]) -> tuple[float, Exception]:
    """Seconds until a publish was given up, and what it raised."""
    began = time.monotonic()
    with publisher as to, pytest.raises(error) as raised:
        to.publish()
    return time.monotonic() - began, raised.value


@pytest.mark.parametrize("timeout_s", [0.5, 1.5])
def test_a_publish_to_an_unreachable_server_fails_once_its_timeout_has_passed(
    timeout_s, monkeypatch
):
    asked = noted(monkeypatch, HttpEngine, "_ask")
    nobody = Publisher("http://127.0.0.1:9", weights(), timeout_s=timeout_s)
    seconds, error = lasted(nobody, EngineUnreachable)
    assert timeout_s <= seconds
    assert [call.args[1] for call in asked] == [START]
    assert str(error).count("no answer") == 1
    assert "abort" not in str(error)


@pytest.mark.parametrize("path", [START, UPDATE, FINISH])
def test_aborting_on_a_silent_engine_takes_at_most_a_quarter_of_the_timeout(
    engine, path, monkeypatch
):
    aborts = noted(monkeypatch, HttpEngine, "abort")
    engine.held[path] = engine.held[ABORT] = threading.Event()
    seconds, error = lasted(publisher(engine, timeout_s=2), EngineUnreachable)
    assert [call.args[-1].timeout_s for call in aborts] == [0.5]
    assert 2 <= seconds < HELD_S
    assert str(error).count("no answer") == 1
    assert f"{engine.url} did not answer when the update was to be" in str(error)
    engine.held[path].set()


def test_a_busy_engine_is_retried_until_the_timeout(engine, leaping):
    engine.begin_elsewhere()
    seconds, _ = lasted(publisher(engine, timeout_s=20), UpdateBusy)
    assert 20 - seconds <= sum(leaping) <= 20


def test_a_publish_to_a_busy_engine_ends_with_that_error(engine, leaping):
    """Also if the last try, with no time left, is not answered any more."""
    engine.begin_elsewhere()
    lasted(publisher(engine, timeout_s=20), UpdateBusy)
    num_tries = len(engine.bodies(START))
    engine.faults[START] = [UpdateBusy("elsewhere")] * (num_tries - 1) + [DROP] * 9
    lasted(publisher(engine, timeout_s=20), UpdateBusy)


def test_an_engine_that_becomes_unreachable_after_being_busy_is_reported_as_unreachable(
    engine,
):
    engine.faults[START] = [UpdateBusy("elsewhere"), *[DROP] * 99]
    lasted(publisher(engine, timeout_s=2), EngineUnreachable)


def test_an_engine_that_is_free_just_before_the_end_is_published_to(engine, leaping):
    # It is asked once more halfway to the end, and again halfway from there.
    engine.faults[START] = [UpdateBusy("elsewhere", retry_after_s=30)] * 2
    with publisher(engine, timeout_s=20) as to:
        assert to.publish().epoch == 1
    assert len(engine.bodies(START)) == 3


def test_a_reply_that_trickles_does_not_last_longer_than_the_patience(
    engine, monkeypatch
):
    """Each byte is in time, and all of them together are not."""
    engine.trickles = {UPDATE}
    looks = noted(monkeypatch, RetryBudget, "overdue_s")
    seconds, _ = lasted(publisher(engine, timeout_s=1), EngineUnreachable)
    assert stopped_at_once(looks, 0.5)
    assert seconds < 9  # it trickles for ten


def test_a_reply_that_is_not_vllms_is_not_retried(engine):
    engine.faults[START] = [PAGE]
    with publisher(engine) as to, pytest.raises(EngineFault, match="is this a vLLM"):
        to.publish()
    assert len(engine.bodies(START)) == 1


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (
            START,
            NoTransport("no weight transfer backend; see --weight-transfer-config"),
        ),
        (UPDATE, WeightsMismatch("2 tensors of the update", tensors=["a", "b"])),
        (FINISH, PauseConflict("use mode 'retract'")),
    ],
)
def test_an_engines_rejection_is_raised_and_nothing_stays_staged(engine, path, error):
    engine.faults[path] = [error]
    with publisher(engine) as to:
        with pytest.raises(type(error)) as raised:
            to.publish("v")
        assert engine.url in str(raised.value)
        assert error.message.split(": ")[-1] in str(raised.value)
        assert raised.value.tensors == error.tensors
        assert raised.value.__notes__ == [error.remedy]
        assert len(engine.bodies(path)) == 1, "it was tried again"
        assert engine.version["epoch"] == 0
        assert to.publish("w").epoch == 1, "the failed one is still in the way"


# -------------------------------------------------------------- several engines
def test_several_engines_serve_the_version_or_none_does(engine, other):
    with publisher([engine, other]) as to:
        outcome = to.publish("v")
    assert outcome.epochs == {engine.url: 1, other.url: 1}
    assert engine.served.keys() == other.served.keys() == weights().keys()


@pytest.mark.parametrize("path", [START, UPDATE])
def test_if_one_engine_cannot_stage_no_engine_commits(engine, other, path):
    other.faults[path] = [WeightsMismatch("not mine")]
    with publisher([engine, other]) as to:
        with pytest.raises(WeightsMismatch, match=other.url):
            to.publish("v")
        assert engine.bodies(FINISH) == other.bodies(FINISH) == []
        assert to.publish("w").epochs == {engine.url: 1, other.url: 1}


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"digest": "f" * 32}, ["f" * 32, "0" * 32]),
        ({"digest": None}, ["no known digest", "0" * 32]),
    ],
)
def test_engines_that_staged_different_weights_commit_nothing(
    engine, other, facts, named
):
    vars(other).update(facts)
    with publisher([engine, other]) as to:
        with pytest.raises(WeightsMismatch, match="different weights") as caught:
            to.publish("v")
        for name in (*named, engine.url, other.url):
            assert name in str(caught.value)
        for one in (engine, other):
            assert one.bodies(FINISH) == []
            assert one.version["weight_version"] == "default"
        other.digest = engine.digest
        assert to.publish("w").epochs == {engine.url: 1, other.url: 1}


@pytest.mark.parametrize("base", ["start", "others"])
def test_engines_without_a_digest_commit_on_top_of_equal_weights_only(
    engine, other, base
):
    engine.digest = other.digest = None
    other.base = base
    with publisher([engine, other]) as to:
        if base == engine.base:
            assert to.publish("v").epochs == {engine.url: 1, other.url: 1}
            return
        with pytest.raises(WeightsMismatch, match="on top of weights others"):
            to.publish("v")
        assert engine.bodies(FINISH) == other.bodies(FINISH) == []


def test_every_engine_has_voted_before_any_commits(engine, other):
    other.held[PREPARE] = threading.Event()
    with publisher([engine, other]) as to:
        future = to.publish("v", block=False)
        until(lambda: other.bodies(PREPARE))
        assert engine.bodies(FINISH) == other.bodies(FINISH) == []
        other.held[PREPARE].set()
        assert future.result().epochs == {engine.url: 1, other.url: 1}


def test_a_failed_commit_on_one_engine_rolls_the_others_back(engine, other):
    with publisher([engine, other]) as to:
        to.publish("good")
        other.faults[FINISH] = [PauseConflict("not now")]
        with pytest.raises(PauseConflict, match=other.url):
            to.publish("bad")
        assert engine.version["weight_version"] == "good"
        assert other.version["weight_version"] == "good"
        assert (len(engine.bodies(ROLLBACK)), len(other.bodies(ROLLBACK))) == (1, 0)
        to.publish("next")


@pytest.mark.parametrize("fault", [DROP, LOSE, STARTING])
def test_a_rollback_whose_reply_is_lost_is_not_made_twice(engine, other, fault):
    with publisher([engine, other]) as to:
        to.publish("good")
        other.faults[FINISH] = [PauseConflict("not now")]
        engine.faults[ROLLBACK] = [fault]
        with pytest.raises(PauseConflict, match="not now") as caught:
            to.publish("bad")
        assert "could not be taken back" not in str(caught.value)
        assert engine.version["weight_version"] == "good"
        assert len(engine.bodies(ROLLBACK)) == 1 + (fault != LOSE)


def test_a_later_version_of_another_trainer_is_not_rolled_back(
    engine, other, monkeypatch
):
    route = engine._route

    def routed(path, body):
        if path == ROLLBACK:  # it comes after they had a look at what is served
            engine.commit_elsewhere("theirs")
        return route(path, body)

    monkeypatch.setattr(engine, "_route", routed)
    with publisher([engine, other]) as to:
        to.publish("good")
        other.faults[FINISH] = [PauseConflict("not now")]
        with pytest.raises(PauseConflict, match="not now") as caught:
            to.publish("bad")
    assert "could not be taken back" not in str(caught.value)
    assert engine.version["weight_version"] == "theirs"
    assert len(engine.bodies(ROLLBACK)) == 1


def test_another_trainer_cannot_drop_the_rollback_target_during_a_commit(engine, other):
    theirs = publisher([engine, other], on_busy="skip")
    with publisher([engine, other]) as to, theirs:
        to.publish("good")
        other.faults[FINISH] = [PauseConflict("not now")]
        other.held[FINISH] = threading.Event()
        future = to.publish("bad", block=False)
        until(lambda: engine.version["weight_version"] == "bad")
        assert theirs.publish("theirs").skipped
        other.held[FINISH].set()
        with pytest.raises(PauseConflict, match="not now") as caught:
            future.result()
    assert "could not be taken back" not in str(caught.value)
    assert engine.version["weight_version"] == "good"


def test_engines_that_committed_roll_back_before_the_others_abort(
    engine, other, monkeypatch
):
    monkeypatch.setattr(coordinator, "GRACE_S", 20)
    route, freed = engine._route, []

    def routed(path, body):
        if path == ROLLBACK:
            freed.append(len(other.bodies(ABORT)))
        return route(path, body)

    monkeypatch.setattr(engine, "_route", routed)
    with publisher([engine, other]) as to:
        to.publish("good")
        other.faults[FINISH] = [PauseConflict("not now")]
        engine.delays[ABORT] = 0.5
        with pytest.raises(PauseConflict, match="not now"):
            to.publish("bad")
    assert freed == [0]


@pytest.mark.parametrize("refusal", [Unauthorized("no key"), Forbidden("wrong key")])
def test_a_forbidden_trainer_gets_one_error_without_retries(engine, refusal):
    engine.faults[START] = [refusal]
    engine.faults[ABORT] = [refusal]
    with publisher(engine) as to, pytest.raises(type(refusal)) as caught:
        to.publish("v")
    assert str(caught.value) == f"{engine.url}: {refusal.message}"


def test_a_failed_undo_is_reported(engine, other):
    with publisher([engine, other]) as to:
        other.faults[FINISH] = [PauseConflict("not now")]
        engine.faults[ROLLBACK] = [EngineFault("stuck")]
        with pytest.raises(PauseConflict, match=r"could not be taken back: stuck"):
            to.publish("bad")


def test_a_publish_starts_on_no_engine_until_every_engine_is_free(engine, other):
    other.begin_elsewhere()
    with publisher([engine, other]) as to:
        future = to.publish(block=False)
        until(lambda: len(other.bodies(STATUS)) > 1)
        assert engine.bodies(START) == []
        other.end_elsewhere()
        assert future.result().epochs == {engine.url: 1, other.url: 1}


def came_since(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


def test_a_publish_that_is_given_up_calls_no_engine_any_more(engine, other):
    def stop(phase, *_):
        if phase == "transfer":
            raise KeyError("stop")

    engine.held[UPDATE] = threading.Event()
    other.faults[UPDATE] = [DROP] * 100
    before = set(threading.enumerate())
    with publisher([engine, other], timeout_s=60, progress=stop) as to:
        with pytest.raises(KeyError):
            to.publish()
        engine.held[UPDATE].set()
        # An exit would wait for whatever still calls.
        until(lambda: not any("Pool" in t.name for t in came_since(before)))


def test_the_abort_of_the_last_try_gets_the_same_time_as_the_first(engine, leaping):
    engine.faults[START] = [UpdateBusy("elsewhere", retry_after_s=16.5)]
    engine.held[UPDATE] = threading.Event()
    with publisher(engine, timeout_s=20) as to:
        future = to.publish(block=False)
        until(lambda: engine.bodies(UPDATE) or future.done())
        engine.delays[ABORT] = 4.5  # more than is left for the last try
        with pytest.raises(EngineUnreachable, match="within") as caught:
            future.result()
        assert "could not be taken back" not in str(caught.value)
