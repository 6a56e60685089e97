"""Pictures are seen by the tower of the version that a request begins under."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.mixtures import mixed, part
from tests.support.engines.pictures import described
from tests.support.engines.probe import greedy
from tests.support.models.seeing import SEEING
from tests.support.models.tiny_vision import make_seeing
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of

pytestmark = pytest.mark.engine

TOWER = SEEING["blip2"].tower


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("old"), 0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("new"), 1)


@pytest.fixture(scope="module")
def fresh(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[int]]:
    """What an engine says that has the old weights, and the new tower."""
    folder = mixed(old, new, TOWER, tmp_path_factory.mktemp("mixed"))
    return described(start(folder))


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    return start(old)


def encoded(llm: Any) -> set[str]:
    """The names under which encoder outputs are kept."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return set(scheduler.encoder_cache_manager.cached)


def test_a_picture_seen_before_is_seen_with_the_new_tower(
    llm: Any, fresh: list[list[int]], new: Path, tmp_path: Path
) -> None:
    before, text = described(llm), greedy(llm)
    assert before != fresh
    tower = part(new, TOWER, tmp_path / "tower")
    for _ in range(2):
        llm.update_weights_from_disk(tower, "tower", subset=TOWER)
        assert described(llm) == fresh
        llm.rollback_weights()
        assert described(llm) == before
    assert greedy(llm) == text


def test_encoder_outputs_are_dropped_at_commits_and_retractions(
    llm: Any, new: Path
) -> None:
    described(llm)
    seen = encoded(llm)
    assert len(seen) == 3
    llm.update_weights_from_disk(str(new), "new")
    assert not encoded(llm)
    described(llm)
    assert len(encoded(llm)) == 3 and seen.isdisjoint(encoded(llm))
    run_sync(control_of(llm).pause(mode="retract"))
    assert not encoded(llm)
    run_sync(control_of(llm).resume())


def test_pictures_the_front_end_remembers_are_there_after_a_commit_that_flushes(
    llm: Any, old: Path
) -> None:
    before = described(llm)
    told = llm.update_weights_from_disk(str(old), "same", flush_cache=True)
    assert told["dropped"] is not None
    assert described(llm) == before
