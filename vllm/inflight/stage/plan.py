"""The plan: where each checkpoint tensor goes, recorded once and replayed.

A model's loader takes a tensor by its name through mappings, shards and narrow views,
in Python, and in the end copies slices of it into slices of parameters. Where both
sides stay where they are, as twins do, the slices are the same at every update: what
a loader did the first time is written down, and done again without it.

Only what is certainly that is recorded: copies out of the very tensor that was handed
over, and fills with a constant. Anything else goes through the loader every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.inflight.wire.assembly import Home

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides within a tensor, in elements."""

_COPY = torch.ops.aten.copy_.default
_FILLS = {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


@dataclass(slots=True)
class Entry:
    """What a loader does with one tensor."""

    shape: torch.Size
    dtype: torch.dtype
    copies: list[tuple[torch.Tensor, View]] = field(default_factory=list)
    """Destination, and the part of the tensor that is copied there."""
    zeros: list[torch.Tensor] = field(default_factory=list)
    filled: list[tuple[str, View]] = field(default_factory=list)
    """(parameter, view) of everything that is written."""
    is_whole: bool = True
    """Whether nothing happened that cannot be replayed."""
    is_traced: bool = True
    """Whether all that was written is a part of the tensor, or a constant."""
    is_proved: bool = False
    """Whether replaying it was seen to do what its loader does; see proof.py."""
    home: Home | None = None
    """Where the tensor ends up, if that is whole and in one piece."""

    @property
    def num_unread(self) -> int:
        """Elements that are copied nowhere, where others are; 0 if nobody can tell.

        Loaders cut what they get to the size of what they fill.
        """
        if not (self.copies and self.is_traced):
            return 0
        parts = {part for _, part in self.copies}  # that overlap count too often
        return max(0, self.shape.numel() - sum(prod(shape) for _, shape, _ in parts))


class Plan:
    """The entries of one model, by checkpoint name."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._refused: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str, tensor: torch.Tensor) -> Entry | None:
        """What was recorded for such a tensor, if anything was."""
        found = self._entries.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            return None
        return found if tensor.is_contiguous() else None

    def place(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Home | None:
        """Where such a tensor ends up, if that is whole and in one piece.

        A transport may then receive it there: nothing else is written with it but
        constants.
        """
        entry = self._entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (shape, dtype):
            return None
        return entry.home if entry.is_proved else None

    def is_home(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it is the very tensor that `place` told of."""
        entry = self._entries.get(name)
        home = None if entry is None else entry.home
        return home is not None and home.tensor is tensor

    def filled_by(self, name: str) -> Iterable[str]:
        """The parameters that are written when such a tensor comes."""
        entry = self._entries.get(name)
        return () if entry is None else (param for param, _ in entry.filled)

    def keep(self, name: str, entry: Entry) -> None:
        """Remember an entry, if all of it can be replayed."""
        if entry.is_whole and entry.filled and name not in self._refused:
            entry.home = _home(entry)
            entry.filled = list(dict.fromkeys(entry.filled))  # each once, for replays
            self._entries[name] = entry

    def refuse(self, names: Iterable[str]) -> None:
        """Forget what was recorded of tensors, for good."""
        for name in names:
            self._refused.add(name)
            self._entries.pop(name, None)


def _home(entry: Entry) -> Home | None:
    if len(entry.copies) != 1:
        return None
    target, (offset, copied, _) = entry.copies[0]
    is_whole = offset == 0 and copied == tuple(entry.shape) == tuple(target.shape)
    is_alike = target.dtype == entry.dtype and target.is_contiguous()
    return Home.of(target) if is_whole and is_alike else None


def replay(known: Sequence[tuple[Entry, torch.Tensor]]) -> None:
    """Do with each tensor what its loader did with the one that was recorded."""
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for entry, tensor in known:
        first = tensor.storage_offset()
        for target, (offset, shape, stride) in entry.copies:
            if target is tensor:
                continue  # received in place
            source = tensor.as_strided(shape, stride, first + offset)
            # Of one call: torch 2.11 takes all targets for what the first one is.
            kind = target.dtype, source.dtype, source.device
            targets, sources = alike.setdefault(kind, ([], []))
            targets.append(target)
            sources.append(source)
        for target in entry.zeros:
            target.zero_()
    for targets, sources in alike.values():
        if sources[0].device == targets[0].device:
            torch._foreach_copy_(targets, sources)
            continue
        # From the host, where a source may be gone as soon as this returns.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class Writes(TorchDispatchMode):
    """Records the in-place writes to one parameter, while a loader has a tensor."""

    def __init__(
        self,
        name: str,
        param: torch.Tensor,
        handed: torch.Tensor | None = None,
        entry: Entry | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self._storage = param.untyped_storage()._cdata
        # Twins share the storage of an arena: views are told from where this begins.
        self._first = int(param.storage_offset())
        self._handed = handed
        self._entry = entry
        self.views: dict[View, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # `.data` and views are made by other calls; what counts is where they lead.
        if args and isinstance(args[0], torch.Tensor) and func._schema.is_mutable:
            target = args[0]
            if target.untyped_storage()._cdata == self._storage and target.numel():
                self._note(func, target, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, target: torch.Tensor, args: Any) -> None:
        offset, shape, stride = view_of(target)
        view = (offset - self._first, shape, stride)
        if func is _COPY or func in _FILLS:
            self.views[view] = target.numel()
        if self._entry is None:
            return
        self._entry.filled.append((self._name, view))
        if func is _COPY and (part := self._part(args[1], target)) is not None:
            self._entry.copies.append((target.detach(), part))
        elif func in _FILLS and (len(args) == 1 or args[1] == 0):
            self._entry.zeros.append(target.detach())
        else:
            self._entry.is_whole = self._entry.is_traced = False

    def _part(self, source: torch.Tensor, target: torch.Tensor) -> View | None:
        """`source` as a part of the tensor handed over; None if it is not one."""
        handed = self._handed
        if (
            handed is None
            or not handed.is_contiguous()
            or source.dtype != handed.dtype
            or source.shape != target.shape
            or source.untyped_storage()._cdata != handed.untyped_storage()._cdata
        ):
            return None
        offset, shape, stride = view_of(source)
        offset -= int(handed.storage_offset())
        last = offset + sum(
            (n - 1) * step for n, step in zip(shape, stride, strict=True)
        )
        # Tensors of one bucket share a storage: it has to be this one's part of it.
        return (offset, shape, stride) if 0 <= offset <= last < handed.numel() else None


def view_of(tensor: torch.Tensor) -> View:
    """Where a tensor lies, within its storage."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
