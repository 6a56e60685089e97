"""Adapters that make room for each other: what was loaded last is what comes back."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.adapters import make_adapter
from tests.engine.test_adapter_loads import of_a_larger_model
from tests.engine.test_adapters import ADAPTERS, TEXT, adapted
from vllm.inflight.errors import EngineFault

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


def test_a_name_that_was_let_go_is_read_from_where_it_is_asked_for(
    llm: Any, make: Callable[..., LoRARequest]
) -> None:
    first, second = make("task", 1, 0), make("task", 1, 2)
    before = adapted(llm, first)
    now = load_again(llm, first, second.lora_path)
    assert adapted(llm, first) == adapted(llm, now) != before
    llm.llm_engine.remove_lora(1)
    assert adapted(llm, first) == before


def test_an_adapter_that_does_not_fit_makes_no_other_one_go(
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
