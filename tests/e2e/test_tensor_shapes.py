"""A tensor of another shape is rejected by name, though loaders would cut it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.mixtures import FILE
from tests.support.engines.probe import state
from vllm.inflight.errors import WeightsMismatch

pytestmark = pytest.mark.engine

LARGER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "self_attn.q_proj": lambda tensor: torch.cat([tensor, tensor]),
    "self_attn.k_proj": lambda tensor: torch.cat([tensor, tensor]),
    "self_attn.o_proj": lambda tensor: torch.cat([tensor, tensor], dim=1),
    "mlp.up_proj": lambda tensor: tensor.repeat(2, 1),
    "mlp.down_proj": lambda tensor: tensor.repeat(1, 3),
    "self_attn.q_norm": lambda tensor: tensor.repeat(2),
}
"""Of one layer."""

FAMILIES = {
    "granite_moe_hybrid": (
        "model.layers.0.block_sparse_moe.input_linear.weight",
        "model.layers.0.block_sparse_moe.output_linear.weight",
    ),
    "gpt_oss": (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj_bias",
        "model.layers.1.self_attn.sinks",
    ),
}
"""All experts in one tensor; and what a loader writes past its parameters'."""


@pytest.fixture(scope="module", params=["started from files", "not started from files"])
def engine(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],
    old: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    if request.param == "started from files":
        return start(old)
    bare = tmp_path_factory.mktemp("bare")
    shutil.copytree(
        old, bare, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
    )
    return start(bare, load_format="dummy")


@pytest.fixture
def llm(engine: Any, old: Path) -> Iterator[Any]:
    engine.update_weights_from_disk(str(old), "old")
    return engine


def saved(new: Path, at: Path, changed: dict[str, Any]) -> str:
    """The checkpoint `new` with tensors made anew."""
    tensors = load_file(new / FILE)
    for name, change in changed.items():
        tensors[name] = change(tensors[name]).contiguous()
    at.mkdir(exist_ok=True)
    save_file(tensors, at / FILE)
    return str(at)


@pytest.mark.parametrize("kind", LARGER)
def test_tensors_larger_than_the_models_are_rejected(
    llm: Any, new: Path, tmp_path: Path, kind: str
) -> None:
    name = f"model.layers.1.{kind}.weight"
    path = saved(new, tmp_path / "larger", {name: LARGER[kind]})
    before = state(llm)
    for _ in range(3):  # what was recorded of the first is not replayed, either
        with pytest.raises(WeightsMismatch, match=r"its shape is|with shape") as caught:
            llm.update_weights_from_disk(path, "larger")
        assert caught.value.tensors == [name]
        assert state(llm) == before
    llm.update_weights_from_disk(str(new), "new")


def test_every_tensor_of_a_larger_model_is_named_in_the_rejection(
    llm: Any, new: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    changed = {f"model.layers.0.{kind}.weight": LARGER[kind] for kind in LARGER}
    path = saved(new, tmp_path / "larger", changed)
    with pytest.raises(WeightsMismatch) as caught:
        llm.update_weights_from_disk(path, "larger")
    found = set(caught.value.tensors)
    if "not started" in request.node.name:
        # The loader refuses one by itself, and ends what could be said of the rest.
        assert len(found) > 1
        assert found <= set(changed)
    else:
        assert found == set(changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: torch.cat([tensor, tensor]),
        lambda tensor: tensor[:1],
        lambda tensor: tensor[..., :1],
        lambda tensor: tensor[None],
        lambda tensor: tensor.to(torch.int8),
    ],
    ids=["twice as many", "one", "the last is one", "another dimension", "integers"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_with_a_loader_of_its_own_must_keep_its_shape_and_dtype(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    engines: dict[str, Any],
    family: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    old, new = (checkpoint(seed, family=family) for seed in range(2))
    if family not in engines:
        engines.clear()
        engines[family] = start(old)
    llm = engines[family]
    before = state(llm)
    for name in FAMILIES[family]:
        path = saved(new, tmp_path / "other", {name: change})
        with pytest.raises(WeightsMismatch) as caught:
            llm.update_weights_from_disk(path, "other")
        # With what is missing then, by a name that no checkpoint has.
        assert caught.value.tensors[0] == name
        assert len(caught.value.tensors) <= 2
    assert state(llm) == before


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    """The one that runs, by its family."""
    return {}
