"""Parameters that a loader computes, with delta staging: Mamba's `A` is -exp(A_log).

It is loaded into scratch memory, compared with what is served, and swapped with the
rest.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_delta_staging import (  # noqa: F401 (one is a fixture)
    delta_engine,
    live_of,
    shadow_of,
    without_packing,
)
from tests.e2e.test_delta_staging_sleep import giving_back  # noqa: F401 (a fixture)
from tests.e2e.test_sleep import may_sleep
from tests.support.deltas import stepped
from tests.support.engines import oracle
from tests.support.engines.mirrored import mirrored
from tests.support.engines.probe import greedy
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

LOGARITHM = "model.layers.1.mamba.A_log"
"""A tensor of the checkpoint."""

COMPUTED = "model.layers.1.mamba.mamba.A"
"""The parameter that the model's loader computes of it."""

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(0, family="falcon_h1")


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], folder: Path) -> Any:
    return delta_engine(start, folder)


@pytest.fixture
def llm(engine: Any, folder: Path) -> Iterator[Any]:
    """The engine, on the weights of `folder`."""
    engine.update_weights_from_disk(str(folder), "old")
    yield engine
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()


@pytest.fixture
def weights(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def written(weights: Tensors, folder: Path, to: Path) -> Path:
    """A checkpoint in `to` with these weights, and all else as in `folder`."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(weights, to / "model.safetensors")
    return to


def test_a_subset_may_be_a_computed_parameter_alone(llm, folder, weights, tmp_path):
    before = greedy(llm)
    weights[LOGARITHM] = weights[LOGARITHM] + 1
    with Publisher(llm, lambda: {LOGARITHM: weights[LOGARITHM]}) as to:
        to.publish("subset", subset=[LOGARITHM])
    log = shadow_of(llm).log
    assert {p for each in log.entries.pieces for p in each.params} == {COMPUTED}
    oracle.check(llm, written(weights, folder, tmp_path))
    after = greedy(llm)
    llm.rollback_weights()
    oracle.check(llm, folder)
    assert greedy(llm) == before != after


def test_an_update_leaves_no_scratch_memory(llm, folder):
    second = shadow_of(llm).module
    llm.update_weights_from_disk(str(folder), "again")
    assert all(param.is_meta for param in second.parameters())


def test_a_computed_parameter_that_changed_since_is_found(llm, weights):
    """Also by the first scrub after a subset without it."""
    name = "model.final_layernorm.weight"
    with Publisher(llm, lambda: {name: weights[name] + 1}) as to:
        to.publish("subset", subset=[name])
    bits = live_of(llm)[COMPUTED].data.view(torch.int32)
    bits[5] ^= 1  # as memory that fails
    try:
        assert llm.verify_weights()["different"] == [COMPUTED]
    finally:
        bits[5] ^= 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensor: torch.full_like(tensor, 1e4), "numbers of it that are NaN or"),
        (lambda tensor: tensor[:4], r"its shape is \[4\]"),
        (lambda tensor: tensor.int(), "it is int32"),
        (lambda tensor: None, "missing"),
    ],
    ids=["infinite", "cut", "integers", "missing"],
)
def test_a_tensor_that_nothing_can_be_computed_of_is_rejected_by_name(
    llm, folder, weights, tmp_path, change, why
):
    before, digest = greedy(llm), llm.weight_info()["digest"]
    if (changed := change(weights.pop(LOGARITHM))) is not None:
        weights[LOGARITHM] = changed.contiguous()
    with pytest.raises(WeightsMismatch, match=why) as rejection:
        llm.update_weights_from_disk(str(written(weights, folder, tmp_path)), "wrong")
    assert rejection.value.tensors == [LOGARITHM]
    assert (llm.weight_info()["digest"], greedy(llm)) == (digest, before)
    oracle.check(llm, folder)


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_a_known_tensor_that_its_loader_rejects_is_not_called_unknown(
    llm, folder, monkeypatch, error
):
    model = type(shadow_of(llm).module)
    load = model.load_weights

    def rejecting(self, weights):
        def checked():
            for name, tensor in weights:
                if name == LOGARITHM:
                    raise error("it is not as it should be")
                yield name, tensor

        return load(self, checked())

    monkeypatch.setattr(model, "load_weights", rejecting)
    with pytest.raises(WeightsMismatch, match="it is not as it should be") as rejection:
        llm.update_weights_from_disk(str(folder), "wrong")
    assert rejection.value.tensors == [LOGARITHM]
    assert "unknown" not in str(rejection.value)
    assert "nearest" not in str(rejection.value)


def follow_deltas(llm: Any, folder: Path, weights: Tensors, to: Path) -> None:
    """Assert that an engine follows a chain of deltas, back, and on again."""
    with Publisher(llm, lambda: weights, delta="always") as publisher:
        publisher.publish("whole")
        told = [(greedy(llm), llm.weight_info()["digest"])]
        for seed in range(2):
            weights = stepped(weights, seed)
            # Of eight elements a step may change none.
            weights[LOGARITHM] = weights[LOGARITHM].clone()
            weights[LOGARITHM][seed : seed + 2] -= 0.5
            assert publisher.publish(f"delta-{seed}").is_delta
            told.append((greedy(llm), llm.weight_info()["digest"]))
            oracle.check(llm, written(weights, folder, to))
            assert llm.verify_weights()["result"] == "equal"
        publisher.rollback()
        assert (greedy(llm), llm.weight_info()["digest"]) == told[1]
        assert publisher.publish("again").is_delta
        assert (greedy(llm), llm.weight_info()["digest"]) == told[2]
    with Publisher(llm, lambda: weights, delta="off") as publisher:
        publisher.publish("whole")
    assert (greedy(llm), llm.weight_info()["digest"]) == told[2]
    assert len({str(tokens) for tokens, _ in told}) == 3


def test_a_delta_changes_what_a_loader_computes_with(llm, folder, weights, tmp_path):
    follow_deltas(llm, folder, weights, tmp_path)


def test_a_delta_of_which_infinity_is_computed_is_rejected_by_name(llm, weights):
    with Publisher(llm, lambda: weights, delta="always") as to:
        to.publish("whole")
        before, digest = greedy(llm), llm.weight_info()["digest"]
        weights[LOGARITHM][3] = 1e4
        with pytest.raises(WeightsMismatch, match="makes 1 numbers of it") as rejection:
            to.publish("wrong")
        assert rejection.value.tensors == [LOGARITHM]
        assert (greedy(llm), llm.weight_info()["digest"]) == (before, digest)


def test_a_computed_parameter_that_is_lost_is_filled_in_place(llm, folder):
    before, digest = greedy(llm), llm.weight_info()["digest"]
    with may_sleep(llm.llm_engine.engine_core.engine_core):
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.weight_info()["weights"] == "gone"
        llm.update_weights_from_disk(str(folder), "again")
        assert (llm.weight_info()["digest"], greedy(llm)) == (digest, before)
    oracle.check(llm, folder)
    assert llm.verify_weights()["result"] == "equal"


def test_so_does_one_for_shadow_weights_as_on_a_gpu(start, folder, weights, tmp_path):
    transport = WeightTransferConfig(backend="local")
    with mirrored():
        llm = start(folder, weight_transfer_config=transport)
        assert shadow_of(llm).computed[LOGARITHM] == {COMPUTED}
        follow_deltas(llm, folder, weights, tmp_path)
