"""SGLang's release of the KV cache alone, and what becomes of one that is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.engines.core_door import CoreClient, Door
from tests.support.waiting import until

pytestmark = pytest.mark.engine

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
KV = {"tags": ["kv_cache"]}


@pytest.fixture
def sleeper(door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """A server that may sleep, and is awake in the end."""
    monkeypatch.setattr(door.core.vllm_config.model_config, "enable_sleep_mode", True)
    # The CPU build's gives nothing back in a sleep, and refuses this.
    monkeypatch.setattr(CPUWorker, "discard", lambda *_: None)
    yield door
    door.core.wake_up()


def interrupted(monkeypatch: pytest.MonkeyPatch, by: Any) -> None:
    """Have something happen between upstream's two calls."""

    async def between(self: CoreClient) -> None:
        by(self.core)

    monkeypatch.setattr(CoreClient, "clear_mm_cache_async", between)


def come_and_go(core: EngineCore) -> None:
    add(core, "late", prompt(7))
    core.abort_requests(["late"])


def go_on(core: EngineCore) -> None:
    call(core, "resume")


def decodes(door: Door) -> bool:
    add(door.core, "after", prompt(6), max_tokens=4)
    return len(Streams(door.core).run().tokens.get("after", [])) == 4


def test_the_kv_cache_is_released_once_however_often_it_is_asked_for(
    sleeper: Door,
) -> None:
    for _ in range(2):
        assert sleeper.post(RELEASE, **KV)["message"] == "the KV cache is asleep"
        assert sleeper.core.model_executor.sleeping_tags == {"kv_cache"}
    sleeper.post(RESUME, **KV)
    assert decodes(sleeper)


@pytest.mark.parametrize("by", [come_and_go, go_on])
def test_what_comes_in_between_has_the_release_refused_and_pauses_nothing(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch, by: Any
) -> None:
    interrupted(monkeypatch, by)
    status, message = sleeper.refused(RELEASE, **KV)
    assert (status, "Call again" in message) == (409, True)
    assert sleeper.get("/is_paused")["is_paused"] is False
    assert sleeper.core.vllm_inflight.sleep.is_paused_by_sleep is False
    assert decodes(sleeper)


@pytest.mark.parametrize("is_doze", [True, False])
def test_a_pause_from_before_outlives_a_release_that_is_refused(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch, is_doze: bool
) -> None:
    if is_doze:
        sleeper.core.sleep(level=0)
    else:
        sleeper.post("/pause_generation", mode="abort")
    interrupted(monkeypatch, come_and_go)
    assert sleeper.refused(RELEASE, **KV)[0] == 409
    assert sleeper.get("/is_paused")["is_paused"] is True
    sleeper.post("/continue_generation")
    assert decodes(sleeper)


def test_a_pause_with_a_lease_ends_with_it_after_a_release_that_is_refused(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.post("/pause_generation", mode="in_place", lease_s=60)
    interrupted(monkeypatch, come_and_go)
    assert sleeper.refused(RELEASE, **KV)[0] == 409
    assert sleeper.get("/is_paused")["mode"] == "in_place"
    sleeper.post("/pause_generation", mode="in_place", lease_s=0.05)

    def is_going() -> bool:
        sleeper.core.vllm_inflight.step_queue.drain()  # as before a step
        return not sleeper.core.is_scheduler_paused()

    until(is_going, "the lease has run out, and it stands still")
    assert decodes(sleeper)


def test_a_pause_of_upstreams_own_outlives_a_release_that_is_refused(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.core.pause_scheduler("abort")
    interrupted(monkeypatch, come_and_go)
    assert sleeper.refused(RELEASE, **KV)[0] == 409
    assert sleeper.get("/is_paused")["is_paused"] is True
    sleeper.post("/continue_generation")
    assert decodes(sleeper)


def test_a_release_that_fails_is_told_and_leaves_the_engine_awake(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("the driver says no")

    monkeypatch.setattr(CPUWorker, "discard", failing)
    status, message = sleeper.refused(RELEASE, **KV)
    assert (status, "the driver says no" in message) == (500, True)
    assert sleeper.get("/is_paused")["is_paused"] is False
    assert decodes(sleeper)


def test_under_sleeping_weights_a_release_is_refused_with_nothing_changed(
    sleeper: Door,
) -> None:
    sleeper.post(RELEASE)
    add(sleeper.core, "queued", prompt(6), max_tokens=4)
    status, message = sleeper.refused(RELEASE, **KV)
    assert (status, "the weights are asleep" in message) == (409, True)
    sleeper.post(RESUME)
    assert len(Streams(sleeper.core).run().tokens["queued"]) == 4
