"""Memory that two engines release: both do, or neither does."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from vllm.inflight.api.control.methods import release_memory
from vllm.inflight.errors import EngineFault, PauseConflict

pytestmark = pytest.mark.since("0.31.0")  # before, it is released with the weights


class FrontEnd:
    """Of two cores, each of which answers for itself."""

    def __init__(self, cores: list[Any]) -> None:
        self.cores, self.core_engines = cores, [b"0", b"1"]
        self.engine_core = self
        model = SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(model_config=model)

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[Any]:
        answers = [core.inflight(method, dict(body)) for core in self.cores]
        return [a.result(timeout=30) if isinstance(a, Future) else a for a in answers]

    def ensure_alive(self) -> None:
        """They are."""

    async def wake_up(self, tags: list[str]) -> None:
        for core in self.cores:
            core.wake_up(tags)


@pytest.fixture
def front_end(cores: list[Any]) -> FrontEnd:
    return FrontEnd(cores)


def release(front_end: FrontEnd, mode: str | None = None) -> Any:
    return asyncio.run(release_memory(front_end, {"kv_cache"}, mode))


def asleep(front_end: FrontEnd) -> list[set[str]]:
    return [core.model_executor.sleeping_tags for core in front_end.cores]


def decodes(core: Any) -> bool:
    add(core, "after", prompt(6), max_tokens=4)
    return len(Streams(core).run().tokens["after"]) == 4


@pytest.mark.parametrize("first", [0, 1])
def test_a_release_includes_the_engine_that_has_not_released_yet(
    front_end: FrontEnd, first: int
) -> None:
    front_end.cores[first].sleep(0)
    front_end.cores[first].release_kv_cache_memory()
    for _ in range(2):
        release(front_end)
        assert asleep(front_end) == [{"kv_cache"}] * 2
    asyncio.run(front_end.wake_up(["kv_cache"]))
    assert all(decodes(core) for core in front_end.cores)


@pytest.mark.parametrize("first", [0, 1])
def test_a_failed_release_names_the_failing_engine_and_is_undone_on_the_other(
    front_end: FrontEnd, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the driver says no")

    second = front_end.cores[1 - first]
    monkeypatch.setattr(second.model_executor, "discard", fail)
    for core in front_end.cores:
        add(core, "kept", prompt(3), max_tokens=20)
        Streams(core).step(4)
    with pytest.raises(EngineFault, match=f"engine {1 - first} of 2: .*driver says no"):
        release(front_end, "retract")
    assert asleep(front_end) == [set()] * 2
    for core in front_end.cores:
        assert len(Streams(core).run().tokens["kept"]) >= 16
        assert decodes(core)


def test_undo_release_undoes_only_the_release_with_its_id(front_end: FrontEnd) -> None:
    core, other = front_end.cores
    call(core, "release", tags=["kv_cache"], release_id="first")
    call(core, "undo_release", release_id="second")
    assert asleep(front_end) == [{"kv_cache"}, set()]
    call(core, "undo_release", release_id="first")
    assert asleep(front_end) == [set()] * 2
    assert decodes(core) and decodes(other)


def test_no_engine_releases_its_kv_cache_if_one_cannot_keep_a_request(
    front_end: FrontEnd,
) -> None:
    for core in front_end.cores:
        call(core, "pause", mode="retract", owner="trainer")
    first, second = front_end.cores
    call(second, "resume")
    add(second, "runs", prompt(7), max_tokens=20)
    Streams(second).step(4)
    call(second, "pause", mode="in_place")
    with pytest.raises(PauseConflict, match=r"engine 1 of 2: .*use mode 'retract'"):
        release(front_end)
    assert asleep(front_end) == [set()] * 2
    state = call(first, "paused")
    assert (state["mode"], state["owner"]) == ("retract", "trainer")
    call(first, "resume", owner="trainer")
    call(second, "resume")
    assert all(decodes(core) for core in front_end.cores)
