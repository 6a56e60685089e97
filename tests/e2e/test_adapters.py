"""LoRA: base weights change under adapters, and adapters under their names."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu_worker import Worker

from tests.e2e.test_pause_features import GREEDY as LONG
from tests.e2e.test_pause_features import lived
from tests.support.engines.adapters import RANK, make_adapter
from tests.support.engines.bare_core import call
from tests.support.engines.probe import GREEDY, NUM_PROMPTS, greedy, prompts

pytestmark = pytest.mark.engine

ADAPTERS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": RANK,
    # Of the two, upstream's kernels for adapters take float32 on the CPU only.
    "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
    # vLLM's CPU build gives the head of the last slot to requests without an adapter.
    "max_loras": 4,
}
TEXT = {"prompt_token_ids": [(7 * i) % 250 for i in range(100)]}


def adapted(llm: Any, adapter: LoRARequest) -> list[list[int]]:
    """`greedy`, with an adapter."""
    outputs = llm.generate(
        prompts(NUM_PROMPTS), GREEDY, use_tqdm=False, lora_request=adapter
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def said(llm: Any, adapter: LoRARequest) -> list[list[list[int]]]:
    """What is served says without the adapter, and with it."""
    return [greedy(llm), adapted(llm, adapter)]


def found(llm: Any, adapter: LoRARequest | None) -> int:
    """Tokens of `TEXT` that a new request finds in the prefix cache."""
    sampling = SamplingParams(temperature=0, max_tokens=2)
    (output,) = llm.generate([TEXT], sampling, use_tqdm=False, lora_request=adapter)
    return int(output.num_cached_tokens)


@pytest.fixture
def adapter(old: Path, tmp_path: Path) -> LoRARequest:
    return make_adapter(old, tmp_path)


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], old: Path) -> Any:
    return start(old, **ADAPTERS)


# ---------------------------------------------------------------- base weights
def test_an_adapter_that_was_loaded_stays_loaded(
    llm: Any, new: Path, adapter: LoRARequest
) -> None:
    before = said(llm, adapter)
    shutil.rmtree(adapter.lora_path)
    llm.update_weights_from_disk(str(new), "new")
    assert adapted(llm, adapter) != before[1]
    llm.rollback_weights()
    assert said(llm, adapter) == before


def test_requests_of_an_adapter_live_through_a_commit(
    llm: Any, new: Path, adapter: LoRARequest
) -> None:
    def update() -> None:
        llm.update_weights_from_disk(str(new), "new")

    for choice in lived(llm, SamplingParams(**LONG), update, lora_request=adapter):
        spans = [(s.version, s.start, s.end) for s in choice.weight_versions]
        (_, _, middle), _ = spans
        assert spans == [("old", 0, middle), ("new", middle, 60)]


def test_parameters_are_read_under_the_names_of_a_model_without_adapters(
    llm: Any, old: Path
) -> None:
    core = llm.llm_engine.engine_core.engine_core
    (rank,) = call(core, "checksums")["ranks"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in rank["checksums"]
    assert "model.embed_tokens.weight" in rank["checksums"]
    assert not any("base_layer" in name for name in rank["checksums"])
    name = "model.layers.1.self_attn.k_proj.weight"
    stored = load_file(old / "model.safetensors")[name][:3].float()
    assert call(core, "rows", tensor=name, num_rows=3)["rows"] == stored.tolist()


def test_adapters_stay_loaded_where_a_sleep_has_lost_their_memory(
    llm: Any, adapter: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = said(llm, adapter)
    assert llm.llm_engine.pin_lora(adapter.lora_int_id)
    shutil.rmtree(adapter.lora_path)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    registry = worker.model_runner.lora_manager._adapter_manager
    slot = registry.lora_index_to_id.index(adapter.lora_int_id)
    for layer in worker.model_runner.get_model().modules():
        for stack in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, stack, ())
            for tensor in stacked if isinstance(stacked, tuple) else (stacked,):
                tensor[slot] = torch.nan
    # The CPU build has no sleep: this is what wakes a GPU's worker.
    asleep = SimpleNamespace(resume=lambda tags: None)
    monkeypatch.setattr(worker, "_sleep_mode_backend", asleep, raising=False)
    monkeypatch.setattr(worker, "synchronize_device", lambda: None)
    Worker.wake_up(worker, ["weights"])
    assert said(llm, adapter) == before
    assert pinned(llm) == {adapter.lora_int_id}


def test_adapters_stay_loaded_when_upstream_reloads_the_base_weights(
    llm: Any, old: Path, adapter: LoRARequest
) -> None:
    before = said(llm, adapter)
    assert llm.llm_engine.pin_lora(adapter.lora_int_id)
    shutil.rmtree(adapter.lora_path)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(old)})
    assert said(llm, adapter) == before
    assert pinned(llm) == {adapter.lora_int_id}


def pinned(llm: Any) -> set[int]:
    """The numbers of the adapters that make room for no others."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    registry = runner.lora_manager._adapter_manager
    return set(registry._registered_adapters.pinned_items)


# ---------------------------------------------------------------- prefix cache
def test_an_adapters_kv_of_other_base_weights_is_never_read(
    llm: Any, old: Path, new: Path, adapter: LoRARequest
) -> None:
    assert [found(llm, adapter), found(llm, adapter), found(llm, None)] == [0, 96, 0]
    llm.update_weights_from_disk(str(new), "new")
    assert [found(llm, adapter), found(llm, adapter), found(llm, None)] == [0, 96, 0]
    llm.rollback_weights()
    assert [found(llm, adapter), found(llm, adapter), found(llm, None)] == [0, 96, 0]


def in_place(llm: Any, adapter: LoRARequest) -> LoRARequest:
    """Load it again, under its name and number."""
    again = LoRARequest(adapter.lora_name, 1, adapter.lora_path, load_inplace=True)
    assert llm.llm_engine.add_lora(again)
    return adapter


def under_another_number(llm: Any, adapter: LoRARequest) -> LoRARequest:
    """As the server does it, when a name is unloaded and loaded."""
    return LoRARequest(adapter.lora_name, 2, adapter.lora_path)


def after_it_was_let_go(llm: Any, adapter: LoRARequest) -> LoRARequest:
    assert llm.llm_engine.remove_lora(1)
    return adapter


def by_the_request(llm: Any, adapter: LoRARequest) -> LoRARequest:
    return LoRARequest(adapter.lora_name, 1, adapter.lora_path, load_inplace=True)


@pytest.mark.parametrize(
    "load", [in_place, under_another_number, after_it_was_let_go, by_the_request]
)
def test_kv_of_an_adapter_that_was_loaded_again_is_never_read(
    llm: Any, old: Path, adapter: LoRARequest, load: Callable[..., LoRARequest]
) -> None:
    llm.reset_prefix_cache()
    assert [found(llm, adapter), found(llm, adapter)] == [0, 96]
    make_adapter(old, Path(adapter.lora_path), seed=1)
    assert found(llm, adapter) == 96, "nobody has loaded it yet"
    again = load(llm, adapter)
    assert found(llm, again) == 0
    assert found(llm, again) == (0 if again.load_inplace else 96)
    assert found(llm, None) == 0


def test_requests_that_wait_while_an_adapter_is_loaded_look_for_its_kv(
    llm: Any, old: Path, adapter: LoRARequest
) -> None:
    llm.reset_prefix_cache()
    assert [found(llm, adapter), found(llm, adapter)] == [0, 96]
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=2)
    engine.add_request("waits", TEXT, sampling, lora_request=adapter)
    make_adapter(old, Path(adapter.lora_path), seed=1)
    in_place(llm, adapter)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens == 0
    assert found(llm, adapter) == 96


# ------------------------------------------- engines of their own, from here on
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"family": "qwen3"}, {}),
        ({"family": "llama", "tied": True, "vocab": 300}, {}),
        ({"family": "qwen3", "tied": True}, {"enforce_eager": False}),
    ],
    ids=["qwen3", "llama-tied-padded-vocabulary", "qwen3-tied-compiled"],
)
def test_updates_equal_fresh_engines_with_and_without_an_adapter(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    shape: dict[str, Any],
    options: dict[str, Any],
) -> None:
    old, new = checkpoint(0, **shape), checkpoint(1, **shape)
    adapter = make_adapter(old, tmp_path)
    fresh = said(start(new, **ADAPTERS, **options), adapter)
    llm = start(old, **ADAPTERS, **options)
    before = said(llm, adapter)
    assert before[0] != before[1], "the adapter does nothing"
    llm.update_weights_from_disk(str(new), "new")
    assert said(llm, adapter) == fresh
    llm.rollback_weights()
    assert said(llm, adapter) == before
