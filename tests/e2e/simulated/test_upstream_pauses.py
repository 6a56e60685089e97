"""Pauses that are asked of the engine core itself, as vLLM's clients do from 0.33 on.

vLLM then rejects new requests of a pause that ends or drains the running ones, until
decoding goes on. Here such a pause has an owner and a lease like any other.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, call, prompt, request
from tests.support.simulated.load import ask, code, started
from vllm.inflight.errors import OwnedByAnother, PauseConflict

# Before 0.33, the core has no such call.
pytestmark = [pytest.mark.engine, pytest.mark.since("0.33.0")]


def said(core: Any, name: str) -> None:
    """A request, on the way that it takes from a client."""
    made = core.preprocess_add_request(request(name, prompt(9), max_tokens=4))
    core.input_queue.put_nowait((EngineCoreRequestType.ADD, made))


def errors(core: Any) -> dict[str, str]:
    """The requests that one round of the core rejects, and the code of each."""
    outputs = [output for group in core.round() for output in group.outputs]
    return {o.request_id: o.error.code for o in outputs if o.error is not None}


@pytest.mark.parametrize(
    ("mode", "ours"), [("abort", "abort"), ("wait", "wait"), ("keep", "in_place")]
)
def test_a_pause_of_the_core_is_one_of_ours(
    core: EngineCore, mode: str, ours: str
) -> None:
    streams = started(core)
    done = core.pause_generation(mode, False)
    assert call(core, "paused")["mode"] == ours
    streams.step(60)
    assert done is None or (done.done() and done.result() is None)
    assert call(core, "resume")["paused"] is False
    ended = set(streams.run().finished.values())
    assert ended == ({"abort"} if mode == "abort" else {"length"})


def test_a_pause_that_keeps_requests_and_clears_the_cache_retracts_them(
    core: EngineCore,
) -> None:
    streams = started(core)
    core.pause_generation("keep", True)
    streams.step(60)
    assert call(core, "paused")["mode"] == "retract"
    call(core, "resume")
    assert set(streams.run().finished.values()) == {"length"}


def test_a_pause_of_the_core_respects_the_mode_in_force(core: EngineCore) -> None:
    started(core)
    ask(core, "pause", mode="retract")
    with pytest.raises(PauseConflict):
        core.pause_generation("wait", False)
    assert core.reject_new_requests is False


def test_a_pause_of_the_core_is_leased_and_may_be_taken_over(core: EngineCore) -> None:
    core.pause_generation("wait", False)
    assert call(core, "paused")["owner"] is None
    call(core, "pause", mode="abort", owner="me")
    refused = core.inflight("resume", {"owner": "you"})
    assert code(refused) == OwnedByAnother.code
    assert call(core, "resume", owner="me")["paused"] is False


@pytest.mark.parametrize("ends", ["resume", "lease"])
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_new_requests_are_rejected_until_the_pause_ends_in_whatever_way(
    core: EngineCore, mode: str, ends: str
) -> None:
    core.pause_generation(mode, False)
    said(core, "early")
    assert errors(core) == {"early": "engine_paused"}
    if ends == "resume":
        call(core, "resume")
    else:
        core.vllm_inflight.pauses._expire()
    said(core, "late")
    assert errors(core) == {}
    assert Streams(core).run().finished == {"late": "length"}


def test_requests_of_other_pauses_are_queued(core: EngineCore) -> None:
    call(core, "pause", mode="wait")
    said(core, "queued")
    assert errors(core) == {}
    call(core, "resume")
    assert Streams(core).run().finished == {"queued": "length"}


def test_a_call_that_fails_after_the_pause_began_fails_for_its_caller(
    core: EngineCore,
) -> None:
    started(core)
    done = core.pause_generation("wait", False)
    assert isinstance(done, Future)
    call(core, "resume")
    with pytest.raises(PauseConflict, match="went on before the pause took effect"):
        done.result(timeout=0)


def test_the_watchdog_times_each_call_alone(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils import watch_dog

    events: list[str] = []

    class Watching(watch_dog.NoopWatchDog):
        def feed(self) -> None:
            events.append("fed")

    monkeypatch.setattr(watch_dog, "_watch_dog", Watching())
    flip: Callable[[], None] = lambda: events.append("flip")  # noqa: E731
    core.vllm_inflight.step_queue.submit(flip)
    core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    core._process_input_queue()
    assert events[:3] == ["fed", "flip", "fed"]
