"""Models of transformers in memory: what is sent is what `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from tests.support.models.families import FAMILIES
from tests.support.models.processors import transposed
from tests.support.models.seeing import SEEING
from tests.support.models.tiny import common_fields, draw_wide, make_tokenizer
from vllm.inflight.errors import ConfigError, Malformed
from vllm.inflight.trainer.sources import checkpoint_layout
from vllm.inflight.trainer.sources.stream import facts, shards, tensors

LAYER_BY_LAYER = ("mixtral", "qwen3_moe", "lfm2_moe", "ernie4_5_moe", "llava")
"""Some whose conversion renames, splits, or both."""


def made(name: str) -> Any:
    """A random model in memory."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        if name in FAMILIES:
            return draw_wide(FAMILIES[name].make(**common_fields(tokenizer)))
        seeing = SEEING[name]
        tokenizer = make_tokenizer(seeing.named)
        tokenizer.add_tokens([*seeing.tokens.values()], special_tokens=True)
        return draw_wide(seeing.make(tokenizer, **common_fields(tokenizer)))


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What its checkpoint has."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.parametrize("name", [*FAMILIES, *SEEING])
def test_a_model_in_memory_is_sent_as_its_checkpoint(name, tmp_path):
    model = made(name)
    checkpoint = saved(model, tmp_path)
    if name == "qwen3_vl_moe":
        # transformers leaves its experts as they are in memory, and loads both; vLLM
        # only reads those of the checkpoint that is published.
        checkpoint = transposed(checkpoint)
    found = {n: t.clone() for n, t in tensors(model)}
    assert same(found, checkpoint)
    told = [(n, it.dtype, it.shape) for n, it in facts(model)]
    assert told == [(n, t.dtype, tuple(t.shape)) for n, t in found.items()]


@pytest.mark.parametrize("name", ["mixtral", "llava", "gemma3_mm", "qwen3_vl_moe"])
def test_a_loaded_model_is_sent_as_the_checkpoint_that_it_was_loaded_from(
    name, tmp_path
):
    model = made(name)
    publish = SEEING[name].publish if name in SEEING else dict
    published = publish(saved(model, tmp_path))
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path)
    assert same(dict(tensors(loaded)), published)


@pytest.mark.parametrize("name", LAYER_BY_LAYER)
def test_a_model_is_converted_a_layer_at_a_time(name, monkeypatch):
    model = made(name)
    revert, sizes = core_model_loading.revert_weight_conversion, []

    def noted(model: Any, state_dict: dict[str, torch.Tensor]) -> Any:
        if not any(tensor.is_meta for tensor in state_dict.values()):
            sizes.append(sum(tensor.nbytes for tensor in state_dict.values()))
        return revert(model, state_dict)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", noted)
    num_layers = model.config.get_text_config().num_hidden_layers
    for _ in tensors(model):
        pass
    assert len(sizes) > num_layers
    assert sum(sizes) <= sum(p.nbytes for p in model.state_dict().values())


RENAMED = ("gpt_neox", "granite_moe", "llava", "gemma3_mm", "qwen2_5_vl")
"""Some whose conversion changes names alone."""


@pytest.mark.parametrize("name", RENAMED)
def test_shards_of_a_model_have_the_names_of_its_checkpoint(name):
    model = made(name)
    found = {shard.name: shard.tensor for shard in shards(model)}
    assert same(found, dict(tensors(model)))
    own = {tensor.data_ptr() for tensor in model.state_dict(keep_vars=True).values()}
    assert {tensor.data_ptr() for tensor in found.values()} <= own, "one is a copy"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_vl_moe"])
def test_a_model_whose_tensors_are_converted_has_no_shards(name):
    with pytest.raises(ConfigError, match="leave delta_shards out"):
        shards(made(name))


@pytest.mark.parametrize("is_loaded", [False, True], ids=["made", "loaded"])
def test_a_model_with_the_names_of_its_checkpoint_is_sent_as_it_is_in_memory(
    is_loaded, tmp_path
):
    model = made("llama")
    if is_loaded:
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    assert len(shards(model)) == len(dict(model.named_parameters()))
    found = dict(tensors(model))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert found[name].data_ptr() == parameter.data_ptr()


def test_a_model_in_wrappers_is_converted_as_well(tmp_path):
    model = made("mixtral")
    expected = saved(model, tmp_path)
    compiled = torch.compile(model)  # compiles nothing until it is called
    assert same(dict(tensors(compiled)), expected)
    assert same(dict(tensors(lambda: model)), expected)


def test_a_conversion_that_goes_across_layers_is_made_all_at_once(
    monkeypatch, logged, tmp_path
):
    model = made("mixtral")
    expected = saved(model, tmp_path)
    revert = core_model_loading.revert_weight_conversion

    def across(model: Any, state_dict: dict[str, torch.Tensor]) -> Any:
        found = revert(model, state_dict)
        norms = sorted(name for name in found if "input_layernorm" in name)
        for one, other in zip(norms[::2], norms[1::2], strict=False):
            found[one], found[other] = found[other][:1], found[one]
        return found

    expected = across(model, dict(model.state_dict()))
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", across)
    assert same(dict(tensors(model)), expected)
    assert "a second copy" in logged[0]


def test_a_layer_that_a_gpu_has_no_room_for_is_converted_on_the_host(
    monkeypatch, tmp_path
):
    model = made("mixtral")
    expected = saved(model, tmp_path)
    revert, tried = core_model_loading.revert_weight_conversion, set()

    def full(model: Any, state_dict: dict[str, torch.Tensor]) -> Any:
        is_real = not any(tensor.is_meta for tensor in state_dict.values())
        if is_real and state_dict.keys() - tried:
            tried.update(state_dict)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return revert(model, state_dict)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", full)
    assert same(dict(tensors(model)), expected)
    assert tried == model.state_dict().keys()


def test_a_model_that_transformers_cannot_convert_is_rejected_with_a_remedy(
    monkeypatch,
):
    def fails(*_: Any) -> Any:
        raise ValueError("Cannot reverse the transform")

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", fails)
    with pytest.raises(Malformed) as refused:
        list(tensors(made("mixtral")))
    for told in (
        "MixtralForCausalLM",
        "Cannot reverse the transform",
        "name_map=",
        "save_pretrained(folder) and update_weights_from_disk",
    ):
        assert told in str(refused.value)


def test_a_transformers_release_without_name_conversion_is_rejected_if_needed(
    monkeypatch,
):
    """Before 5.0, where some models say which names were changed."""

    def imported(name: str) -> Any:
        assert name == "transformers.core_model_loading"
        raise ImportError(name)

    monkeypatch.setattr(
        checkpoint_layout, "importlib", SimpleNamespace(import_module=imported)
    )
    model = made("llama")
    assert dict(tensors(model)).keys() == dict(model.named_parameters()).keys()
    model._checkpoint_conversion_mapping = {"^language_model": "model.language_model"}
    with pytest.raises(Malformed, match=rf"transformers {transformers.__version__}"):
        list(tensors(model))
