"""Quantised layers: which can be updated, and what belongs to a version of them.

Kernels do not multiply with the weights as a checkpoint has them: loading transposes,
packs or quantises them. So the shadow model has the parameters that loading has left in
the live layer. Every update goes through upstream's layerwise reload, which loads a
layer beside them, processes it and copies the result into them. A kernel may keep a
part of a version beside the parameters; that part is flipped with them.

With delta staging the parameters of the shadow model have no memory, so that copy does
nothing. What processing has made of a layer is compared with the live layer instead;
see `watch`.

Only kernels that were shown to equal a fresh engine are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import CAUSES, Cause, WeightsMismatch
from vllm.inflight.worker.model.kinds import moe
from vllm.inflight.worker.model.layers import layers

PROVED: dict[str, set[tuple[str, str]]] = {
    "cpu": {
        ("CompressedTensorsW8A8Int8", "CPUInt8ScaledMMLinearKernel"),
        ("CompressedTensorsW8A8Fp8", "CPUFp8ChannelWiseScaledMMLinearKernel"),
        ("CompressedTensorsW8A8Fp8", "ChannelWiseTorchFP8ScaledMMLinearKernel"),
        ("CompressedTensorsWNA16", "CPUWNA16LinearKernel"),
        ("Fp8PtpcOnlineLinearMethod", "CPUFp8ChannelWiseScaledMMLinearKernel"),
        ("Fp8PtpcOnlineLinearMethod", "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    },
    "cuda": {
        ("CompressedTensorsW8A8Int8", "CutlassInt8ScaledMMLinearKernel"),
        ("CompressedTensorsW8A8Fp8", "CutlassFP8ScaledMMLinearKernel"),
        ("CompressedTensorsWNA16", "MacheteLinearKernel"),
        ("CompressedTensorsWNA16", "MarlinLinearKernel"),
        ("Fp8LinearMethod", "CutlassFp8BlockScaledMMKernel"),
        ("Fp8LinearMethod", "CutlassFP8ScaledMMLinearKernel"),
        ("Fp8PerBlockOnlineLinearMethod", "CutlassFp8BlockScaledMMKernel"),
        ("Fp8PerTensorOnlineLinearMethod", "CutlassFP8ScaledMMLinearKernel"),
        ("Fp8PtpcOnlineLinearMethod", "CutlassFP8ScaledMMLinearKernel"),
    },
}
"""Device → schemes and kernels that were shown to equal a fresh engine."""

PROVED_ON_RANKS: dict[str, set[tuple[str, str]]] = {
    "cpu": {
        ("CompressedTensorsW8A8Int8", "CPUInt8ScaledMMLinearKernel"),
        ("CompressedTensorsW8A8Fp8", "ChannelWiseTorchFP8ScaledMMLinearKernel"),
    },
    "cuda": {
        ("CompressedTensorsW8A8Int8", "CutlassInt8ScaledMMLinearKernel"),
        ("CompressedTensorsW8A8Fp8", "CutlassFP8ScaledMMLinearKernel"),
        ("CompressedTensorsWNA16", "MacheteLinearKernel"),
        ("CompressedTensorsWNA16", "MarlinLinearKernel"),
        ("Fp8LinearMethod", "CutlassFp8BlockScaledMMKernel"),
        ("Fp8PerBlockOnlineLinearMethod", "CutlassFp8BlockScaledMMKernel"),
    },
}
"""The same for several ranks."""

AGREED_UPON = ("Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod")
"""Schemes whose ranks compute a scale together, in a collective of the group that
decodes. A collective of the staging thread would take the place of another one, and
would wait for a failed rank as long as the group waits."""

KEPT = {"CPUInt8ScaledMMLinearKernel": ("dnnl_handler",)}
"""Kernel → attributes in which it keeps a part of a version.

On a CPU only, where a flip exchanges objects and not pages.
"""

CONSTANT = {"CPUFp8ChannelWiseScaledMMLinearKernel": ("_unit_block_scale",)}
"""Kernel → attributes with tensors that are the same in each version."""

PERMUTES_BIAS = ("MarlinLinearKernel",)
"""Kernels that give a layer's bias other memory when they process it.

A bias is loaded where it lies, so a flip would exchange the wrong memory.
"""

CHANNEL = "channel"
STRATEGIES = {"CompressedTensorsWNA16": "group"}
"""Scheme → the one tested strategy of compressed-tensors.

For other schemes it is a scale per output.
"""

NUMBERS = {"CompressedTensorsWNA16": {"num_bits": 4, "symmetric": True}}
"""Scheme → its other tested settings: int4 without zero points."""

KERNELS = "kernel", "fp8_linear"
"""Attributes in which a scheme keeps its kernel."""

SCALARS = bool, int, float, str, torch.dtype
"""Types that a compiled graph treats as constants."""


def is_quantised(layer: torch.nn.Module) -> bool:
    """Whether a layer's weights are processed after they are loaded."""
    method = getattr(layer, "quant_method", None)
    return not (
        method is None
        or type(method)
        in (upstream.UnquantizedLinearMethod, upstream.UnquantizedEmbeddingMethod)
        or moe.is_experts(method)
        or has_cache_scales(layer)
    )


def has_cache_scales(layer: torch.nn.Module) -> bool:
    """Whether it is an attention layer whose checkpoint may scale its KV cache."""
    method = getattr(layer, "quant_method", None)
    return isinstance(method, upstream.BaseKVCacheMethod)


def is_processed(layer: torch.nn.Module) -> bool:
    """Whether loading replaces a layer's parameters by others."""
    return is_quantised(layer) or has_cache_scales(layer)


def quantised_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model whose weights are processed after loading."""
    return [layer for _, layer in layers(model) if is_quantised(layer)]


def quantized_obstacle(layer: Any, device: str, num_ranks: int) -> str | None:
    """Why a quantised layer cannot be updated on so many devices; None if it can."""
    scheme, kernel = scheme_of(layer), kernel_of(layer)
    pair = type(scheme).__name__, type(kernel).__name__
    at = f" and {pair[1]}" if kernel is not None else ""
    if pair not in PROVED[device]:
        return (
            f"quantises its weights with {pair[0]}{at}, which has not been shown to "
            f"equal a fresh engine after an update ({device})"
        )
    if num_ranks > 1 and pair[0] in AGREED_UPON:
        return (
            f"quantises its weights with {pair[0]}, whose {num_ranks} ranks agree on "
            "their scales in the group that decodes"
        )
    if num_ranks > 1 and pair not in PROVED_ON_RANKS[device]:
        return (
            f"quantises its weights with {pair[0]}{at}, which has not been shown to "
            f"equal a fresh engine of {num_ranks} ranks after an update ({device})"
        )
    is_static = getattr(scheme, "is_static_input_scheme", False)
    if is_static or getattr(layer, "input_scale", None) is not None:
        return f"has scales of activations in its checkpoint ({pair[0]})"
    seen = STRATEGIES.get(pair[0], CHANNEL)
    strategy = getattr(scheme, "strategy", seen)  # an enum, or its value
    if (strategy := getattr(strategy, "value", strategy)) != seen:
        return f"has a scale per {strategy} ({pair[0]}), not per {seen}"
    for name, value in NUMBERS.get(pair[0], {}).items():
        if (given := getattr(scheme, name)) != value:
            return f"has {name}={given} ({pair[0]}), and {value} was seen"
    if pair[1] in PERMUTES_BIAS and getattr(layer, "bias", None) is not None:
        return f"has a bias that {pair[1]} permutes, which has not been tested"
    known = (*KEPT.get(pair[1], ()), *CONSTANT.get(pair[1], ()))
    for owner in {id(o): o for o in (scheme, kernel, layer.quant_method)}.values():
        for name, value in vars(owner).items():
            if name not in known and _holds_tensor(value):
                return f"keeps weights in {type(owner).__name__}.{name}"
    return None


def scheme_of(layer: Any) -> Any:
    """The object that decides how a layer's weights are processed."""
    return getattr(layer, "scheme", None) or layer.quant_method


def kernel_of(layer: object) -> Any:
    """The layer's kernel; None if that is no object of its own."""
    scheme = scheme_of(layer)
    return next((vars(scheme)[k] for k in KERNELS if k in vars(scheme)), None)


def kept(live: torch.nn.Module, second: torch.nn.Module) -> Iterator[tuple[Any, ...]]:
    """(kernel, shadow kernel, attribute) of each part of a version beside the
    parameters."""
    if not is_quantised(live):
        return
    a, b = kernel_of(live), kernel_of(second)
    for name in KEPT.get(type(a).__name__, ()):
        if name in vars(a):  # with AMX, all parts are parameters
            yield a, b, name


def watch(
    live: torch.nn.Module,
    second: torch.nn.Module,
    processed: Callable[[str, torch.Tensor], None],
) -> None:
    """Have the processing of a quantised layer of the shadow model tell its results.

    Args:
        live: the live model.
        second: the shadow model.
        processed: called with the name of each parameter that the live layer has, and
            its content in the shadow layer, after that was processed.

    """
    keys: dict[torch.nn.Module, list[tuple[str, str]]] = {}
    methods: dict[int, Any] = {}
    for (path, a), (_, b) in zip(layers(live), layers(second), strict=True):
        if is_quantised(b):
            own = (key for key, param in a._parameters.items() if param is not None)
            keys[b] = [(f"{path}.{key}" if path else key, key) for key in own]
            methods[id(b.quant_method)] = b.quant_method

    def behind(original: Callable[[torch.nn.Module], None]) -> Callable[..., None]:
        def process(layer: torch.nn.Module) -> None:
            original(layer)
            for name, key in keys[layer]:
                processed(name, getattr(layer, key).data)

        return process

    for method in methods.values():
        method.process_weights_after_loading = behind(
            method.process_weights_after_loading
        )


def difference(live: torch.nn.Module, second: torch.nn.Module) -> str | None:
    """How the processing of two copies of a layer differs; None if it does not."""
    for of in (scheme_of, kernel_of):
        a, b = type(of(live)).__name__, type(of(second)).__name__
        if a != b:
            return f"a second copy has {b} where the first has {a}"
    return None


def require_same_numbers(
    live: torch.nn.Module, second: torch.nn.Module, begun: set[str]
) -> None:
    """Reject a version that would need another number in Python.

    Compiled graphs contain the live number, and a flip does not reach it.

    Args:
        live: the live model.
        second: the shadow model, loaded.
        begun: the parameters of quantised layers that were loaded.

    Raises:
        WeightsMismatch: names the layer and the number.

    """
    paths = {name.rpartition(".")[0] for name in begun}
    if not paths:
        return
    for (path, a), (_, b) in zip(layers(live), layers(second), strict=True):
        if path not in paths or not is_quantised(a):
            continue
        for x, y in (
            (a, b),
            (scheme_of(a), scheme_of(b)),
            (kernel_of(a), kernel_of(b)),
        ):
            for name, value in vars(x).items() if x is not None else ():
                other = vars(y).get(name, value)
                if isinstance(value, SCALARS) and other != value:
                    raise WeightsMismatch(
                        f"with these weights {name} of layer {path} is {other!r}; "
                        f"graphs are compiled with {value!r}",
                        remedy=CAUSES[Cause.MODEL][1],
                    )


def unused_scales(model: torch.nn.Module) -> tuple[str, ...]:
    """Endings of tensor names without effect, unless a KV cache is quantised."""
    if not any(has_cache_scales(layer) for layer in model.modules()):
        return ()
    return tuple(f".{of}_{what}" for of in "qkv" for what in ("scale", "zero_point"))


@contextmanager
def put_aside(model: torch.nn.Module) -> Iterator[None]:
    """Context in which upstream's processing of a model skips processed layers."""
    methods = [
        (layer, layer.quant_method) for _, layer in layers(model) if is_processed(layer)
    ]
    for layer, _ in methods:
        layer.quant_method = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, method in methods:
            layer.quant_method = method


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)
