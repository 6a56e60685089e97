"""Adapters that make room for each other: what was loaded last is what comes back."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.test_adapter_loads import of_a_larger_model
from tests.e2e.test_adapters import ADAPTERS, TEXT, adapted
from tests.support.engines.adapters import make_adapter
from tests.support.engines.probe import NUM_PROMPTS
from vllm.inflight.errors import EngineFault
from vllm.inflight.worker.lora import KeptAdapters

pytestmark = pytest.mark.engine

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], old: Path) -> Any:
    """It holds one adapter at a time."""
    return start(old, **ADAPTERS | {"max_loras": 1})


@pytest.fixture
def llm(llm: Any) -> Any:
    for number in (1, 2):
        llm.llm_engine.remove_lora(number)
    return llm


@pytest.fixture
def make(old: Path, tmp_path: Path) -> Callable[..., LoRARequest]:
    """`make(name, number, seed)`: an adapter of its own files."""

    def made(name: str, number: int, seed: int) -> LoRARequest:
        (tmp_path / str(seed)).mkdir()
        path = make_adapter(old, tmp_path / str(seed), seed).lora_path
        return LoRARequest(name, number, path)

    return made


def ask(llm: Any, name: str, adapter: LoRARequest) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.llm_engine.add_request(name, TEXT, params, lora_request=adapter)


def gone(adapter: LoRARequest) -> LoRARequest:
    """Its files are deleted, as trainers do."""
    shutil.rmtree(adapter.lora_path)
    return adapter


def manager_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.lora_manager


def finish(llm: Any) -> dict[str, Any]:
    """Name → the choice of each request there is."""
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
    return done


def load_again(llm: Any, adapter: LoRARequest, path: str) -> LoRARequest:
    """Replace an adapter by that of other files; returns how it is asked for now."""
    name, number = adapter.lora_name, adapter.lora_int_id
    assert llm.llm_engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
    return LoRARequest(name, number, path)


def test_a_request_that_waited_does_not_bring_the_old_adapter_back(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first, other = make("task", 1, 0), make("other", 2, 1)
    second = make("task", 1, 2)
    fresh = []
    for adapter in (second, first):
        fresh.append(adapted(llm, adapter))
        llm.llm_engine.remove_lora(1)
    ask(llm, "loads", first)
    finish(llm)
    ask(llm, "running", other)
    llm.llm_engine.step()
    ask(llm, "waiting", first)
    now = load_again(llm, first, second.lora_path)
    assert llm.llm_engine.add_lora(other)
    done = finish(llm)
    ask(llm, "new", now)
    done |= finish(llm)
    assert done["waiting"].token_ids == done["new"].token_ids
    loads = {
        s.adapter_load for n in ("waiting", "new") for s in done[n].weight_versions
    }
    assert len(loads) == 1
    assert adapted(llm, now) == fresh[0] != fresh[1]


def test_a_request_that_runs_goes_on_with_the_adapter_that_was_loaded_last(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first, other = make("task", 1, 0), make("other", 2, 1)
    second = make("task", 1, 2)
    said = []
    for makes_room in (False, True):
        llm.llm_engine.remove_lora(1)
        llm.reset_prefix_cache()
        ask(llm, "running", first)
        for _ in range(5):
            llm.llm_engine.step()
        load_again(llm, first, second.lora_path)
        if makes_room:
            assert llm.llm_engine.add_lora(other)
            assert llm.llm_engine.list_loras() == {2}
        said.append(finish(llm)["running"].token_ids)
    assert said[0] == said[1]


def test_a_removed_adapter_name_is_loaded_from_the_path_in_the_request(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first, second = make("task", 1, 0), make("task", 1, 2)
    before = adapted(llm, first)
    now = load_again(llm, first, second.lora_path)
    assert adapted(llm, first) == adapted(llm, now) != before
    llm.llm_engine.remove_lora(1)
    assert adapted(llm, first) == before


def test_an_adapter_that_does_not_fit_evicts_no_other_adapter(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first, larger = make("task", 1, 0), make("larger", 2, 1)
    before = adapted(llm, first)
    shutil.rmtree(first.lora_path)
    of_a_larger_model(Path(larger.lora_path))
    with pytest.raises(EngineFault, match="no rank has it"):
        llm.llm_engine.add_lora(larger)
    assert llm.llm_engine.list_loras() == {1}
    assert adapted(llm, first) == before


def test_an_adapter_that_a_request_needs_is_kept_when_its_files_are_gone(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    """It runs, others are loaded over it, its files go, and the next one is loaded."""
    first, second, third = (make(f"v{n}", n, n) for n in (1, 2, 3))
    ask(llm, "alone", first)
    alone = finish(llm)["alone"]
    ask(llm, "running", first)
    for _ in range(5):
        llm.llm_engine.step()
    ask(llm, "waiting", gone(first))
    for other in (second, third):
        assert llm.llm_engine.add_lora(other)
        gone(other)
        for _ in range(3):
            llm.llm_engine.step()
    ask(llm, "other", third)
    done = finish(llm)
    assert done["running"].token_ids == done["waiting"].token_ids == alone.token_ids
    assert len(done["other"].token_ids) == NUM_TOKENS
    spans = [s.adapter_load for s in done["running"].weight_versions]
    assert spans == [s.adapter_load for s in alone.weight_versions]


def test_a_running_request_continues_without_the_files_of_its_removed_adapter(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first = make("v1", 1, 1)
    ask(llm, "alone", first)
    alone = finish(llm)["alone"]
    ask(llm, "running", first)
    for _ in range(5):
        llm.llm_engine.step()
    gone(first)
    assert llm.llm_engine.remove_lora(1)
    assert finish(llm)["running"].token_ids == alone.token_ids


def not_there(make: Callable[..., LoRARequest]) -> LoRARequest:
    return gone(make("new", 2, 2))


def of_another_model(make: Callable[..., LoRARequest]) -> LoRARequest:
    adapter = make("new", 2, 2)
    of_a_larger_model(Path(adapter.lora_path))
    return adapter


def not_there_in_place(make: Callable[..., LoRARequest]) -> LoRARequest:
    adapter = not_there(make)
    return LoRARequest("new", 2, adapter.lora_path, load_inplace=True)


@pytest.mark.parametrize("spoiled", [not_there, of_another_model, not_there_in_place])
def test_a_request_whose_adapter_cannot_be_loaded_fails_alone(
    llm: Any, make: Callable[..., LoRARequest], spoiled: Callable[..., LoRARequest]
) -> None:
    first, bad = make("v1", 1, 1), spoiled(make)
    ask(llm, "alone", first)
    alone = finish(llm)["alone"]
    ask(llm, "running", first)
    for _ in range(5):
        llm.llm_engine.step()
    ask(llm, "bad", bad)
    done = finish(llm)
    assert done["bad"].finish_reason == "error"
    assert "adapter 'new'" in done["bad"].stop_reason
    assert done["bad"].token_ids == []
    assert done["running"].token_ids == alone.token_ids
    assert adapted(llm, first) == adapted(llm, first)


def test_a_request_fails_alone_if_its_evicted_adapter_has_no_files(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first, *others = (make(f"v{n}", n, n) for n in range(1, 4))
    adapted(llm, first)
    gone(first)
    for other in others:
        adapted(llm, other)
    ask(llm, "late", first)
    late = finish(llm)["late"]
    assert (late.finish_reason, late.token_ids) == ("error", [])
    assert len(adapted(llm, others[-1])) == NUM_PROMPTS


def test_memory_keeps_needed_adapters_and_one_that_is_not_needed(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    """As many as `max_cpu_loras`, which is 1 here."""
    many = [make(f"v{n}", n, n) for n in range(1, 6)]
    ask(llm, "running", many[0])
    llm.llm_engine.step()
    for adapter in many[1:]:
        assert llm.llm_engine.add_lora(adapter)
    kept = set(KeptAdapters.of(manager_of(llm)).read)
    assert kept == {("v1", 1), ("v4", 4), ("v5", 5)}
    finish(llm)
    assert llm.llm_engine.add_lora(make("v6", 6, 6))
    assert set(KeptAdapters.of(manager_of(llm)).read) == {("v5", 5), ("v6", 6)}
