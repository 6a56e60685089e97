"""Carry-over: weights that an update does not send are copied from the live model.

The shadow weights are those of the version before. So a subset alone would bring old
values back. `ShadowModel.stale` has the names of the parameters in which live and
shadow weights may differ. Those that the update does not write are copied here, and no
others. So a subset costs what the subset and the commit before it have changed.

Nothing here writes to live weights. Tensors are copied into shadow memory. A weight
that the CPU build has packed is shared by both models instead: a load makes a new
packing and leaves the old one alone. Where a weight exists packed and unpacked
(embeddings, heads), the packing may refer to the weight, and is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from vllm.inflight.worker.model.kinds.cpu_packing import UNPACKED
from vllm.inflight.worker.model.kinds.hidden_weights import PACKED
from vllm.inflight.worker.model.kinds.quantized import kept
from vllm.inflight.worker.model.layers import layers, parameters_by_name
from vllm.inflight.worker.shadow.parameters import is_mirrored
from vllm.inflight.worker.shadow.shadow_model import ShadowModel

Layers = tuple[torch.nn.Module, torch.nn.Module]
"""The same layer of the live model and of the shadow model."""


def copy_unsent(
    shadow: ShadowModel, begun: set[str], between: Callable[[int], None]
) -> int:
    """Copy the stale parameters that the update has not written.

    Args:
        shadow: the shadow model, in kernel format, with no load under way.
        begun: the parameters that the update has written; they stay stale.
        between: called after each parameter with the bytes copied so far. An exception
            from it ends the copying, and the rest stays stale.

    Returns:
        the number of copied parameters.

    """
    assert shadow.module is not None
    if shadow.stale <= begun:
        return 0
    num_bytes, num_layers = _carry_quantised(shadow, begun, between)
    served = parameters_by_name(shadow.live)
    names = sorted(shadow.stale - begun - shadow.quantised)
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
        shadow.stale.discard(name)
        num_bytes += param.nbytes
        between(num_bytes)
    return len(names) + num_layers


def _carry_quantised(
    shadow: ShadowModel, begun: set[str], between: Callable[[int], None]
) -> tuple[int, int]:
    """Copy the stale quantised layers, in the form that processing has given them.

    Returns:
        bytes and parameters, in load format, that were copied.

    """
    assert shadow.module is not None
    stale = shadow.quantised & shadow.stale - begun
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
        shadow.stale -= {n for n in stale if n.rpartition(".")[0] == path}
        between(num_bytes)
    return num_bytes, len(stale)


def retie(shadow: ShadowModel, names: Iterable[str]) -> None:
    """Pack again the layers that share one of these weights with a loaded layer.

    The layerwise reload packs only the layer that a tensor was sent for. A head tied to
    the embedding gets the new weight, but keeps its old packing.
    """
    assert shadow.module is not None
    if is_mirrored(shadow.module):
        return  # shadow parameters are never packed
    owners = owners_of(shadow)
    for name in names:
        layers = owners.get(name, [])
        for _, layer in layers if len(layers) > 1 else ():
            _pack(layer)


def layer_siblings(shadow: ShadowModel, names: Iterable[str]) -> set[str]:
    """These parameters, and those that a load of these may have damaged.

    The layerwise reload makes a layer anew from the tensors that were sent for it.
    """
    assert shadow.module is not None
    if is_mirrored(shadow.module):
        return set(names)
    paths = {name.rpartition(".")[0] for name in names}
    return {name for name in shadow.required if name.rpartition(".")[0] in paths}


def owners_of(shadow: ShadowModel) -> dict[str, list[Layers]]:
    """The layers that use each weight; several layers if the weight is tied."""
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
