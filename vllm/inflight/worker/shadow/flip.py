"""The flip: two sets of weights change places, and nobody has to be told.

Objects stay, contents move: every Parameter of the live tree is the same object
before and after, so nothing that refers to it (compiled graphs, tied layers)
notices. Doing it twice is doing nothing, which is what makes a rollback as fast as a
commit.

`Exchange`, on the CPU build: every pair of tensors exchanges its storage.
`PageFlip`, on a GPU: two ranges of memory exchange their pages, so that even the
addresses stay, and with them every captured graph.
`Copy`, on a GPU without that: the new set is copied over the live one. There is no
way back from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm.inflight.errors import ArenaTorn
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model import cpu_packing, quantized
from vllm.inflight.worker.model.cpu_packing import UNPACKED
from vllm.inflight.worker.model.hidden_weights import PACKED
from vllm.inflight.worker.model.layers import layers, parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel

Tensors = tuple[torch.Tensor, torch.Tensor]
"""Of the live tree and of the other."""


class Flip(Protocol):
    """Exchanges the two sets of one rank."""

    def __call__(self) -> float:
        """Exchange them; returns the seconds for which neither could be read."""
        ...


def flip_of(shadow: ShadowModel) -> Flip:
    """The flip between a model and its shadow, prepared before it is needed."""
    assert shadow.module is not None
    if shadow.arenas:
        return PageFlip(shadow.arenas, shadow.device)
    if shadow.is_reversible:
        return Exchange(shadow.live, shadow.module)
    return Copy(shadow)


class Exchange:
    """The pairs of one live tree and its shadow."""

    def __init__(self, live: torch.nn.Module, shadow: torch.nn.Module) -> None:
        self._params: list[Tensors] = []
        self._kept: list[tuple[Any, Any, str]] = []
        seen: set[int] = set()
        for (name, a), (_, b) in zip(layers(live), layers(shadow), strict=True):
            beside = vars(a).keys() & {PACKED, UNPACKED}
            self._kept += [(a, b, attribute) for attribute in beside]
            self._kept += quantized.kept(a, b)
            for key, param in a._parameters.items():
                twin = b._parameters.get(key)
                if param is None or id(param) in seen:
                    continue  # tied: one object, two layers
                seen.add(id(param))
                if twin is None or twin.shape != param.shape:
                    raise RuntimeError(
                        f"{name}.{key} of the staged set is "
                        f"{None if twin is None else tuple(twin.shape)}, the live "
                        f"one {tuple(param.shape)}"
                    )
                self._params.append((param, twin))
        self._params += views(live, shadow)

    def __call__(self) -> float:
        """Exchange every pair, or none; what breaks off, Ctrl-C too, exchanges none.

        Raises:
            ArenaTorn: some are exchanged, and could not go back.
            BaseException: one could not be exchanged, and none is.

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
                raise ArenaTorn(f"{fault}; and going back: {error}") from error
            raise
        return time.perf_counter() - started


def views(live: torch.nn.Module, shadow: torch.nn.Module) -> list[Tensors]:
    """The buffers that show a parameter in another shape, and those of the other tree.

    Mamba's layers look at the weight of their convolution through one. It has to look
    at the new weight when the parameter does.
    """
    for tree in (live, shadow):
        cpu_packing.show(tree)
    of_live, of_shadow = _storages(live), _storages(shadow)
    found = []
    for (name, a), (_, b) in zip(layers(live), layers(shadow), strict=True):
        for key, buffer in a._buffers.items():
            if buffer is None or (param := of_live.get(_storage(buffer))) is None:
                continue
            twin = b._buffers.get(key)
            if twin is None or of_shadow.get(_storage(twin)) != param:
                raise RuntimeError(
                    f"{name}.{key} shows {param}, and that of the staged set does not"
                )
            found.append((buffer, twin))
    return found


def _storages(tree: torch.nn.Module) -> dict[int, str]:
    """Storage → the parameter that lies in it, or was packed from it."""
    found = {}
    for name, layer, key, param in parameters(tree):
        unpacked = vars(layer).get(UNPACKED) if key == "weight" else None
        if param.numel():
            found[_storage(param if unpacked is None else unpacked)] = name
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PageFlip:
    """The pages of an arena, or of several: a drafter has one of its own."""

    def __init__(self, arenas: Sequence[Arena], device: torch.device) -> None:
        self._arenas = arenas
        self._device = device

    def __call__(self) -> float:
        """Exchange the pages, once the step under way has read the last of them.

        Waits for the stream that computes and for no other: a device-wide wait would
        hang with a transfer that has stalled.
        """
        torch.cuda.current_stream(self._device).synchronize()
        return flip_all(self._arenas)


def flip_all(arenas: Sequence[Arena]) -> float:
    """Exchange the pages of all of them, or of none; returns the seconds it took.

    Raises:
        ArenaTorn: one is exchanged in part, or those before it could not go back.
        BaseException: one could not be exchanged, and none is.

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
    """Every parameter of the shadow, into the live one."""

    def __init__(self, shadow: ShadowModel) -> None:
        assert shadow.module is not None
        self._shadow = shadow
        self._pairs = [
            (param, twin)
            for (*_, param), (*_, twin) in zip(
                parameters(shadow.live), parameters(shadow.module), strict=True
            )
        ]

    def __call__(self) -> float:
        """Copy them all on the stream that computes, between two of its steps."""
        stream = torch.cuda.current_stream(self._shadow.device)
        started = time.perf_counter()
        try:
            with torch.no_grad():
                for param, twin in self._pairs:
                    param.copy_(twin, non_blocking=True)
            self._shadow.busy = torch.cuda.Event(blocking=True)
            self._shadow.busy.record(stream)
            self._shadow.busy.synchronize()
        except BaseException as error:  # Ctrl-C, too: there is no way back
            raise ArenaTorn(f"copying the new weights broke off: {error!r}") from error
        return time.perf_counter() - started
