"""Modules of other packages: what PEFT and DeepSpeed have put into them.

Neither is installed here. What stands for them has the attributes by which theirs are
known (read and tried in PEFT 0.21 and DeepSpeed 0.19).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.trainers.sharded import mixtral, plain
from vllm.inflight.errors import Malformed
from vllm.inflight.trainer.sources.stream import facts, tensors

Tensors = dict[str, torch.Tensor]


def found(source: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors(source)}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


# ------------------------------------------------------------------------- PEFT
class Lora(nn.Module):
    """PEFT's layer: it was made around another, and is merged into it or not."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        size = base_layer.weight.shape[-1]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size, 2, bias=False)})
        self.merged = False

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def merge(self) -> None:
        self.base_layer.weight.data += 1.0
        self.merged = True


class Saved(nn.Module):
    """PEFT's `ModulesToSaveWrapper`: the one that is trained stands for the other."""

    def __init__(self, original: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": trained})
        self.active_adapter = ["default"]
        self.disable_adapters = False


class Tokens(nn.Module):
    """PEFT's `TrainableTokensWrapper`: a layer around a layer."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.token_adapter = Lora(original)


class Peft(nn.Module):
    """PEFT's model: the one that it was made of is two modules further in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peft_config: dict[str, Any] = {}
        self.base_model = nn.Module()
        self.base_model.model = model

    def get_base_model(self) -> nn.Module:
        return self.base_model.model


def adapted() -> tuple[Peft, list[Lora]]:
    """A model of transformers with an adapter in every attention."""
    model = mixtral()
    layers = []
    for block in model.model.layers:
        block.self_attn.q_proj = Lora(block.self_attn.q_proj)
        # Two adapters, one around the other.
        block.self_attn.v_proj = Lora(Lora(block.self_attn.v_proj))
        layers += [block.self_attn.q_proj]
        layers += [block.self_attn.v_proj, block.self_attn.v_proj.base_layer]
    return Peft(model), layers


def test_adapters_that_are_not_merged_are_rejected_by_name_with_the_line_to_write():
    model, layers = adapted()
    for source in (model, model.get_base_model()):
        with pytest.raises(Malformed, match=r"model\.merge_adapter\(\)") as refused:
            found(source)
        assert set(refused.value.tensors) == {
            f"model.layers.{layer}.self_attn.{name}_proj.weight"
            for layer in range(2)
            for name in "qv"
        }
    for layer in layers[1:]:
        layer.merged = True
    with pytest.raises(Malformed, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        found(model)


def test_merged_adapters_are_sent_as_the_merged_model():
    model, layers = adapted()
    expected = found(mixtral())
    for layer in layers:
        layer.merged = True
        if not isinstance(layer.base_layer, Lora):
            layer.base_layer.weight.data += 1.0
    for name in expected:
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            expected[name] += 1.0
    assert same(found(model), expected)
    assert same(found(model.get_base_model()), expected)


@pytest.mark.parametrize("is_off", [False, True])
def test_the_active_copy_of_a_module_saved_by_peft_is_sent(is_off):
    model = plain()
    trained = nn.Linear(8, 6)
    original = model.layers[1].up
    model.layers[1].up = Saved(original, trained)
    model.layers[1].up.disable_adapters = is_off
    used = original if is_off else trained
    expected = found(plain()) | {
        "layers.1.up.weight": used.weight.detach(),
        "layers.1.up.bias": used.bias.detach(),
    }
    assert same(found(model), expected)


def test_tokens_that_are_trained_are_sent_in_their_embedding():
    model = plain()
    model.embed = Tokens(model.embed)
    with pytest.raises(Malformed, match=r"'embed\.weight'"):
        found(model)
    model.embed.token_adapter.merge()
    assert same(found(model), found(plain()) | {"embed.weight": model.lm_head.weight})


def test_a_learned_prompt_is_rejected():
    model = Peft(plain())
    model.prompt_encoder = nn.ModuleDict({"default": nn.Linear(2, 2)})
    with pytest.raises(Malformed, match=r"get_base_model\(\)"):
        found(model)


# -------------------------------------------------------------------- DeepSpeed
class DeepSpeedEngine(nn.Module):
    """DeepSpeed's, by its name; the model is in it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Zero:
    """`deepspeed.zero` for one rank: its parameters are empty outside of a context."""

    def __init__(self, model: nn.Module) -> None:
        self.wholes: dict[int, torch.Tensor] = {}
        self.calls: list[int] = []
        for number, parameter in enumerate(dict.fromkeys(model.parameters())):
            parameter.ds_id = number
            parameter.ds_shape = parameter.shape
            self.wholes[number] = parameter.data
            parameter.data = torch.empty(0)

    @contextmanager
    def GatheredParameters(self, parameters: list[Any]) -> Iterator[None]:
        self.calls.append(len(parameters))
        for parameter in parameters:
            assert not parameter.numel(), "it is gathered already"
            parameter.data = self.wholes[parameter.ds_id]
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.data = torch.empty(0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`shared(model)`: a `Zero` that has the model's parameters."""

    def share(model: nn.Module) -> Zero:
        zero = Zero(model)
        monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
        return zero

    return share


@pytest.mark.parametrize("make", [plain, mixtral])
@pytest.mark.parametrize("wrap", [DeepSpeedEngine, lambda model: model])
def test_parameters_of_zero_3_are_gathered_a_layer_at_a_time(shared, make, wrap):
    expected = found(make())
    model = make()
    zero = shared(model)
    assert same(found(wrap(model)), expected)
    assert max(zero.calls) < len(zero.wholes) and sum(zero.calls) == len(zero.wholes)
    assert all(not parameter.numel() for parameter in model.parameters())
    told = [(name, *it) for name, it in facts(wrap(model))]
    assert told == [
        (name, expected[name].dtype, tuple(expected[name].shape)) for name, *_ in told
    ]
    assert len(told) == len(expected)


def test_tensors_kept_of_a_zero_3_layer_outlive_the_release_of_the_layer(shared):
    expected = found(plain())
    model = plain()
    shared(model)
    assert same(dict(tensors(model)), expected)


def test_named_parameters_of_zero_3_are_gathered_one_by_one(shared):
    model = plain()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = shared(model)
    assert same(found(lambda: model.named_parameters()), expected)
    assert set(zero.calls) == {1}


def test_a_state_dict_of_zero_3_is_rejected_with_what_to_give_instead(shared):
    model = plain()
    shared(model)
    with pytest.raises(Malformed, match="publish the module itself") as refused:
        found(model.state_dict())
    assert refused.value.tensors == ["embed.weight"]


def test_parameters_that_nothing_can_gather_are_rejected_by_name(monkeypatch):
    model = plain()
    Zero(model)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    with pytest.raises(Malformed, match="without deepspeed") as refused:
        found(model)
    assert "embed.weight" in refused.value.tensors


# ------------------------------------------------------- FSDP's flat parameters
def test_flat_parameters_that_are_given_without_their_module_are_rejected():
    flat = nn.Parameter(torch.zeros(4))
    with pytest.raises(Malformed, match="publish the module itself"):
        found([("_fsdp_wrapped_module._flat_param", flat)])
    view = nn.Parameter(torch.zeros(4))
    view._fsdp_flattened = True
    with pytest.raises(Malformed, match=r"'layers\.0\.up\.weight'"):
        found([("_fsdp_wrapped_module.layers.0.up.weight", view)])
