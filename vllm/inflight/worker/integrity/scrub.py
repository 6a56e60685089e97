"""The scrub: live weights are read back and compared with the committed digests.

The record of the loaders (replay_plan.py) tells where in the parameters every element
of a checkpoint tensor lies. So the digest of that tensor can be computed from the live
weights. The sums of all ranks are added up, and compared with the digest that was
received under the version. Some parameters are no copy of checkpoint tensors
(exponentials, quantised weights, halves of MLA, experts that the CPU build packs). For
these, a rank compares with their digest from when they were staged.

A scrub reads in slices, between steps and on the stream that steps, so that nothing
changes while it reads. A slice is small enough not to be noticed. Results that hold for
all versions are computed once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.errors import EngineFault
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.ops.launch_tables import LaunchTable
from vllm.inflight.ops.reference import page_key, row_major
from vllm.inflight.worker.model.kinds import moe
from vllm.inflight.worker.model.kinds.hidden_weights import PACKED
from vllm.inflight.worker.model.layers import parameters
from vllm.inflight.worker.replay_plan import Entry, View, are_apart, span
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.verify.content import Facts
from vllm.inflight.worker.verify.readback import content, has_lost

SLICE_BYTES, SLICE_BYTES_OF_HOST = 256 << 20, 4 << 20
"""Bytes of parameters that are read between two steps, on a GPU and on the CPU build.
"""
PIECE_BYTES = 16 << 20
"""Bytes of scratch memory, for parts that do not lie in one piece."""

logger = upstream.init_logger(__name__)

Digests = dict[str, ops.Digest]
"""Parameter → digest."""
_FormsOfFacts = Mapping[str, tuple[str, tuple[int, ...]]]

Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of checkpoint tensors."""
Copying = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Scratch memory, a view of it, and the source that is copied into the view."""


@dataclass(slots=True)
class ScrubbedParameter:
    """A live parameter, and the parts of checkpoint tensors in it."""

    param: str
    layer: torch.nn.Module
    key: str
    row: int
    """Row of the sums for the parameter itself, where it is no copy."""
    parts: list[tuple[int, str, View, View]] = field(default_factory=list)
    """(row, tensor, view of the parameter, part of the tensor); empty unless the
    parameter consists of copies and zeros alone."""
    zeros: list[tuple[int, View]] = field(default_factory=list)
    """(row, view of the parameter)."""
    shape: torch.Size | None = None
    """The shape that its loaders know, if it has parts."""

    @property
    def names(self) -> set[str]:
        """The checkpoint tensors that it is made of."""
        return {name for _, name, _, _ in self.parts}

    def tensor(self) -> torch.Tensor:
        """The live content of the parameter.

        Raises:
            EngineFault: it exists in two forms, which differ.

        """
        param = self.layer._parameters[self.key]
        assert param is not None
        return content(self.layer, self.key, param)


class Layout:
    """Where one rank serves each checkpoint tensor, in every version.

    Args:
        shadow: the shadow model, with the record of the loaders.

    """

    def __init__(self, shadow: ShadowModel) -> None:
        self.plan_number = shadow.plan.number
        self.device = shadow.device
        self.num_rows = 0
        self._shadow = shadow
        self.places = [self._place(*each) for each in parameters(shadow.live)]
        parts: dict[str, dict[View, list[int]]] = {}
        for place in self.places:
            for row, name, _, part in place.parts:
                parts.setdefault(name, {}).setdefault(part, []).append(row)
        # The sums of different parts that overlap do not add up.
        self.names = sorted(n for n, held in parts.items() if are_apart(list(held)))
        """Tensors that are served as copies, on this rank at least."""
        self.forms = [_form(shadow, name) for name in self.names]
        held = [parts[name] for name in self.names]
        self.rows = _numbers(r for of in held for r, *_ in of.values())
        """The row of every part of every name, once."""
        self.owners = _numbers(n for n, of in enumerate(held) for _ in of)
        """For each of these rows, the index of the name."""
        self.twice = [
            (name, rows)
            for name, of in zip(self.names, held, strict=True)
            for rows in of.values()
            if len(rows) > 1
        ]
        """Names with a part that is served in two places, and the rows."""
        self.covered = _numbers(prod(shape) for of in held for _, shape, _ in of)
        """Elements of each of these parts."""
        self.numel = _numbers(prod(shape) for _, shape in self.forms)
        """Elements of each name."""
        self.parts = _numbers(
            _mark(name, part)
            for name, of in zip(self.names, held, strict=True)
            for part in of
        )
        """For each of these rows, a number that is equal on two ranks that serve the
        same part. A rank may share one part with others, and have another alone."""
        self.counts = _signed(
            chain.from_iterable(
                ops.counts_of_part(shape, row_major(shape), 0, dtype.itemsize)
                for dtype, shape in self.forms
            )
        )
        """The part of the digest of each tensor that does not depend on its content."""

        self.copied: tuple[_FormsOfFacts, frozenset[str]] | None = None
        """Tensors with dtype and shape, and the parameters that are copies of them;
        see `copies`."""
        self._sliced: tuple[Collection[str], list[ScrubSlice]] | None = None
        """Parameters that are copies, and the slices that were made for them."""
        self._scratch = Scratch(self.device)

    def slices(self, copied: Collection[str]) -> list[ScrubSlice]:
        """The slices of a scrub in which the parameters of `copied` are copies of
        tensors.

        Made once, and by the staging thread if there is one: preparing the tables for a
        GPU takes long.
        """
        made = self._sliced
        if made and made[0] == copied and all(each.is_there() for each in made[1]):
            return made[1]
        forms = dict(zip(self.names, self.forms, strict=True))
        most = SLICE_BYTES_OF_HOST if self.device.type == "cpu" else SLICE_BYTES
        slices: list[ScrubSlice] = []
        num_bytes = most
        for place in self.places:
            if num_bytes >= most:
                slices.append(ScrubSlice(self._scratch))
                num_bytes = 0
            param = place.layer._parameters[place.key]
            assert param is not None
            num_bytes += param.nbytes
            slices[-1].add(place, forms if place.param in copied else None)
        for each in slices:
            each.close()
        # Assigned in one step: another thread may ask meanwhile.
        self._sliced = copied, slices
        return slices

    def _place(
        self, name: str, layer: torch.nn.Module, key: str, param: torch.Tensor
    ) -> ScrubbedParameter:
        place = ScrubbedParameter(name, layer, key, self._row())
        is_kept = bool(self._shadow.kept.names_of(name))
        shape = param.shape if is_kept else self._shadow.required.get(name)
        if shape is None or moe.is_packed(layer):
            return place  # it is derived, or was processed after loading
        parts, zeros = self._filled(name, param.dtype)
        views = [*(view for _, view, _ in parts), *zeros]
        is_all = sum(prod(size) for _, size, _ in views) == shape.numel()
        if parts and is_all and are_apart(views):
            place.parts = [(self._row(), *part) for part in parts]
            place.zeros = [(self._row(), view) for view in zeros]
            place.shape = shape
        return place

    def _filled(
        self, param: str, dtype: torch.dtype
    ) -> tuple[list[tuple[str, View, View]], list[View]]:
        """The parts of a parameter, and its zeros, as far as copies kept every bit."""
        parts, zeros = [], []
        plan, kept = self._shadow.plan, self._shadow.kept
        for name in (*plan.names_of(param), *kept.names_of(param)):
            entry = entry_of(self._shadow, name)
            if entry is None or (plan.is_replayed and not entry.is_proved):
                continue
            for copied in entry.copies:
                is_kept = copied.is_exact or is_lossless(entry.dtype, dtype)
                if copied.param == param and is_kept and not _repeats(copied.part):
                    parts.append((name, copied.view, copied.part))
            zeros += [zeroed.view for zeroed in entry.zeros if zeroed.param == param]
        return parts, zeros

    def _row(self) -> int:
        self.num_rows += 1
        return self.num_rows - 1


def _form(shadow: ShadowModel, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    entry = entry_of(shadow, name)
    assert entry is not None
    return entry.dtype, tuple(entry.shape)


def entry_of(shadow: ShadowModel, name: str) -> Entry | None:
    """Where a checkpoint tensor is served; None if that is not known."""
    return shadow.plan.known(name) or shadow.kept.known(name)


def is_lossless(kept: torch.dtype, wider: torch.dtype) -> bool:
    """Whether a number that was cast can be cast back to what it was."""
    is_float = kept.is_floating_point and wider.is_floating_point
    return is_float and torch.promote_types(kept, wider) is wider


def _repeats(part: View) -> bool:
    """Whether a part of a tensor contains an element more than once."""
    _, shape, stride = part
    return any(n > 1 and not step for n, step in zip(shape, stride, strict=True))


def _mark(name: str, part: View) -> int:
    digest = hashlib.blake2b(f"{name} {part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _signed(numbers: Iterator[int]) -> torch.Tensor:
    """Pairs of u64 as int64 [n, 2]: torch adds these modulo 2**64."""
    packed = array("Q", numbers)
    if not packed:
        return torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    return torch.frombuffer(packed, dtype=torch.int64).view(-1, 2)


def _numbers(values: Iterable[int]) -> torch.Tensor:
    # The staging thread has a default device, which would be used otherwise.
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


class Scrub:
    """One pass over the live weights of a rank.

    Args:
        layout: of the rank.
        facts: of the tensors of the live version; empty if nothing is known of them.
        marks: digests of parameters that are no copies, from when they were staged;
            None if
            nothing is known of them.

    """

    def __init__(
        self, layout: Layout, facts: Mapping[str, Facts], marks: Digests | None
    ) -> None:
        self._layout = layout
        self._facts = facts
        self._marks = marks
        self._copies = copies(layout, facts)
        self._sums = Sums(layout.device, layout.num_rows)
        self._slices = list(layout.slices(self._copies))
        self._wrong: set[str] = set()
        self._inexact: set[str] = set()
        self._error: Exception | None = None

    @property
    def num_slices(self) -> int:
        """How often `slice` has to be called."""
        return len(self._slices)

    def slice(self) -> None:
        """Read the next slice; on a GPU, enqueue that on the current stream.

        Nobody reads the reply to this call, so an error is raised by `result`.
        """
        if self._slices:
            try:
                read = self._slices.pop(0)
                self._wrong |= read.read(self._sums)
                self._inexact |= read.inexact
            except Exception as error:
                self._error = self._error or error

    def differing(self) -> list[str]:
        """The tensors that differ, of those that this rank has all of."""
        layout, rows = self._layout, self._read()
        sums = torch.zeros(len(layout.names), 2, dtype=torch.int64, device="cpu")
        sums.index_add_(0, layout.owners, rows[layout.rows])
        covered = torch.zeros_like(layout.numel)
        covered.index_add_(0, layout.owners, layout.covered)
        is_wrong = (sums != self._expected()).any(1) & (covered == layout.numel)
        names = zip(layout.names, is_wrong.tolist(), strict=True)
        known = self._facts.keys() - self._inexact
        return [name for name, wrong in names if wrong and name in known]

    def result(self) -> dict[str, Any]:
        """The findings, once every slice has been read.

        Returns:
            a dictionary with these keys. All numbers are int64 bytes, for each of
            `names`, or for each part of a tensor that is served here.

            - `names`: checkpoint tensors.
            - `expected` (two each): the sums of the whole tensor.
            - `numel`: elements of the tensor.
            - `owners`, of each part: the index of its tensor in `names`.
            - `parts`, of each part: equal on two ranks that serve the same part.
            - `sums` (two each), of each part.
            - `covered`: elements of each part; 0 of a tensor that the version lacks.
            - `wrong`: parameters that differ from when they were staged, and tensors
              with a part that is served in two different forms.
            - `inexact`: tensors of which some bits may not have been read. One that
              differs is not known to.
            - `unknown`: parameters of which nothing is known.
            - `num_marked`: number of parameters compared with how they were staged.
            - `marks`: digests of all parameters that are no copies.

        """
        layout, rows = self._layout, self._read()
        marks = {
            place.param: _digest(rows[place.row])
            for place in layout.places
            if place.param not in self._copies
        }
        unknown = [p for p in marks if self._marks is None or p not in self._marks]
        known = {p: mark for p, mark in (self._marks or {}).items() if p in marks}
        self._wrong.update(p for p, mark in known.items() if mark != marks[p])
        for place in layout.places:
            if place.param in self._copies:
                zeros = [row for row, _ in place.zeros]
                if zeros and rows[zeros].any():
                    self._wrong.add(place.param)
        for name, twice in layout.twice:
            if (rows[twice] != rows[twice[0]]).any():
                self._wrong.add(name)
        is_here = _numbers(name in self._facts for name in layout.names)
        return {
            "names": layout.names,
            "expected": _bytes(self._expected()),
            "numel": _bytes(layout.numel),
            "owners": _bytes(layout.owners),
            "parts": _bytes(layout.parts),
            "sums": _bytes(rows[layout.rows].view(-1, 2)),
            "covered": _bytes(layout.covered * is_here[layout.owners]),
            "wrong": sorted(self._wrong),
            "inexact": sorted(self._inexact),
            "unknown": unknown,
            "num_marked": len(known),
            "marks": marks,
        }

    def _read(self) -> torch.Tensor:
        """The sums of every row, once every slice has been read."""
        while self._slices:
            self.slice()
        if self._error is not None:
            raise self._error
        return self._sums.results()

    def _expected(self) -> torch.Tensor:
        """The sums that the tensors have in the version; int64 [names, 2]."""
        found = (self._facts.get(name) for name in self._layout.names)
        numbers = ((0, 0) if fact is None else fact[2] for fact in found)
        return _signed(chain.from_iterable(numbers)) - self._layout.counts


def copies(layout: Layout, facts: Mapping[str, Facts]) -> frozenset[str]:
    """The parameters that are copies of these tensors alone."""
    forms = {name: fact[:2] for name, fact in facts.items()}
    known = layout.copied
    if known is not None and known[0] == forms:
        return known[1]
    same = {
        name
        for name, (dtype, shape) in zip(layout.names, layout.forms, strict=True)
        if forms.get(name) == (str(dtype).removeprefix("torch."), shape)
    }
    found = frozenset(p.param for p in layout.places if p.parts and p.names <= same)
    layout.copied = forms, found
    return found


def marks_of(
    layout: Layout, module: torch.nn.Module, copied: Collection[str]
) -> Digests:
    """The digests of the parameters that are no copies, in staged shadow weights.

    Packed weights of the CPU build are left out: both models may refer to one packing,
    and two threads must not use it.
    """
    if all(place.param in copied for place in layout.places):
        return {}  # as usual on a GPU
    named = [
        (name, content(layer, key, param))
        for name, layer, key, param in parameters(module)
        if name not in copied and not (key == "weight" and PACKED in vars(layer))
    ]
    return digests_of(named, layout.device)


def digests_of(
    named: Sequence[tuple[str, torch.Tensor]], device: torch.device
) -> Digests:
    """The digests of parameters, as a scrub computes them.

    Args:
        named: their names and contents.
        device: of the contents, or of the model whose packings these are.

    """
    if not named:  # as usual on a GPU, which is not asked then
        return {}
    sums = Sums(device, len(named))
    reading = Reading(Scratch(device))
    for row, (_, tensor) in enumerate(named):
        reading.add_whole(row, tensor)
    reading.close()
    reading.run(sums)
    rows = sums.results()
    return {name: _digest(row) for (name, _), row in zip(named, rows, strict=True)}


def _digest(row: torch.Tensor) -> ops.Digest:
    return ops.Digest(*(number % 2**64 for number in row.tolist()))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.to(torch.int64).numpy().tobytes()


class Sums:
    """Sums of parts of tensors, row by row, without the part that no content changes.

    On a GPU they stay there until they are asked for, since reading them waits for the
    GPU.

    Args:
        device: of the engine; parts on the host are summed there.
        num_rows: how many sums there are.

    """

    def __init__(self, device: torch.device, num_rows: int) -> None:
        self._device = device
        self._of_host = torch.zeros(num_rows, 2, dtype=torch.int64, device="cpu")
        self._on_device: torch.Tensor | None = None

    def add(self, row: int, tensor: torch.Tensor, part: View) -> None:
        """Add a host tensor, which is this part of a whole tensor."""
        offset, shape, stride = part
        digest = ops.digest_part(tensor, stride, offset)
        width = tensor.element_size()
        count = ops.counts_of_part(shape, stride, offset, width)
        self._of_host[row] += _signed(iter(digest - count))[0]

    @property
    def on_device(self) -> torch.Tensor:
        """The sums on the GPU: int64 [rows, 4], two columns in use."""
        if self._on_device is None:
            shape = len(self._of_host), 4
            made = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._on_device = made
        return self._on_device

    def results(self) -> torch.Tensor:
        """Every row: int64 [rows, 2], on the host."""
        if self._on_device is None:
            return self._of_host
        return self._of_host + to_host(self._on_device[:, :2])


class ScrubSlice:
    """Parameters that are read between two steps."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._reading = Reading(scratch)
        self._of_host: list[tuple[ScrubbedParameter, Forms | None]] = []
        """Parameters that are located at each scrub: packed weights move."""
        self._addresses: list[tuple[torch.Tensor, int]] = []
        self.inexact: set[str] = set()
        """Tensors in parameters that may have been read without all of their bits."""

    def add(self, place: ScrubbedParameter, forms: Forms | None) -> None:
        """Read a parameter too; part by part if it is a copy of tensors.

        Args:
            place: the parameter.
            forms: dtype and shape of the tensors it consists of; None if it is no copy.

        """
        param = place.layer._parameters[place.key]
        assert param is not None
        if not param.is_cuda:
            self._of_host.append((place, forms))
            return
        self._addresses.append((param, param.data_ptr()))
        for row, tensor, part in _parts(place, param.data, forms):
            if part is None:
                self._reading.add_whole(row, tensor)
            else:
                self._reading.add(row, tensor, *part)

    def close(self) -> None:
        """No more parameters are added."""
        self._reading.close()

    def is_there(self) -> bool:
        """Whether the parameters lie where they did when they were added."""
        return all([param.data_ptr() == at for param, at in self._addresses])

    def read(self, sums: Sums) -> set[str]:
        """Add all of it; returns the parameters that exist in two different forms."""
        self._reading.run(sums)
        odd = set()
        for place, forms in self._of_host:
            try:
                tensor = place.tensor()
                if forms is not None and tensor.shape != place.shape:
                    raise EngineFault(f"{place.param} has another shape than it had")
            except EngineFault as error:
                logger.error("scrub: %s: %s", place.param, error)
                odd.add(place.param)
                continue
            if has_lost(place.layer, place.key, tensor):
                self.inexact |= place.names
            reading = Reading(self._scratch)
            for row, each, part in _parts(place, tensor, forms):
                if part is None:
                    reading.add_whole(row, each)
                else:
                    reading.add(row, each, *part)
            reading.run(sums)
        return odd


def _parts(
    place: ScrubbedParameter, tensor: torch.Tensor, forms: Forms | None
) -> Iterator[tuple[int, torch.Tensor, tuple[View, torch.dtype] | None]]:
    """(row, tensor, part and dtype) of everything in a parameter."""
    if forms is None:
        yield place.row, tensor, None
        return
    first = int(tensor.storage_offset())
    for row, name, (offset, shape, stride), part in place.parts:
        held = tensor.as_strided(shape, stride, first + offset)
        yield row, held, (part, forms[name][0])
    for row, (offset, shape, stride) in place.zeros:
        yield row, tensor.as_strided(shape, stride, first + offset), None


class Reading:
    """Reads tensors into sums, as often as it is run; prepared once.

    Args:
        scratch: of the device of the tensors.

    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._of_host: list[tuple[int, torch.Tensor, View]] = []
        self._steps: list[tuple[list[Copying], LaunchTable]] = []
        """On a GPU: copies into scratch memory, and the table of what is read then."""
        self._places: list[tuple[int, int, int, int]] = []
        """Address, number of chunks, index of the first, row; not in a table yet."""

    def add(
        self, row: int, tensor: torch.Tensor, part: View, dtype: torch.dtype
    ) -> None:
        """Read `tensor` too, which is this part of a whole tensor of that dtype."""
        if not tensor.is_cuda:
            self._of_host.append((row, tensor.to(dtype), part))
        elif tensor.dtype is not dtype or not self._add_dense(row, tensor, part):
            self._add_scattered(row, tensor, part, dtype)

    def add_whole(self, row: int, tensor: torch.Tensor) -> None:
        """Read a tensor too, in the order in which it lies in memory."""
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        ordered = tensor.permute(order)
        shape = tuple(ordered.shape)
        self.add(row, ordered, (0, shape, tuple(row_major(shape))), tensor.dtype)

    def close(self) -> None:
        """No more tensors are added; needed on a GPU."""
        self._end_step([])

    def run(self, sums: Sums) -> None:
        """Add all of it; on a GPU, enqueue that on the current stream."""
        for row, tensor, part in self._of_host:
            sums.add(row, tensor, part)
        for copying, table in self._steps:
            from vllm.inflight.ops.triton_kernels import add_sums

            for scratch, target, source in copying:
                scratch.zero_()
                target.copy_(source)
            add_sums(table, sums.on_device, 0, page_key(0), 0)

    def _end_step(self, copying: list[Copying]) -> None:
        if not self._places:
            return
        from vllm.inflight.ops.triton_kernels import make_table

        table = make_table(
            [(*place[:2], 0) for place in self._places],
            self._scratch.device,
            firsts=[place[2] for place in self._places],
            rows=[place[3] for place in self._places],
        )
        self._places = []
        if table is not None:
            self._steps.append((copying, table))

    def _add_dense(self, row: int, tensor: torch.Tensor, part: View) -> bool:
        """Add a tensor that is one run of whole chunks; returns whether it is one."""
        offset, shape, stride = part
        start = offset * tensor.element_size()
        is_run = tensor.is_contiguous() and all(
            size == 1 or step == expected
            for size, step, expected in zip(
                shape, stride, row_major(shape), strict=True
            )
        )
        aligned = not (start % 8 or tensor.nbytes % 8 or tensor.data_ptr() % 8)
        if is_run and aligned:
            place = (tensor.data_ptr(), tensor.nbytes // 8, start // 8, row)
            self._places.append(place)
        return is_run and aligned

    def _add_scattered(
        self, row: int, tensor: torch.Tensor, part: View, dtype: torch.dtype
    ) -> None:
        """Add a part through scratch memory, where it lies as in its tensor."""
        self._end_step([])
        width = dtype.itemsize
        for piece, (offset, shape, stride) in _pieces(tensor, part, width):
            first = offset * width // 8 * 8
            last = (offset + span((offset, shape, stride))) * width
            num_bytes = -(-(last - first) // 8) * 8
            scratch = self._scratch.take(num_bytes)
            whole = scratch.view(dtype)
            target = whole.as_strided(shape, stride, offset - first // width)
            place = (scratch.data_ptr(), num_bytes // 8, first // 8, row)
            self._places.append(place)
            # The next piece uses the same memory, so this one is read before.
            self._end_step([(scratch, target, piece)])


class Scratch:
    """Memory in which parts are laid out as in their tensors, one at a time.

    Args:
        device: where it is allocated, when it is needed.

    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._data: torch.Tensor | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """The first `num_bytes` of it."""
        if self._data is None or len(self._data) < num_bytes:
            size = max(num_bytes, PIECE_BYTES)
            self._data = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._data[:num_bytes]


def _pieces(
    tensor: torch.Tensor, part: View, width: int
) -> Iterator[tuple[torch.Tensor, View]]:
    """Cut a tensor, and the part that it is, so that no piece spans too many bytes.

    Args:
        tensor: to be cut.
        part: the part of the whole tensor that it is.
        width: bytes of an element of the whole tensor.

    """
    offset, shape, stride = part
    if not tensor.numel():
        return
    steps = [step if size > 1 else 0 for size, step in zip(shape, stride, strict=True)]
    if span(part) * width <= PIECE_BYTES or not any(steps):
        yield tensor, part
        return
    dim = max(range(len(steps)), key=steps.__getitem__)
    rest = span((offset, (*shape[:dim], 1, *shape[dim + 1 :]), stride))
    at_once = max(1, 1 + (PIECE_BYTES // width - rest) // steps[dim])
    if at_once >= shape[dim]:
        yield tensor, part
        return
    for first in range(0, shape[dim], at_once):
        size = min(at_once, shape[dim] - first)
        cut = (*shape[:dim], size, *shape[dim + 1 :])
        piece = tensor.narrow(dim, first, size)
        yield from _pieces(piece, (offset + first * steps[dim], cut, stride), width)
