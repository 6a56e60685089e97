"""SGLang's release of the KV cache alone, and what becomes of one that is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.engines.core_door import Door

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


def failing(*_: Any) -> None:
    raise RuntimeError("the driver says no")


def decodes(door: Door) -> bool:
    add(door.core, "after", prompt(6), max_tokens=4)
    return len(Streams(door.core).run().tokens.get("after", [])) == 4


def test_repeated_releases_of_the_kv_cache_release_it_once(
    sleeper: Door,
) -> None:
    for message in ("the KV cache is asleep", "asleep already"):
        assert sleeper.post(RELEASE, **KV)["message"] == message
        assert sleeper.core.model_executor.sleeping_tags == {"kv_cache"}
    sleeper.post(RESUME, **KV)
    assert decodes(sleeper)


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_a_pause_from_before_outlives_a_release_that_fails(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(CPUWorker, "discard", failing)
    sleeper.post("/pause_generation", mode=mode)
    assert sleeper.refused(RELEASE, **KV)[0] == 500
    assert sleeper.get("/is_paused")["mode"] == mode
    sleeper.post("/continue_generation")
    assert decodes(sleeper)


def test_a_pause_of_upstreams_own_outlives_a_release_that_fails(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUWorker, "discard", failing)
    sleeper.core.pause_scheduler("abort")
    assert sleeper.refused(RELEASE, **KV)[0] == 500
    assert sleeper.get("/is_paused")["is_paused"] is True
    sleeper.post("/continue_generation")
    assert decodes(sleeper)


def test_a_failed_release_is_reported_and_leaves_the_engine_awake(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUWorker, "discard", failing)
    status, message = sleeper.refused(RELEASE, **KV)
    assert (status, "the driver says no" in message) == (500, True)
    assert sleeper.get("/is_paused")["is_paused"] is False
    assert decodes(sleeper)


def test_a_release_while_asleep_changes_nothing(
    sleeper: Door,
) -> None:
    sleeper.post(RELEASE)
    add(sleeper.core, "queued", prompt(6), max_tokens=4)
    assert sleeper.post(RELEASE, **KV)["message"] == "asleep already"
    sleeper.post(RESUME)
    assert len(Streams(sleeper.core).run().tokens["queued"]) == 4
