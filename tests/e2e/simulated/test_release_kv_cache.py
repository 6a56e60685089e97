"""The KV cache of two engines is released, when one has released its own before."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from vllm.inflight.api.compat.queries import release_kv_cache
from vllm.inflight.errors import EngineFault, PauseConflict


class FrontEnd:
    """Of two cores, each of which answers for itself."""

    def __init__(self, cores: list[Any]) -> None:
        self.cores, self.core_engines = cores, [b"0", b"1"]
        self.engine_core = self
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._between)
        self.between: Any = lambda: None
        """What happens when both are paused."""

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[Any]:
        answers = [core.inflight(method, dict(body)) for core in self.cores]
        return [a.result(timeout=30) if isinstance(a, Future) else a for a in answers]

    def ensure_alive(self) -> None:
        """They are."""

    async def sleep(self, level: int, mode: str) -> None:
        for core in self.cores:
            core.sleep(level, mode)

    async def wake_up(self, tags: list[str]) -> None:
        for core in self.cores:
            core.wake_up(tags)

    async def _between(self) -> None:
        self.between()


@pytest.fixture
def front_end(cores: list[Any]) -> FrontEnd:
    return FrontEnd(cores)


def release(front_end: FrontEnd) -> None:
    asyncio.run(release_kv_cache(front_end))


def asleep(front_end: FrontEnd) -> list[set[str]]:
    return [core.model_executor.sleeping_tags for core in front_end.cores]


def decodes(core: Any) -> bool:
    add(core, "after", prompt(6), max_tokens=4)
    return len(Streams(core).run().tokens["after"]) == 4


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_engine_has_released_the_other_releases_too(
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
def test_one_that_cannot_is_named_though_the_other_has_released(
    front_end: FrontEnd, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the driver says no")

    second = front_end.cores[1 - first]
    front_end.between = front_end.cores[first].release_kv_cache_memory
    monkeypatch.setattr(second, "release_kv_cache_memory", fail)
    with pytest.raises(EngineFault, match=f"engine {1 - first} of 2: .*driver says no"):
        release(front_end)
    assert asleep(front_end) == [set()] * 2
    assert all(decodes(core) for core in front_end.cores)


def test_a_request_that_came_to_one_has_the_release_of_both_undone(
    front_end: FrontEnd,
) -> None:
    def come_and_go() -> None:
        add(front_end.cores[1], "late", prompt(7))
        front_end.cores[1].abort_requests(["late"])

    for core in front_end.cores:
        call(core, "pause", mode="retract", owner="trainer")
    front_end.between = come_and_go
    with pytest.raises(PauseConflict, match=r"engine 1 of 2: .*Call again"):
        release(front_end)
    assert asleep(front_end) == [set()] * 2
    for core in front_end.cores:
        state = call(core, "paused")
        assert (state["mode"], state["owner"]) == ("retract", "trainer")
        assert call(core, "rest") == {"is_paused": True, "ends_on_waking": False}
        call(core, "resume", owner="trainer")
        assert decodes(core)
