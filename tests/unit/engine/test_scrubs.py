"""When an engine scrubs what it serves, and for how long a result holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waiting import until
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.integrity import scrubs
from vllm.inflight.engine.integrity.scrubs import Scrubs
from vllm.inflight.errors import EngineAsleep, UpdateBusy

FOUND = {
    key: b"" for key in ("expected", "numel", "owners", "parts", "sums", "covered")
}


class Turns:
    """Those of an engine that takes none.

    Attributes:
        then: called after each.

    """

    def __init__(self) -> None:
        self.then: Callable[[], None] = lambda: None

    def run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            self.then()


class Engine:
    """A controller, its ranks and what it serves, in one.

    Attributes:
        num_begun: scrubs that were begun.
        wrong: parameters that are not as they were staged.
        lays: whether a rank works out where things are.
        may_decode: whether all memory is awake.
        weights_sleep: whether the weights are not.
        is_loading: whether a reload of the weights is under way.

    """

    def __init__(self) -> None:
        self.step_queue, self.in_process = Turns(), True
        self.ranks = self.sleep = self.live_version = self
        self.version = SimpleNamespace(label="one", epoch=1, digest="d")
        self.changes = 1
        self.wrong: list[str] = []
        self.lays = False
        self.may_decode = True
        self.weights_sleep = False
        self.is_loading = False
        self.num_begun = 0
        self.goes_on = threading.Event()
        self._read = 0

    def require_staging(self) -> None:
        """It has a second set."""

    def check_weights(self, *, is_whole: bool) -> None:
        if self.weights_sleep:
            raise EngineAsleep("the weights are asleep")
        if self.is_loading:
            raise UpdateBusy("a reload is under way")

    def scrub(self, move: str) -> list[Any]:
        if move == "begin":
            if self.lays:
                return [None]
            self.num_begun, self._read = self.num_begun + 1, self.changes
            return [1]
        if self._read != self.changes:
            return [None]
        return [
            FOUND
            | {"names": [], "wrong": self.wrong, "unknown": [], "num_marked": 1}
            | {"inexact": [], "marks": {}}
        ]

    def scrub_slice(self) -> None:
        self.goes_on.wait(30)

    def commit(self, label: str) -> Any:
        epoch = self.version.epoch + 1
        self.version = SimpleNamespace(label=label, epoch=epoch, digest="d")
        self.changes += 1
        return SimpleNamespace(num_replayed=0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = SimpleNamespace(scrub_interval_s=0, verify="served")
    monkeypatch.setattr(InflightConfig, "of", lambda _: config)
    monkeypatch.setattr(scrubs, "PAUSE_S", 0.0)
    scrub = Scrubs(SimpleNamespace(vllm_config=None), engine)
    yield scrub
    engine.goes_on.set()
    scrub.close()


def test_a_commit_during_a_scrub_is_scrubbed_as_well(engine: Engine, made: Scrubs):
    made.committed(engine.commit("two"))
    until(lambda: engine.num_begun == 1)
    made.committed(engine.commit("three"))
    engine.goes_on.set()
    until(lambda: made.last is not None and made.last["weight_version"] == "three")
    assert made.results["equal"] >= 1


def test_a_scrub_that_is_due_waits_for_ranks_that_are_not_ready(
    engine: Engine, made: Scrubs
):
    engine.goes_on.set()
    engine.lays = True
    made.committed(engine.commit("two"))
    asked: Future[Any] = made.verify()
    assert not asked.done()
    engine.lays = False
    assert asked.result(30)["weight_version"] == "two"


@pytest.mark.parametrize("weights_sleep", [True, False])
def test_a_scrub_that_is_due_comes_when_all_memory_is_awake(
    engine: Engine, made: Scrubs, weights_sleep: bool
):
    engine.may_decode, engine.weights_sleep = False, weights_sleep
    made.committed(engine.commit("two"))
    until(lambda: made._thread is None)
    assert engine.num_begun == 0
    engine.goes_on.set()
    engine.may_decode, engine.weights_sleep = True, False
    made.woken()
    until(lambda: made.last is not None)
    assert engine.num_begun == 1
    made.woken()
    until(lambda: made._thread is None)
    assert engine.num_begun == 1, "nothing was put off since"


def test_a_wake_up_right_after_the_turn_that_met_the_sleep_is_not_missed(
    engine: Engine, made: Scrubs
):
    engine.goes_on.set()
    engine.may_decode = False

    def wake() -> None:
        engine.step_queue.then = lambda: None
        engine.may_decode = True
        made.woken()

    engine.step_queue.then = wake
    made.committed(engine.commit("two"))
    until(lambda: made.last is not None)


def test_a_scrub_that_is_due_comes_after_a_reload(
    engine: Engine, made: Scrubs, caplog: pytest.LogCaptureFixture
):
    engine.goes_on.set()
    engine.is_loading = True
    made.committed(engine.commit("two"))
    until(lambda: made._thread is None)
    assert engine.num_begun == 0
    engine.is_loading = False
    made.woken()
    until(lambda: made.last is not None)
    assert "could not be scrubbed" not in caplog.text


def test_a_caller_gets_a_scrub_of_weights_that_are_awake_alone(
    engine: Engine, made: Scrubs
):
    engine.goes_on.set()
    engine.may_decode = False
    assert made.verify().result(30)["result"] == "equal"
    engine.weights_sleep = True
    with pytest.raises(EngineAsleep):
        made.verify().result(30)
    made.woken()
    assert engine.num_begun == 1


def test_a_rename_keeps_the_result_of_a_scrub(engine: Engine, made: Scrubs):
    engine.goes_on.set()
    engine.wrong = ["a.weight"]
    made.verify().result(30)
    assert "a.weight" in (made.detail or "")
    engine.version = SimpleNamespace(label="renamed", epoch=9, digest="d")
    assert "a.weight" in (made.detail or "")
    engine.commit("next")
    assert made.detail is None
