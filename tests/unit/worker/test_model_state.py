"""What is remembered of a module ends with the module, and copies do not have it."""

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight.attached import ATTRIBUTE
from vllm.inflight.worker.model.kinds.hidden_weights import HiddenWeights
from vllm.inflight.worker.model_state import ModelState, recall
from vllm.inflight.worker.shadow import build, parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel, shadow_of


@dataclass
class Kept:
    """A fact about a module."""

    module: torch.nn.Module | None = None


def is_freed(module: list[torch.nn.Module]) -> bool:
    """Whether nothing keeps the one module of a list once the list is empty."""
    part = weakref.ref(module.pop())
    gc.collect()
    return part() is None


def test_a_module_remembers_one_state_of_each_class() -> None:
    model, state = torch.nn.Identity(), ModelState.of(torch.nn.Identity())
    assert recall(model, Kept) is None
    assert ATTRIBUTE not in vars(model), "asking leaves no trace"
    state = ModelState.of(model)
    state.set(Kept())
    state.set(last := Kept())
    assert recall(model, Kept) is last
    assert ModelState.of(model) is state
    assert state.pop(Kept) is last
    assert state.pop(Kept) is recall(model, Kept) is None


def test_a_remembered_module_does_not_become_part_of_the_model() -> None:
    model = torch.nn.Linear(2, 2)
    ModelState.of(model).set(Kept(torch.nn.Linear(2, 2)))
    ModelState.of(model).set(torch.nn.Linear(2, 2))
    assert [*model.modules()] == [model]
    assert model.state_dict().keys() == {"weight", "bias"}
    assert [*HiddenWeights(model)] == []


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_of_a_module_has_no_facts(copied: Any) -> None:
    model = torch.nn.Linear(2, 2)
    ModelState.of(model).set(Kept())
    assert recall(copied(model), Kept) is None
    assert recall(model, Kept) is not None


def test_a_model_is_freed_though_its_build_inputs_refer_to_it() -> None:
    """The compilation config of upstream refers to the layers of the model."""
    model = torch.nn.Identity()
    config = SimpleNamespace(layers=[model], model_config=None)
    build.note(model, build.BuildInputs(config, None))
    assert build.build_inputs_of(model, config).vllm_config is config
    del config
    alone = [model]
    del model
    assert is_freed(alone)


def test_a_shadow_model_is_freed_though_its_layers_are_remembered() -> None:
    module = torch.nn.Linear(2, 2)
    ModelState.of(module).set(parameters.Mirrored([module]))
    assert parameters.reloaded(module) == [module]
    alone: list[torch.nn.Module] = [module]
    del module
    assert is_freed(alone)


def test_a_worker_that_ends_leaves_neither_model_nor_shadow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ShadowModel, "_build", lambda self, config: "not tried")
    model = torch.nn.Linear(2, 2)
    worker: Any = SimpleNamespace(
        device=torch.device("cpu"),
        model_runner=SimpleNamespace(get_draft_model=lambda: None),
        vllm_config=SimpleNamespace(
            model_config=None, speculative_config=None, additional_config={}
        ),
    )
    shadow = shadow_of(worker, model)
    assert shadow_of(worker, model) is shadow
    part = weakref.ref(shadow)
    alone: list[torch.nn.Module] = [model]
    del model, shadow, worker
    assert is_freed(alone)
    assert part() is None
