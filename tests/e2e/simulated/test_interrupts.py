"""Ctrl-C, twice, in a commit of an engine that steps in its caller's process.

Whatever it comes into, what is told of the weights is what the ranks serve.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import publish_weights, stage_weights
from tests.support.simulated.worker import SimulatedExecutor
from vllm.inflight.engine.update.journal import Journal

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def interrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def core(make: Any) -> EngineCore:
    core: EngineCore = make(kind=EngineCore)
    return core


def in_a_turn(core: EngineCore, method: str, **body: Any) -> None:
    """What a front end of the same process does."""
    controller = core.vllm_inflight
    controller.step_queue.run(lambda: controller.call_by_name(method, body))


def twice(original: Any) -> Any:
    """The same, and Ctrl-C comes twice before and twice after it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        answer = original(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return answer

    return call


def told(core: EngineCore) -> tuple[str, int, str | None]:
    info = call(core, "info")
    before = info["previous"] and info["previous"]["weight_version"]
    return info["weight_version"], core.model_executor.live, before


@pytest.mark.parametrize(
    ("owner", "name"),
    [(SimulatedExecutor, "_inflight_flip"), (Journal, "note")],
)
@pytest.mark.parametrize("method", ["commit", "rollback"])
def test_a_switch_interrupted_by_ctrl_c_completes_before_the_interrupt_is_raised(
    core: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    method: str,
) -> None:
    publish_weights(core, 1, "one")
    if method == "commit":
        stage_weights(core, 2)
        body, expected = {"weight_version": "two"}, ("two", 2, "one")
    else:
        publish_weights(core, 2, "two")
        body, expected = {}, ("one", 1, "two")
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, twice(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            in_a_turn(core, method, **body)
    assert told(core) == expected
    assert call(core, "status")["active"] is None
    add(core, "r", prompt(1), max_tokens=4)
    assert set(Streams(core).run().stamps["r"]) == {expected[0]}


def test_a_switch_that_fails_after_the_flip_is_undone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_weights(core, 1, "one")
    before = told(core)
    stage_weights(core, 2)

    def break_off(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "note", break_off)
    with pytest.raises(KeyboardInterrupt):
        in_a_turn(core, "commit", weight_version="two")
    # The second set holds the new version still, so what it held before is gone.
    assert told(core)[:2] == before[:2]
    assert call(core, "status")["active"]["phase"] == "staged"
    call(core, "commit", weight_version="two")
    assert told(core) == ("two", 2, "one")


def test_a_switch_that_cannot_be_undone_ends_the_engine(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(SimulatedExecutor):
        """Flips once, and never back."""

        num_flips = 0

        def _inflight_flip(self, *args: Any) -> Any:
            self.num_flips += 1
            if self.num_flips > 1:
                return {"error": "the test says so"}
            return super()._inflight_flip(*args)

    core = make(executor=Once, kind=EngineCore)
    stage_weights(core, 2)

    def break_off(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "note", break_off)
    for _ in range(2):  # and no step is taken after that
        with pytest.raises(SystemExit, match="could not be undone"):
            in_a_turn(core, "commit", weight_version="two")


def test_an_interrupted_pause_leaves_the_engine_running(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was not interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(type(core.vllm_inflight), "drain", stand)
        with pytest.raises(KeyboardInterrupt):
            in_a_turn(core, "pause", mode="in_place")
    assert call(core, "paused")["is_paused"] is False
