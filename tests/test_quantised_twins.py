"""Quantised layers in an arena: what a GPU does at an update, on the host's memory."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight import upstream
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.patch.worker import _load_straight
from vllm.inflight.stage.arena import Arena
from vllm.inflight.stage.coverage import Coverage
from vllm.inflight.stage.plan import Entry, Plan
from vllm.inflight.stage.quantised import require_same_numbers
from vllm.inflight.stage.twins import put_twins

SIZE = 8


class Rounded(upstream.QuantizeMethodBase):
    """Keeps a weight transposed, as int8, beside the scale that it computes."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.weight = torch.nn.Parameter(torch.empty(SIZE, 2 * SIZE), False)

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("nothing is computed here")

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight.abs().max() / 127
        rounded = (layer.weight / scale).round().to(torch.int8)
        layer.weight = torch.nn.Parameter(rounded.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plain = torch.nn.Module(), torch.nn.Module()
        self.linear.quant_method = Rounded()
        self.linear.quant_method.create_weights(self.linear)
        self.plain.weight = torch.nn.Parameter(torch.empty(SIZE), False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            param = self.get_parameter(name)
            load = getattr(param, "weight_loader", upstream.default_weight_loader)
            load(param, tensor)


def version(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"linear.weight": (SIZE, 2 * SIZE), "plain.weight": (SIZE,)}
    return {n: torch.randn(s, generator=random) for n, s in shapes.items()}


def processed(seed: int) -> Model:
    model = Model()
    model.load_weights(version(seed).items())
    model.linear.quant_method.process_weights_after_loading(model.linear)
    return model


def shows(live: Model, seed: int) -> bool:
    wanted = dict(processed(seed).named_parameters())
    return all(torch.equal(p, wanted[n]) for n, p in live.named_parameters())


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield arena


def in_arena(arena: Arena, tensor: torch.Tensor) -> torch.Tensor:
    # Laid out as it is: a transposed weight stays transposed.
    flat = arena.empty((tensor.numel(),), tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def second_of(live: Model, arena: Arena) -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    with torch.device("meta"):
        second = Model()
        record_metadata_for_reloading(second)
    for layer in second.modules():
        upstream.get_layerwise_info(layer).restore_device = torch.device("cpu")
    put_twins(live, second, arena.twin)
    return second


def test_a_quantised_twin_is_processed_into_and_shows_at_the_flip(arena: Arena) -> None:
    live = processed(0)
    with torch.no_grad():
        for param in live.parameters():
            param.data = in_arena(arena, param.data)
    arena.consolidate()
    arena.pair()
    second, plan = second_of(live, arena), Plan()
    places = [param.data_ptr() for param in live.parameters()]
    twins = [param.data_ptr() for param in second.parameters()]
    begin = _load_straight(upstream.initialize_layerwise_reload)
    finish = _load_straight(upstream.finalize_layerwise_reload)
    required = {n: t.shape for n, t in version(0).items()}
    for seed in (1, 2, 3):
        begin(second)
        coverage = Coverage(second, required, set())
        coverage.watch(second.load_weights)
        with torch.no_grad():
            for name, tensor in version(seed).items():
                entry = Entry(tensor.shape, tensor.dtype)
                coverage.handed, coverage.entry = tensor, entry
                Model.load_weights(second, [(name, tensor)])
                plan.keep(name, entry)
        assert coverage.short(set(coverage.fills)) == []
        finish(second, SimpleNamespace(dtype=torch.float32))
        coverage.unwatch()
        # What is loaded beside the twin must not be replayed.
        assert plan.entry("linear.weight", version(seed)["linear.weight"]) is None
        assert plan.entry("plain.weight", version(seed)["plain.weight"]) is not None
        assert twins == [param.data_ptr() for param in second.parameters()]
        assert shows(live, seed - 1)
        arena.flip()
        assert shows(live, seed)
        arena.flip()
        assert shows(live, seed - 1)
        arena.flip()
        arena.settle()
    assert places == [param.data_ptr() for param in live.parameters()]


def test_a_number_that_graphs_are_compiled_with_may_not_change() -> None:
    live, second = processed(0), processed(1)
    live.linear.quant_method.shift = second.linear.quant_method.shift = 0.5
    require_same_numbers(live, second, {"linear.weight"})
    second.linear.quant_method.shift = 0.25
    require_same_numbers(live, second, {"plain.weight"})
    with pytest.raises(WeightsMismatch, match=r"shift of layer linear is 0\.25"):
        require_same_numbers(live, second, {"linear.weight"})
