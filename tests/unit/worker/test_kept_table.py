"""The table of kept tensors: what processing leaves as it is, and what it does not."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from tests.support.shadow_on_host import shadow_of
from vllm.inflight import upstream
from vllm.inflight.worker.delta.destinations import Destinations
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.replay_plan import Plan, located
from vllm.inflight.worker.shadow.parameters import (
    make_copy,
    make_hollow,
    mirror_parameters,
)
from vllm.inflight.worker.staging.kept_table import Trial, fill_kept, moved
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint

ROWS, COLUMNS = 6, 8
HALVES = ("gate", "up")
"""The tensors that a layer is fused of."""
FP8 = torch.float8_e4m3fn

Layer = Any


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class Method(upstream.QuantizeMethodBase):
    """Bytes of two fused matrices and a scale for each row, then processed somehow."""

    def __init__(self, process: Callable[[Layer], None]) -> None:
        self._process = process

    def create_weights(self, layer: Layer, *args: Any, **kwargs: Any) -> None:
        layer.weight = parameter(torch.empty(2 * ROWS, COLUMNS, dtype=FP8))
        layer.weight_scale = parameter(torch.empty(2 * ROWS, 1))
        for param in (layer.weight, layer.weight_scale):
            param.weight_loader = load_half

    def apply(self, layer: Layer, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("nothing is computed here")

    def process_weights_after_loading(self, layer: Layer) -> None:
        self._process(layer)


def load_half(param: torch.Tensor, tensor: torch.Tensor, half: int) -> None:
    param.data.narrow(0, half * len(tensor), len(tensor)).copy_(tensor)


class Model(torch.nn.Module):
    def __init__(self, process: Callable[[Layer], None]) -> None:
        super().__init__()
        self.fused = torch.nn.Module()
        self.fused.quant_method = Method(process)
        self.fused.quant_method.create_weights(self.fused)
        self.packed_modules_mapping = {"fused": list(HALVES)}

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            half, _, key = name.partition(".")
            param = self.fused.get_parameter(key)
            param.weight_loader(param, tensor, HALVES.index(half))


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for half in HALVES:
        weight = torch.randn(ROWS, COLUMNS, generator=random)
        tensors[f"{half}.weight"] = weight.to(FP8)
        tensors[f"{half}.weight_scale"] = torch.rand(ROWS, 1, generator=random) + 0.1
    return tensors


def engine(process: Callable[[Layer], None], *, is_logged: bool = True) -> Any:
    """The shadow model of an engine that was started from `checkpoint()`."""
    live = Model(process)
    live.load_weights(checkpoint().items())
    live.fused.quant_method.process_weights_after_loading(live.fused)
    with torch.device("meta"):
        second = Model(process)
        record_metadata_for_reloading(second)
    for layer in second.modules():
        upstream.get_layerwise_info(layer).restore_device = torch.device("cpu")
    shapes = {f"fused.{n}": p.shape for n, p in second.fused.named_parameters()}
    if is_logged:
        make_hollow(live, second, torch.device("cpu"))
    else:
        mirror_parameters(live, second, make_copy)
    shadow = shadow_of(live, second)
    shadow.log = SimpleNamespace() if is_logged else None
    shadow.plan = Plan(is_replayed=not is_logged)
    shadow.required, shadow.quantised = shapes, set(shapes)
    names = {
        "fused.weight": ["gate.weight", "up.weight"],
        "fused.weight_scale": ["gate.weight_scale", "up.weight_scale"],
    }
    shadow.places = SimpleNamespace(
        params_of=lambda name: {param for param, of in names.items() if name in of}
    )
    shadow.start_checkpoint = StartCheckpoint(
        {name: tuple(t.shape) for name, t in checkpoint().items()},
        {n: str(t.dtype).removeprefix("torch.") for n, t in checkpoint().items()},
    )
    if is_logged:
        quantized.watch(live, second, lambda name, content: None)
    return shadow


def as_it_is(layer: Layer) -> None:
    layer.weight = parameter(layer.weight.data)


def turned(layer: Layer) -> None:
    layer.weight = parameter(layer.weight.data.t())


def turned_and_copied(layer: Layer) -> None:
    layer.weight = parameter(layer.weight.data.t().contiguous())


def in_another_shape(layer: Layer) -> None:
    layer.weight_scale = parameter(layer.weight_scale.data.view(-1))


def under_other_names(layer: Layer) -> None:
    weight, scale = layer.weight.data, layer.weight_scale.data
    del layer.weight, layer.weight_scale
    layer.register_parameter("bytes", parameter(weight))
    layer.register_parameter("weight_scale", parameter(scale))


def beside_a_constant(layer: Layer) -> None:
    layer.workspace = parameter(torch.zeros(4, dtype=torch.int32))


KEPT = [as_it_is, turned, turned_and_copied, in_another_shape, beside_a_constant]


@pytest.mark.parametrize("is_logged", [True, False])
@pytest.mark.parametrize("process", KEPT)
def test_bytes_that_a_kernel_reads_as_they_are_have_a_place(
    process: Callable[[Layer], None], is_logged: bool
) -> None:
    shadow = engine(process, is_logged=is_logged)
    fill_kept(shadow)
    assert shadow.unkept == {}
    live = dict(shadow.live.named_parameters())
    for name, tensor in checkpoint().items():
        entry = shadow.kept.known(name)
        places = Destinations.of(entry)
        assert places is not None and places.has_all
        for copied in located(entry, live).copies:
            offset, shape, stride = copied.part
            part = tensor.as_strided(shape, stride, offset)
            assert torch.equal(copied.target.view(torch.uint8), part.view(torch.uint8))
    if is_logged:
        assert all(param.is_meta for param in shadow.module.parameters())
    else:
        assert shadow.stale == shadow.quantised  # they hold patterns


def counted(monkeypatch: pytest.MonkeyPatch, load: Callable[..., None]) -> list[int]:
    """The number of tensors of each call of the model's loader, from now on."""
    calls: list[int] = []

    def load_weights(self: Model, weights: Any) -> None:
        calls.append(0)

        def each() -> Any:
            for pair in weights:
                calls[-1] += 1
                yield pair

        load(self, each())

    monkeypatch.setattr(Model, "load_weights", load_weights)
    return calls


def test_a_layer_is_recorded_in_one_call_of_the_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call walks through the whole model; a layer of experts is many tensors."""
    shadow = engine(as_it_is)
    calls = counted(monkeypatch, Model.load_weights)
    fill_kept(shadow)
    assert shadow.unkept == {} and len(shadow.kept) == len(checkpoint())
    assert set(calls) == {len(checkpoint())}


def test_a_layer_whose_loader_keeps_tensors_is_recorded_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Model.load_weights
    shadow = engine(as_it_is)
    calls = counted(monkeypatch, lambda self, weights: load(self, list(weights)))
    fill_kept(shadow)
    assert shadow.unkept == {} and len(shadow.kept) == len(checkpoint())
    # The first call has ended at its first tensor.
    assert calls[: 1 + len(checkpoint())] == [1] * (1 + len(checkpoint()))


def requantised(layer: Layer) -> None:
    """To the largest of the scales, as with one scale per tensor."""
    scale = layer.weight_scale.max()
    numbers = layer.weight.to(torch.float32) * layer.weight_scale / scale
    layer.weight = parameter(numbers.to(FP8))
    layer.weight_scale = parameter(scale.expand(2 * ROWS, 1).clone())


def requantised_where_scales_differ(layer: Layer) -> None:
    scales = layer.weight_scale
    if not bool((scales == scales[0]).all()):
        requantised(layer)


def permuted(layer: Layer) -> None:
    rows = layer.weight.data.view(torch.uint8).view(2 * ROWS, 2, COLUMNS // 2)
    layer.weight = parameter(rows.transpose(1, 2).reshape(2 * ROWS, COLUMNS).view(FP8))


def two_elements_exchanged(layer: Layer) -> None:
    flat = layer.weight.data.view(torch.uint8).view(-1)
    flat[[3, 40]] = flat[[40, 3]]


def without_negative_zeros(layer: Layer) -> None:
    flat = layer.weight.data.view(torch.uint8).view(-1)
    flat[flat == 0x80] = 0


def quantised_again(layer: Layer) -> None:
    """To the scales that it has, in float16: exact for scales of usual sizes."""
    numbers = layer.weight.to(torch.float16) * layer.weight_scale.to(torch.float16)
    again = numbers.to(torch.float32) / layer.weight_scale.to(torch.float16)
    again = torch.where(layer.weight_scale == 0, layer.weight.float(), again)
    layer.weight = parameter(again.clamp(-448, 448).to(FP8))


def without_scales_of_zero(layer: Layer) -> None:
    layer.weight_scale.data[layer.weight_scale == 0] = 1


def not_too_small(layer: Layer) -> None:
    scale = layer.weight_scale.data
    scale[(scale > 0) & (scale < 1e-10)] = 1e-10


def sums_beside(layer: Layer) -> None:
    sums = layer.weight.data.to(torch.float32).sum(1)
    layer.sums = parameter(sums)


def a_sum_in_a_buffer(layer: Layer) -> None:
    layer.register_buffer("total", layer.weight.data.to(torch.float32).sum())


def a_number_in_python(layer: Layer) -> None:
    layer.largest = float(layer.weight_scale.max())


def a_copy_beside(layer: Layer) -> None:
    layer.copy = parameter(layer.weight.data.clone())


def padded(layer: Layer) -> None:
    wide = torch.zeros(2 * ROWS, 2 * COLUMNS, dtype=torch.uint8)
    wide[:, :COLUMNS] = layer.weight.data.view(torch.uint8)
    layer.weight = parameter(wide.view(FP8))


def zero_in_one_place(layer: Layer) -> None:
    layer.weight.data.view(torch.uint8)[1, 2] = 0


def refusing(layer: Layer) -> None:
    if bool((layer.weight_scale > 1e9).any()):
        raise ValueError("large scales")


UNKEPT: Mapping[Callable[[Layer], None], str] = {
    requantised: "reads weight",
    requantised_where_scales_differ: "reads weight",
    permuted: "reads weight in another form",
    two_elements_exchanged: "reads weight in another form",
    without_negative_zeros: "reads weight in another form",
    quantised_again: "reads weight in another form",
    without_scales_of_zero: "reads weight_scale in another form",
    not_too_small: "reads weight_scale in another form",
    sums_beside: "computes sums",
    a_sum_in_a_buffer: "computes total",
    a_number_in_python: "computes numbers",
    a_copy_beside: "weight is served twice",
    padded: "reads weight in another form",
    zero_in_one_place: "reads weight in another form",
    refusing: "large scales",
}


@pytest.mark.parametrize("is_logged", [True, False])
@pytest.mark.parametrize("process", UNKEPT)
def test_a_layer_whose_processing_does_more_is_left_out_with_the_reason(
    process: Callable[[Layer], None], is_logged: bool
) -> None:
    shadow = engine(process, is_logged=is_logged)
    fill_kept(shadow)
    assert len(shadow.kept) == 0
    assert UNKEPT[process] in shadow.unkept["fused"]
    # The next update loads the layer as any other.
    assert not upstream.get_layerwise_info(shadow.module.fused).can_load()


def test_an_engine_without_memory_for_patterns_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    shadow = engine(as_it_is)
    monkeypatch.setattr(shadow, "load", full)
    fill_kept(shadow)
    assert "was not tried: OutOfMemoryError('no memory')" in shadow.unkept["fused"]
    assert not upstream.get_layerwise_info(shadow.module.fused).can_load()


def test_an_engine_with_a_layer_unlike_all_others_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unlike(*_: Any) -> None:
        raise KeyError("weight")

    shadow = engine(as_it_is)
    monkeypatch.setattr(Trial, "_look", unlike)
    fill_kept(shadow)
    assert "was not tried: KeyError('weight')" in shadow.unkept["fused"]
    assert not upstream.get_layerwise_info(shadow.module.fused).can_load()


def test_a_layer_that_the_start_checkpoint_does_not_fill_is_left_out() -> None:
    shadow = engine(as_it_is)
    known = shadow.start_checkpoint.known
    short = {name: form for name, form in known.items() if name != "up.weight"}
    shadow.start_checkpoint = SimpleNamespace(known=short)
    fill_kept(shadow)
    assert "does not fill all of it" in shadow.unkept["fused"]
    shadow = engine(as_it_is)
    shadow.start_checkpoint = StartCheckpoint({})
    fill_kept(shadow)
    assert len(shadow.kept) == 0 and shadow.unkept == {}


@pytest.mark.parametrize(
    ("view", "strides", "expected"),
    [
        ((0, (4, 3), (3, 1)), (3, 1), (0, (4, 3), (3, 1))),
        ((6, (2, 3), (3, 1)), (1, 4), (2, (2, 3), (1, 4))),  # turned rows
        ((1, (4, 2), (3, 1)), (1, 4), (4, (4, 2), (1, 4))),  # turned columns
        ((5, (), ()), (1, 4), (9, (), ())),
        ((0, (12,), (1,)), (1, 4), None),  # flattened
        ((0, (2, 2), (6, 1)), (1, 4), None),  # every other row
    ],
)
def test_a_view_is_followed_into_a_tensor_with_other_strides(
    view: Any, strides: tuple[int, int], expected: Any
) -> None:
    shape = torch.Size((4, 3))
    found = moved(view, shape, strides)
    assert found == expected
    if found is None:
        return
    numbers = torch.arange(12).view(shape)
    held = torch.empty(12, dtype=torch.int64)
    held.as_strided(shape, strides).copy_(numbers)
    offset, size, step = view
    at, _, steps = found
    assert torch.equal(
        held.as_strided(size, steps, at), numbers.as_strided(size, step, offset)
    )
