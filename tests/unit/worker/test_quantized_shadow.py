"""Quantised layers in an arena: an update as on a GPU, on host memory."""

from collections.abc import Iterator
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight import upstream, yielding
from vllm.inflight.errors import Cancelled, WeightsMismatch
from vllm.inflight.patch.reload import _noted_when_aside
from vllm.inflight.patch.worker import _load_straight
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model.kinds.quantized import (
    PROVED,
    quantized_obstacle,
    require_same_numbers,
)
from vllm.inflight.worker.replay_plan import Entry, Plan
from vllm.inflight.worker.shadow.parameters import mirror_parameters
from vllm.inflight.worker.staging.coverage import Coverage

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


def second_of(live: Any, arena: Arena, of: type[Any] = Model) -> Any:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    with torch.device("meta"):
        second = of()
        record_metadata_for_reloading(second)
    for layer in second.modules():
        upstream.get_layerwise_info(layer).restore_device = torch.device("cpu")
    mirror_parameters(live, second, arena.shadow_tensor)
    return second


def pair_in(arena: Arena) -> tuple[Model, Any]:
    """A model that is served, and its second set."""
    live = processed(0)
    with torch.no_grad():
        for param in live.parameters():
            param.data = in_arena(arena, param.data)
    arena.consolidate()
    arena.pair()
    return live, second_of(live, arena)


def test_a_quantised_shadow_layer_is_processed_in_place_and_served_after_the_flip(
    arena: Arena,
) -> None:
    live, second = pair_in(arena)
    plan = Plan()
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


def test_asking_a_complete_packed_layer_about_a_name_writes_and_counts_nothing(
    arena: Arena,
) -> None:
    _, second = pair_in(arena)
    required = {name: tensor.shape for name, tensor in version(0).items()}
    _load_straight(upstream.initialize_layerwise_reload)(second)
    coverage = Coverage(second, required, set())
    coverage.watch(second.load_weights)
    with torch.no_grad():
        for pair in version(1).items():
            Model.load_weights(second, [pair])
    coverage.unwatch()
    served = {name: param.clone() for name, param in second.named_parameters()}
    num_loads = coverage.num_loads

    def load(pairs: Any) -> None:
        Model.load_weights(second, pairs)

    hollow = ("linear.weight", version(1)["linear.weight"].to("meta"))
    assert coverage.asked(load, hollow) == ({"linear.weight"}, None)
    assert not coverage.refilled
    assert coverage.num_loads == num_loads
    coverage.unwatch()
    for name, param in second.named_parameters():
        assert torch.equal(param, served[name]), name
    _load_straight(upstream.finalize_layerwise_reload)(
        second, SimpleNamespace(dtype=torch.float32)
    )


@pytest.mark.parametrize("number", range(4))
def test_a_break_that_ends_an_update_leaves_every_layer_its_memory(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    live, second = pair_in(arena)
    where = "vllm.model_executor.model_loader.reload.layerwise.restore_layer_on_meta"
    monkeypatch.setattr(where, _noted_when_aside(resolve_name(where)))
    begin = _load_straight(upstream.initialize_layerwise_reload)
    monkeypatch.setattr(upstream, "initialize_layerwise_reload", begin)
    monkeypatch.setattr(yielding, "SHORT_S", 0.0)
    monkeypatch.setattr(yielding, "SLICE_S", 0.0)
    served = {name: param.clone() for name, param in second.named_parameters()}
    left = number

    def stop() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cancelled("the update was aborted")

    shapes = {name: tensor.shape for name, tensor in version(0).items()}
    coverage = Coverage(second, shapes, set())
    with pytest.raises(Cancelled), yielding.resting_by(stop), coverage.hollow():
        coverage.watch_loaders()
    for name, param in second.named_parameters():
        assert torch.equal(param, served[name]), name
        assert not hasattr(param, "weight_loader"), name
    # The next update is as any other.
    begin(second)
    with torch.no_grad():
        Model.load_weights(second, version(1).items())
    _load_straight(upstream.finalize_layerwise_reload)(
        second, SimpleNamespace(dtype=torch.float32)
    )
    arena.flip()
    assert shows(live, 1)


class Halves(torch.nn.Module):
    """A weight of two parts, and a shape that each of them brings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Module()
        self.linear.quant_method = Rounded()
        self.linear.quant_method.create_weights(self.linear)
        shape = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), False)
        self.linear.weight_shape = shape
        self.linear.weight.weight_loader = self._load_half
        shape.weight_loader = lambda param, tensor, _: param.data.copy_(tensor)

    def _load_half(self, param: Any, tensor: torch.Tensor, half: int) -> None:
        param.data.narrow(0, half * len(tensor), len(tensor)).copy_(tensor)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            half, _, key = name.partition(".")
            param = getattr(self.linear, key)
            param.weight_loader(param, tensor, int(half))


@pytest.mark.parametrize("order", [("0", "1"), ("1", "0")])
def test_a_repeated_tensor_may_arrive_after_its_layer_is_complete(
    arena: Arena, order: tuple[str, str]
) -> None:
    last = order[-1]
    parts = {
        f"{half}.{key}": tensor
        for half in order
        for key, tensor in (
            ("weight", torch.randn(SIZE // 2, 2 * SIZE)),
            ("weight_shape", torch.tensor([SIZE // 2, 2 * SIZE])),
        )
    }
    live = Halves()
    live.load_weights(parts.items())
    live.linear.quant_method.process_weights_after_loading(live.linear)
    wanted = live.linear.weight.clone()
    with torch.no_grad():
        for param in live.parameters():
            param.data = in_arena(arena, torch.zeros_like(param))
    arena.consolidate()
    arena.pair()
    second = second_of(live, arena, Halves)
    required = {"linear.weight": (SIZE, 2 * SIZE), "linear.weight_shape": (2,)}
    shapes = {name: torch.Size(shape) for name, shape in required.items()}
    for left_out in (f"{last}.weight", None):
        _load_straight(upstream.initialize_layerwise_reload)(second)
        coverage = Coverage(second, shapes, set())
        coverage.watch(second.load_weights)
        with torch.no_grad():
            for name, tensor in parts.items():
                before = coverage.num_loads
                if name != left_out:
                    Halves.load_weights(second, [(name, tensor)])
                    assert coverage.num_loads > before, name
        short = coverage.short(set(coverage.fills))
        assert short == ([] if left_out is None else ["linear.weight"])
        config = SimpleNamespace(dtype=torch.float32)
        _load_straight(upstream.finalize_layerwise_reload)(second, config)
        coverage.unwatch()
        assert not hasattr(second.linear.weight, "weight_loader")
    assert torch.equal(second.linear.weight, wanted)


class MarlinLinearKernel:
    """The name of a kernel that moves a bias when it processes it."""


def test_a_bias_that_its_kernel_would_move_out_of_its_place_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = processed(0).linear
    layer.quant_method.kernel = MarlinLinearKernel()
    monkeypatch.setitem(PROVED, "cuda", {("Rounded", "MarlinLinearKernel")})
    assert quantized_obstacle(layer, "cuda", 1) is None
    layer.bias = torch.nn.Parameter(torch.zeros(SIZE), requires_grad=False)
    assert "has a bias that MarlinLinearKernel permutes" in quantized_obstacle(
        layer, "cuda", 1
    )


def test_a_constant_that_graphs_are_compiled_with_may_not_change() -> None:
    live, second = processed(0), processed(1)
    live.linear.quant_method.shift = second.linear.quant_method.shift = 0.5
    require_same_numbers(live, second, {"linear.weight"})
    second.linear.quant_method.shift = 0.25
    require_same_numbers(live, second, {"plain.weight"})
    with pytest.raises(WeightsMismatch, match=r"shift of layer linear is 0\.25"):
        require_same_numbers(live, second, {"linear.weight"})
