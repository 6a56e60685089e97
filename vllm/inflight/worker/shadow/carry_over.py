"""The remainder: what an update does not replace, brought up to what is served.

The second set holds the version before, so a subset alone would put old values back.
What differs between the two sets is known by name (`ShadowModel.behind`), from the
first write on; what of it was not written anew is copied here, and no more. So a subset
costs what it and the commit before it changed.

Nothing here writes to what is served. Tensors are copied into memory of the second
set's own. A weight that the CPU build has packed away is shared by both sets instead:
a load makes a new packing and leaves the old one alone. Where a weight was packed and
kept (embeddings, heads), the packing may look into it, and is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from vllm.inflight.worker.model.cpu_packing import UNPACKED
from vllm.inflight.worker.model.hidden_weights import PACKED
from vllm.inflight.worker.model.layers import layers, parameters
from vllm.inflight.worker.model.quantized import kept
from vllm.inflight.worker.shadow.parameters import is_mirrored
from vllm.inflight.worker.shadow.shadow_model import ShadowModel

Layers = tuple[torch.nn.Module, torch.nn.Module]
"""The same layer of the live tree, and of the second."""


def copy_unsent(
    shadow: ShadowModel, begun: set[str], between: Callable[[int], None]
) -> int:
    """Copy what the second set is behind in, and an update has not written anew.

    Args:
        shadow: the second set, in kernel format, with no load under way.
        begun: the parameters that the update has written; they stay `behind`.
        between: called after each parameter with the bytes copied so far; what it
            raises ends this, and the others stay behind.

    Returns:
        how many parameters were copied.

    """
    assert shadow.module is not None
    if shadow.behind <= begun:
        return 0
    num_bytes, num_layers = _carry_quantised(shadow, begun, between)
    served = {name: param for name, _, _, param in parameters(shadow.live)}
    names = sorted(shadow.behind - begun - shadow.quantised)
    owners = {} if is_mirrored(shadow.module) else owners_of(shadow)
    for name in names:
        param = served[name]
        shadow.module.get_parameter(name).copy_(param, non_blocking=True)
        for live, layer in owners.get(name, ()):
            if UNPACKED in vars(live):
                vars(layer)[UNPACKED] = vars(live)[UNPACKED]
            elif param.numel():
                _pack(layer)
            elif PACKED in vars(live):
                vars(layer)[PACKED] = vars(live)[PACKED]
        shadow.behind.discard(name)
        num_bytes += param.nbytes
        between(num_bytes)
    return len(names) + num_layers


def _carry_quantised(
    shadow: ShadowModel, begun: set[str], between: Callable[[int], None]
) -> tuple[int, int]:
    """The same for quantised layers, which are copied as they are processed.

    Returns:
        bytes and parameters, in load format, that were carried over.

    """
    assert shadow.module is not None
    stale = shadow.quantised & shadow.behind - begun
    paths = {name.rpartition(".")[0] for name in stale}
    num_bytes = 0
    for (path, live), (_, layer) in zip(
        layers(shadow.live), layers(shadow.module), strict=True
    ):
        if path not in paths:
            continue
        for key, param in live._parameters.items():
            if param is not None:
                layer.get_parameter(key).copy_(param, non_blocking=True)
                num_bytes += param.nbytes
        for a, b, name in kept(live, layer):
            vars(b)[name] = vars(a)[name]
        shadow.behind -= {n for n in stale if n.rpartition(".")[0] == path}
        between(num_bytes)
    return num_bytes, len(stale)


def retie(shadow: ShadowModel, names: Iterable[str]) -> None:
    """Pack again what shares one of these weights with the layer that was loaded.

    The layerwise reload packs the layer a tensor was sent for; a head tied to the
    embedding gets the new weight with it but keeps its old packing.
    """
    assert shadow.module is not None
    if is_mirrored(shadow.module):
        return  # nothing is packed
    owners = owners_of(shadow)
    for name in names:
        layers = owners.get(name, [])
        for _, layer in layers if len(layers) > 1 else ():
            _pack(layer)


def layer_siblings(shadow: ShadowModel, names: Iterable[str]) -> set[str]:
    """These parameters, and those that a load of these may have spoilt.

    The layerwise reload makes a layer anew with whatever was sent of it.
    """
    assert shadow.module is not None
    if is_mirrored(shadow.module):
        return set(names)
    paths = {name.rpartition(".")[0] for name in names}
    return {name for name in shadow.required if name.rpartition(".")[0] in paths}


def owners_of(shadow: ShadowModel) -> dict[str, list[Layers]]:
    """The layers that multiply with each weight, or look it up: several if tied."""
    owners: dict[int, list[Layers]] = {}
    for pair in _layers(shadow):
        if (weight := pair[1]._parameters.get("weight")) is not None:
            owners.setdefault(id(weight), []).append(pair)
    assert shadow.module is not None
    return {
        name: owners[id(param)]
        for name, param in shadow.module.named_parameters()
        if id(param) in owners
    }


def _layers(shadow: ShadowModel) -> Iterator[Layers]:
    assert shadow.module is not None
    for (_, a), (_, b) in zip(layers(shadow.live), layers(shadow.module), strict=True):
        yield a, b


def _pack(layer: torch.nn.Module) -> None:
    method = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)
