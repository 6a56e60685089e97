"""The flip: live and shadow weights are exchanged, and no other code has to know.

Objects stay, contents move. Every Parameter of the live model is the same object
before and after. So compiled graphs and tied layers, which refer to it, need no change.
Two flips restore the first state, so a rollback is as fast as a commit.

- `Exchange`, on the CPU build: every pair of tensors exchanges its storage.
- `Swap` (swap.py), with delta staging: the elements of a log are exchanged with the
  live ones. The addresses stay.
- `PageFlip`, on a GPU with an arena: two address ranges exchange their pages. The
  addresses stay, and so do captured graphs.
- `Copy`, on a GPU without an arena: the new weights are copied over the live ones.
  There is no rollback.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm.inflight.errors import ArenaTorn
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model import registrations
from vllm.inflight.worker.model.kinds import cpu_packing, quantized
from vllm.inflight.worker.model.kinds.cpu_packing import UNPACKED
from vllm.inflight.worker.model.kinds.hidden_weights import PACKED
from vllm.inflight.worker.model.layers import (
    layers,
    parameters,
    parameters_by_name,
)
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.shadow.swap import Swap

Tensors = tuple[torch.Tensor, torch.Tensor]
"""A tensor of the live model and its counterpart in the shadow model."""


class Flip(Protocol):
    """Exchanges live and shadow weights on one rank."""

    def __call__(self) -> float:
        """Exchange them; returns the seconds in which neither set was readable."""
        ...


def flip_of(shadow: ShadowModel) -> Flip:
    """The flip between a model and its shadow model, prepared in advance."""
    assert shadow.module is not None
    if shadow.log is not None:
        return Swap(shadow.log, parameters_by_name(shadow.live))
    if shadow.arenas:
        return PageFlip(shadow.arenas, shadow.device)
    if shadow.is_reversible:
        return Exchange(shadow.live, shadow.module)
    return Copy(shadow)


class Exchange:
    """Exchanges the storage of every pair of tensors of two module trees."""

    def __init__(self, live: torch.nn.Module, shadow: torch.nn.Module) -> None:
        self._params: list[Tensors] = []
        self._kept: list[tuple[Any, Any, str]] = []
        seen: set[int] = set()
        for (name, a), (_, b) in zip(layers(live), layers(shadow), strict=True):
            beside = vars(a).keys() & {PACKED, UNPACKED}
            self._kept += [(a, b, attribute) for attribute in beside]
            self._kept += quantized.kept(a, b)
            for key, param in a._parameters.items():
                other = b._parameters.get(key)
                if param is None or id(param) in seen:
                    continue  # a tied parameter is one object in two layers
                seen.add(id(param))
                if other is None or other.shape != param.shape:
                    raise RuntimeError(
                        f"{name}.{key} of the shadow model is "
                        f"{None if other is None else tuple(other.shape)}, the live "
                        f"one {tuple(param.shape)}"
                    )
                self._params.append((param, other))
        self._params += views(live, shadow)

    def __call__(self) -> float:
        """Exchange every pair, or none: an exception, Ctrl-C included, undoes all.

        Raises:
            ArenaTorn: some pairs are exchanged, and could not be exchanged back.
            BaseException: a pair could not be exchanged, so none is.

        """
        started = time.perf_counter()
        moved = [(a, b, a.data, b.data) for a, b in self._params]
        kept = [(vars(a), vars(b), name) for a, b, name in self._kept]
        kept_moved = [(a, b, name, a[name], b[name]) for a, b, name in kept]
        try:
            for a, b, of_a, of_b in moved:
                a.data, b.data = of_b, of_a
            for x, y, name, of_x, of_y in kept_moved:
                x[name], y[name] = of_y, of_x
        except BaseException as fault:
            try:
                for a, b, of_a, of_b in moved:
                    a.data, b.data = of_a, of_b
                for x, y, name, of_x, of_y in kept_moved:
                    x[name], y[name] = of_x, of_y
            except BaseException as error:
                raise ArenaTorn(f"{fault}; and undoing it: {error}") from error
            raise
        finally:
            registrations.changed()
        return time.perf_counter() - started


def views(live: torch.nn.Module, shadow: torch.nn.Module) -> list[Tensors]:
    """The buffers of both models that show a parameter in another shape.

    Mamba's layers read the weight of their convolution through such a buffer. It has to
    show the new weight when the parameter does.
    """
    for tree in (live, shadow):
        cpu_packing.show(tree)
    of_live, of_shadow = _storages(live), _storages(shadow)
    found = []
    for (name, a), (_, b) in zip(layers(live), layers(shadow), strict=True):
        for key, buffer in a._buffers.items():
            if buffer is None or (param := of_live.get(_storage(buffer))) is None:
                continue
            other = b._buffers.get(key)
            if other is None or of_shadow.get(_storage(other)) != param:
                raise RuntimeError(
                    f"{name}.{key} shows {param}, and that of the shadow model does not"
                )
            found.append((buffer, other))
    return found


def _storages(tree: torch.nn.Module) -> dict[int, str]:
    """Storage → the parameter that lies in it or was packed from it."""
    found = {}
    for name, layer, key, param in parameters(tree):
        unpacked = vars(layer).get(UNPACKED) if key == "weight" else None
        if param.numel():
            found[_storage(param if unpacked is None else unpacked)] = name
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PageFlip:
    """Exchanges the pages of one arena or several; a drafter has its own."""

    def __init__(self, arenas: Sequence[Arena], device: torch.device) -> None:
        self._arenas = arenas
        self._device = device

    def __call__(self) -> float:
        """Exchange the pages, once the running step has read the last of them.

        Waits only for the stream that computes. A device-wide wait would hang while a
        transfer is stalled.
        """
        torch.cuda.current_stream(self._device).synchronize()
        return flip_all(self._arenas)


def flip_all(arenas: Sequence[Arena]) -> float:
    """Exchange the pages of all arenas, or of none; returns the seconds.

    Raises:
        ArenaTorn: an arena is exchanged in part, or an earlier one could not be
            exchanged back.
        BaseException: an arena could not be exchanged, so none is.

    """
    seconds = 0.0
    done: list[Arena] = []
    for arena in arenas:
        try:
            seconds += arena.flip()
        except ArenaTorn:
            raise
        except BaseException as fault:
            for flipped in reversed(done):
                try:
                    flipped.flip()
                except BaseException as error:
                    raise ArenaTorn(f"{fault}; and going back: {error}") from error
            raise
        done.append(arena)
    return seconds


class Copy:
    """Copies every shadow parameter over the live one."""

    def __init__(self, shadow: ShadowModel) -> None:
        assert shadow.module is not None
        self._shadow = shadow
        self._pairs = [
            (param, other)
            for (*_, param), (*_, other) in zip(
                parameters(shadow.live), parameters(shadow.module), strict=True
            )
        ]

    def __call__(self) -> float:
        """Copy all parameters on the computing stream, between two steps."""
        stream = torch.cuda.current_stream(self._shadow.device)
        started = time.perf_counter()
        try:
            with torch.no_grad():
                for param, other in self._pairs:
                    param.copy_(other, non_blocking=True)
            self._shadow.busy = torch.cuda.Event(blocking=True)
            self._shadow.busy.record(stream)
            self._shadow.busy.synchronize()
        except BaseException as error:  # Ctrl-C, too: there is no rollback target
            raise ArenaTorn(f"copying the new weights broke off: {error!r}") from error
        return time.perf_counter() - started
