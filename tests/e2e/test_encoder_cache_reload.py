"""Upstream's reload drops encoder outputs, and requests compute them again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_media import encoded
from tests.support.engines.bare_core import call
from tests.support.engines.pictures import SAMPLING, described
from tests.support.models.seeing import SEEING
from tests.support.models.tiny_vision import make_seeing, picture
from vllm.inflight.engine.scheduling.encoder_cache import readers
from vllm.inflight.errors import PauseConflict

pytestmark = pytest.mark.engine

SMALL_STEPS = {"max_num_seqs": 2, "max_num_batched_tokens": 3}
"""A picture is of four tokens."""
MOST_STEPS = 200


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("old"), 0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("new"), 1)


@pytest.fixture(scope="module", params=["versioned", "shared"])
def engine(request: pytest.FixtureRequest, start: Callable[..., Any], old: Path) -> Any:
    policy = {"inflight": {"prefix_cache": request.param}}
    return start(old, additional_config=policy, **SMALL_STEPS)


def reload(llm: Any, folder: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def look(llm: Any, name: str) -> Any:
    """Step until a request is in the middle of its picture; its scheduler."""
    seeing = SEEING["blip2"]
    seen = {"image": picture(7, seeing.side)}
    prompt = {"prompt": seeing.prompt, "multi_modal_data": seen}
    llm.llm_engine.add_request(name, prompt, SAMPLING)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for _ in range(MOST_STEPS):
        if readers(scheduler):
            return scheduler
        llm.llm_engine.step()
    raise AssertionError("nobody looks at a picture")


def finish(llm: Any) -> dict[str, list[int]]:
    done = {}
    for _ in range(MOST_STEPS):
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        if not llm.llm_engine.has_unfinished_requests():
            return done
    raise AssertionError("requests did not finish")


def test_a_request_recomputes_the_output_of_a_half_read_picture_after_a_reload(
    llm: Any, old: Path, new: Path
) -> None:
    reload(llm, new)
    look(llm, "expected")
    expected = finish(llm)["expected"]
    reload(llm, old)
    scheduler = look(llm, "half")
    reload(llm, new)
    assert not readers(scheduler) and not encoded(llm)
    assert finish(llm) == {"half": expected}


def test_requests_without_media_are_not_retracted(llm: Any, new: Path) -> None:
    llm.llm_engine.add_request("reads", "a text", SAMPLING)
    llm.llm_engine.step()
    scheduler = look(llm, "looks")
    reload(llm, new)
    assert [r.request_id.split("-")[0] for r in scheduler.running] == ["reads"]
    assert set(finish(llm)) == {"reads", "looks"}


def test_pictures_seen_before_are_seen_with_what_was_reloaded(
    llm: Any, old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(new), "new", flush_cache=True)
    expected = described(llm)
    llm.update_weights_from_disk(str(old), "old", flush_cache=True)
    before = described(llm)
    assert before != expected
    reload(llm, new)
    llm.reset_prefix_cache()
    assert described(llm) == expected


def test_a_session_in_the_middle_of_a_picture_rejects_a_reload(
    llm: Any, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = look(llm, "session")
    told = call(llm.llm_engine.engine_core.engine_core, "info")
    (request,) = scheduler.running
    monkeypatch.setattr(request, "streaming_queue", [])
    with pytest.raises(PauseConflict, match=r"session.*streaming session.*done"):
        reload(llm, new)
    assert call(llm.llm_engine.engine_core.engine_core, "info") == told
    monkeypatch.undo()
    assert len(finish(llm)["session"]) == SAMPLING.max_tokens


def test_a_write_ends_a_session_in_the_middle_of_a_picture_and_no_other_request(
    llm: Any, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload(llm, old)
    llm.llm_engine.add_request("reads", "a text", SAMPLING)
    llm.llm_engine.step()
    scheduler = look(llm, "session")
    running = {r.request_id.split("-")[0]: r for r in scheduler.running}
    monkeypatch.setattr(running["session"], "streaming_queue", [])
    llm.collective_rpc(write)
    assert not readers(scheduler) and not encoded(llm)
    ended = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            ended[output.request_id] = output.outputs[0]
    assert ended["session"].finish_reason == "abort"
    assert "in a streaming session" in ended["session"].stop_reason
    assert len(ended["reads"].token_ids) == SAMPLING.max_tokens


@torch.no_grad()
def write(worker: Any) -> None:
    """Write into the live weights by hand; their values do not change."""
    for parameter in worker.model_runner.model.parameters():
        parameter.copy_(parameter.clone())


def preempted_at_a_commit(
    llm: Any, new: Path, num_before: int, *, is_shared: bool
) -> list[int]:
    """What a request says that has lost its KV when the weights change in place.

    Args:
        llm: the engine, on the old weights.
        new: the weights that come.
        num_before: how many tokens it has had by then.
        is_shared: whether another one is in the middle of the same picture meanwhile.

    """
    look(llm, "preempted")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (request,) = scheduler.running
    while request.num_output_tokens < num_before - is_shared:
        llm.llm_engine.step()
    if is_shared:
        look(llm, "reader")  # a step
        (reader,) = readers(scheduler)
        assert reader != request.request_id
    assert request.num_output_tokens == num_before
    scheduler.vllm_inflight.retract([request.request_id])
    assert bool(readers(scheduler)) == is_shared
    llm.update_weights_from_disk(str(new), "new", mode="in_place")
    text = finish(llm)["preempted"]
    # Its worker has them under the names that the scheduler thinks of.
    (worker,) = llm.collective_rpc(
        lambda worker: set(worker.model_runner.encoder_cache)
    )
    assert encoded(llm) <= worker
    return text


@pytest.mark.parametrize("engine", ["versioned"], indirect=True)
def test_a_preempted_request_does_not_see_with_the_tower_before(
    llm: Any, old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    alone = preempted_at_a_commit(llm, new, 3, is_shared=False)
    llm.update_weights_from_disk(str(old), "old")
    assert preempted_at_a_commit(llm, new, 3, is_shared=True) == alone
