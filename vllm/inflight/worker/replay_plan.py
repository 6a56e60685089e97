"""The replay plan: where a loader copies each checkpoint tensor, recorded and replayed.

A model's loader takes a tensor by its name through mappings, shards and narrow views,
in Python. In the end it copies slices of the tensor into slices of parameters. Shadow
parameters stay where they are, so the slices are the same at every update. The loader's
copies are recorded when the engine starts (staging/destination_table.py), or else at
one update, and repeated at later ones without the loader.

Only certain operations are recorded: copies out of the very tensor that was given to
the loader, and fills with zero. Every element has to be written once. Where a loader
writes an element twice, the order decides, and a replay has no order. Any other tensor
goes through its loader at every update. An entry is replayed only after the replay
check (replay_check.py) has passed it.

The record also tells where each checkpoint tensor is served, so that the scrub
(integrity/scrub.py) can read it back. The CPU build packs what it has loaded, and
records for that purpose alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.inflight.ops.reference import row_major
from vllm.inflight.transport.buckets.reassembly import Destination

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a view within a tensor, in elements."""

_COPY = torch.ops.aten.copy_.default
_FILLS = {
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


class Copied(NamedTuple):
    """One copy of a part of a checkpoint tensor into a parameter."""

    param: str
    view: View
    """The written part of the parameter."""
    part: View
    """The copied part of the checkpoint tensor."""
    target: torch.Tensor
    """The view as a tensor; an empty tensor where copies are not replayed."""
    is_exact: bool
    """Whether both have the same dtype, so that the bits stay the same."""


class Zeroed(NamedTuple):
    """A part of a parameter that is filled with zero."""

    param: str
    view: View
    target: torch.Tensor
    """As in `Copied`."""


@dataclass(slots=True)
class Entry:
    """What a loader does with one tensor."""

    shape: torch.Size
    dtype: torch.dtype
    copies: list[Copied] = field(default_factory=list)
    zeros: list[Zeroed] = field(default_factory=list)
    filled: list[tuple[str, View]] = field(default_factory=list)
    """(parameter, view) of every write, in order."""
    is_whole: bool = True
    """Whether every write can be replayed."""
    is_traced: bool = True
    """Whether every write is a part of the tensor, or zero."""
    is_proved: bool = False
    """Whether the replay check has passed; see replay_check.py."""
    home: Destination | None = None
    """Where the tensor ends up, if it is stored whole, row-major and in one piece."""

    @property
    def num_unread(self) -> int:
        """Elements of the tensor that are copied nowhere; 0 if that is not known.

        Loaders cut tensors to the size of the parameter.
        """
        if not (self.copies and self.is_traced):
            return 0
        parts = {copied.part for copied in self.copies}  # overlaps count too often
        return max(0, self.shape.numel() - sum(prod(shape) for _, shape, _ in parts))

    @property
    def writes(self) -> list[Copied | Zeroed]:
        """All writes of a replay."""
        return [*self.copies, *self.zeros]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def params(self) -> set[str]:
        """The parameters that the loader writes for this tensor."""
        return {param for param, _ in self.filled}


class Plan:
    """The entries of one model, by checkpoint name.

    Args:
        is_replayed: whether tensors are loaded by this record. If not, the record only
            tells where they are served, and holds none of the recorded memory.

    """

    def __init__(self, *, is_replayed: bool = True) -> None:
        self.is_replayed = is_replayed
        self.number = 0
        """Changes whenever the entries change."""
        self._checked = -1
        """The number when all entries had been checked."""
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, set[str]] = {}
        """Parameter → the tensors recorded to write into it."""
        self._unconfirmed: set[str] = set()
        """Recorded by an update that was not whole so far."""
        self._rejected: set[str] = set()
        self._passed_over: set[str] = set()
        self._passed_over_before: dict[str, bool] = {}
        """Tensors whose mark an update has changed that was not whole so far."""
        self.lock = threading.RLock()
        """Held while entries change, and while all of them are read."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_proved(self) -> int:
        """How many tensors are loaded by replay."""
        return sum([entry.is_proved for entry in self._entries.values()])

    @property
    def num_unproved(self) -> int:
        """How many recorded tensors wait for the replay check."""
        return len(self) - self.num_proved

    def items(self) -> Iterable[tuple[str, Entry]]:
        """(name, entry) of every recorded tensor."""
        return self._entries.items()

    def known(self, name: str) -> Entry | None:
        """The entry of the tensor of that name, whatever its shape and dtype."""
        return self._entries.get(name)

    def entry(self, name: str, tensor: torch.Tensor) -> Entry | None:
        """The entry for a tensor of this name, shape and dtype;

        None if there is none.
        """
        found = self._entries.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            return None
        return found if tensor.is_contiguous() else None

    def place(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Destination | None:
        """Where such a tensor ends up, if it is stored whole and in one piece.

        A transport may receive the tensor there. Its loader otherwise writes only
        zeros, in
        other places.
        """
        entry = self._entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (shape, dtype):
            return None
        return entry.home if entry.is_proved else None

    def is_home(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the very tensor that `place` returned."""
        entry = self._entries.get(name)
        home = None if entry is None else entry.home
        return home is not None and home.tensor is tensor

    def names_of(self, param: str) -> Iterable[str]:
        """The tensors recorded to write into a parameter, sorted."""
        return sorted(self._names.get(param, ()))

    def filled_by(self, name: str) -> Iterable[str]:
        """The parameters that are written when such a tensor is loaded."""
        entry = self._entries.get(name)
        return () if entry is None else (param for param, _ in entry.filled)

    def keep(self, name: str, entry: Entry) -> None:
        """Record an entry, if every write of it can be replayed.

        Parameters that were set aside on `meta` while they were loaded have memory that
        the record does not know, so a replay could not write it.
        """
        is_passed_over = entry.is_whole and entry.is_traced and not entry.filled
        self._passed_over_before.setdefault(name, name in self._passed_over)
        self._mark(name, is_passed_over)
        if not entry.is_whole or not entry.filled or name in self._rejected:
            return
        entry.filled = list(dict.fromkeys(entry.filled))  # each once, for replays
        if overlapping(entry.filled):
            return
        if self.is_replayed:
            if any(write.target.is_meta for write in entry.writes):
                return
            entry.home = _home(entry)
        else:
            nothing = torch.empty(0, device="cpu")
            entry.copies = [c._replace(target=nothing) for c in entry.copies]
            entry.zeros = [z._replace(target=nothing) for z in entry.zeros]
        with self.lock:
            self._put(name, entry)
            self._unconfirmed.add(name)

    def _mark(self, name: str, is_passed_over: bool) -> None:
        if is_passed_over:
            self._passed_over.add(name)
        elif name in self._passed_over:
            self._passed_over.remove(name)
            self.number += 1

    def confirm(self) -> None:
        """The tensors that were recorded last belong to a whole update."""
        self._unconfirmed.clear()
        self._passed_over_before.clear()

    def drop_unconfirmed(self) -> None:
        """Forget what an update has recorded that ended before it was whole.

        A tensor that did not come may write to the same elements. Then their order
        decides, which a record of one of them does not show. A loader may also have
        kept a tensor for one that did not come, and seemed to pass over it.
        """
        with self.lock:
            for name, was_passed_over in self._passed_over_before.items():
                self._mark(name, was_passed_over)
            self._passed_over_before.clear()
            for name in list(self._unconfirmed):
                if not self._entries[name].is_proved:
                    self._drop(name)
            self._unconfirmed.clear()

    def restore(self, name: str, entry: Entry) -> None:
        """Put back an entry that one of another form has replaced."""
        with self.lock:
            self._rejected.discard(name)
            self._put(name, entry)

    def passes_over(self, name: str) -> bool:
        """Whether the loader has written nothing of a tensor of that name.

        The tensor is then of another rank's layers or experts, or of none.
        """
        return name in self._passed_over

    def prove(self, entries: Iterable[Entry]) -> None:
        """Replay these entries from now on."""
        for entry in entries:
            entry.is_proved = True
            self.number += 1

    def note_checked(self) -> None:
        """All entries have been checked, but those that there was no room for."""
        self._checked = self.number

    @property
    def is_checked(self) -> bool:
        """Whether every entry has been checked since the entries changed."""
        return self._checked == self.number and not self.num_unproved

    def move_in(self, params: Mapping[str, torch.Tensor]) -> None:
        """Replay from now on into these parameters, what was recorded without them.

        Entries that a check has rejected may be recorded once more, by an update.
        """
        with self.lock:
            self.is_replayed = True
            self.number += 1
            self._rejected.clear()
            for name, entry in self._entries.items():
                self._entries[name] = located(entry, params)
            if not self.num_unproved:
                self.note_checked()

    def reject(self, names: Iterable[str]) -> None:
        """Forget the entries of these tensors, and record none of them again."""
        with self.lock:
            for name in names:
                self._rejected.add(name)
                self._drop(name)

    def forget(self) -> None:
        """Forget all entries, and replay nothing from now on."""
        with self.lock:
            self.is_replayed = False
            self.number += 1
            self._entries.clear()
            self._names.clear()
            self._unconfirmed.clear()
            self._passed_over.clear()
            self._passed_over_before.clear()

    def _put(self, name: str, entry: Entry) -> None:
        self._drop(name)
        self.number += 1
        self._entries[name] = entry
        for param in entry.params:
            self._names.setdefault(param, set()).add(name)

    def _drop(self, name: str) -> None:
        self._unconfirmed.discard(name)
        if (entry := self._entries.pop(name, None)) is not None:
            self.number += 1
            for param in entry.params:
                self._names[param].discard(name)


def located(entry: Entry, params: Mapping[str, torch.Tensor]) -> Entry:
    """The entry with its targets and its home in these parameters."""

    def target(param: str, view: View) -> torch.Tensor:
        held, (offset, shape, stride) = params[param].data, view
        return held.as_strided(shape, stride, held.storage_offset() + offset)

    copies = [c._replace(target=target(c.param, c.view)) for c in entry.copies]
    zeros = [z._replace(target=target(z.param, z.view)) for z in entry.zeros]
    found = replace(entry, copies=copies, zeros=zeros)
    found.home = _home(found)
    return found


def overlapping(filled: Iterable[tuple[str, View]]) -> set[str]:
    """The parameters in which two of these views share an element."""
    by_param: dict[str, list[View]] = {}
    for param, view in filled:
        by_param.setdefault(param, []).append(view)
    return {param for param, views in by_param.items() if not are_apart(views)}


def are_apart(views: Sequence[View]) -> bool:
    """Whether no two views of one parameter share an element."""
    views = [view for view in views if prod(view[1])]
    if _apart(_spans(views)) or _apart(_columns(views)):
        return True
    # This is rare, and done on the host: a GPU that serves has no spare memory.
    size = max((end for _, end in _spans(views)), default=0)
    written = torch.zeros(size, dtype=torch.bool, device="cpu")
    for offset, shape, stride in views:
        written.as_strided(shape, stride, offset).fill_(True)
    return int(written.sum()) == sum(prod(shape) for _, shape, _ in views)


def _apart(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether no range (first, end) reaches into another one."""
    return all(end <= first for (_, end), (first, _) in pairwise(sorted(ranges)))


def _spans(views: Sequence[View]) -> list[tuple[int, int]]:
    """(first element, end) of each view, gaps included."""
    return [(view[0], view[0] + span(view)) for view in views]


def _columns(views: Sequence[View]) -> list[tuple[int, int]]:
    """The columns of views of the same rows; for other views, ranges that overlap."""
    if all(len(step) == 2 and step[0] and step[1] == 1 for _, _, step in views):
        rows = {(at // step[0], shape[0], step[0]) for at, shape, step in views}
        if len(rows) == 1:
            return [
                (at % step[0], at % step[0] + shape[1]) for at, shape, step in views
            ]
    return [(0, 1), (0, 1)]


def span(view: View) -> int:
    """Elements from the first of a view to its last, gaps included."""
    _, shape, stride = view
    if not prod(shape):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _home(entry: Entry) -> Destination | None:
    if len(entry.copies) != 1:
        return None
    copied = entry.copies[0]
    target, (offset, shape, stride) = copied.target, copied.part
    is_whole = offset == 0 and shape == tuple(entry.shape) == tuple(target.shape)
    # A transport writes the bytes row by row. A loader that transposes the tensor
    # stores them in another order.
    is_row_major = all(
        step == expected
        for size, step, expected in zip(shape, stride, row_major(shape), strict=True)
        if size != 1
    )
    if is_whole and is_row_major and copied.is_exact and target.is_contiguous():
        return Destination.of(target)
    return None


def replay(known: Sequence[tuple[Entry, torch.Tensor]]) -> None:
    """Repeat for each tensor the copies that its loader made."""
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for entry, tensor in known:
        first = tensor.storage_offset()
        for copied in entry.copies:
            if copied.target is tensor:
                continue  # received in place
            offset, shape, stride = copied.part
            source = tensor.as_strided(shape, stride, first + offset)
            # One call takes tensors of one kind: torch 2.11 treats all targets like the
            # first.
            kind = copied.target.dtype, source.dtype, source.device
            targets, sources = alike.setdefault(kind, ([], []))
            targets.append(copied.target)
            sources.append(source)
        for zeroed in entry.zeros:
            zeroed.target.zero_()
    for targets, sources in alike.values():
        if sources[0].device == targets[0].device:
            torch._foreach_copy_(targets, sources)
            continue
        # The source is host memory that may be freed as soon as this returns.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def warm(
    device: torch.device, sources: set[torch.dtype], targets: set[torch.dtype]
) -> None:
    """Have the GPU load the kernels of copies now, and not while tensors arrive.

    The driver may wait for all kernels that run before it loads another one. A
    broadcast that runs then waits for other ranks, which may wait for this one.

    Args:
        device: of the parameters.
        sources: dtypes of tensors that arrive.
        targets: dtypes of parameters.

    """
    for source, target in product(sources, targets):
        if source != target and not (
            source.is_floating_point and target.is_floating_point
        ):
            continue
        size = 64
        sent = torch.zeros(size * source.itemsize, dtype=torch.uint8, device=device)
        held = torch.zeros(size * target.itemsize, dtype=torch.uint8, device=device)
        new, old = sent.view(source).view(8, 8), held.view(target).view(8, 8)
        for part in (slice(None), slice(4)):  # contiguous, and cut by columns
            with suppress(NotImplementedError, RuntimeError):  # torch has no such copy
                torch._foreach_copy_([old[:, part]], [new[:, part]])


class RecordedWrites(TorchDispatchMode):
    """Records the in-place writes to one parameter while a loader has a tensor."""

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
        # Shadow parameters share the storage of an arena, so views are counted from the
        # start of the parameter.
        self._first = int(param.storage_offset())
        self._handed = handed
        self._entry = entry
        self.views: dict[View, int] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Aliases such as `.data` and views are made by other calls. What counts is the
        # memory that is written.
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
        filled = (self._name, view)
        if filled in self._entry.filled:
            # The second write decides the content, and a replay does not know which is
            # second.
            self._entry.is_whole = False
        self._entry.filled.append(filled)
        if func is _COPY and (part := self._part(args[1], target)) is not None:
            is_exact = target.dtype == args[1].dtype
            copied = Copied(self._name, view, part, target.detach(), is_exact)
            self._entry.copies.append(copied)
        elif func in _FILLS and (len(args) == 1 or args[1] == 0):
            self._entry.zeros.append(Zeroed(self._name, view, target.detach()))
        else:
            self._entry.is_whole = self._entry.is_traced = False

    def _part(self, source: torch.Tensor, target: torch.Tensor) -> View | None:
        """`source` as a part of the tensor given to the loader; None if it is none."""
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
        # Tensors of one bucket share a storage: the source has to lie within this
        # tensor.
        return (offset, shape, stride) if 0 <= offset <= last < handed.numel() else None


def view_of(tensor: torch.Tensor) -> View:
    """The place of a tensor within its storage."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
