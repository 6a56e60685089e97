"""The replay check: a replay of the plan does exactly what the loaders do.

A loader is recorded when the engine starts, or at one update. Before the engine serves,
or the next update receives anything, the model's own loaders get index patterns in
place of tensors. No two elements of a pattern are alike, so the parameters show where
every element went. That has to agree with the plan, element by element, and nothing
else may have been written. The replay itself has to pass the same test. Real weights
could not prove it: those of a norm may all be one, and a matrix may be symmetric.

At an update the patterns are written into the shadow weights, which the update is about
to overwrite. At the start, and with delta staging, a batch of parameters gets memory
for its patterns, and loses it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby, product

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import InflightError
from vllm.inflight.worker.replay_plan import (
    Entry,
    Plan,
    located,
    overlapping,
    replay,
)

NEITHER = 3
"""A value that no compared place of a pattern has: nothing was written there."""

BATCH_BYTES = 256 << 20
"""Bytes of patterns that are loaded at once; a larger tensor is loaded alone."""
ROW_BITS = 16
"""Most bits of a pattern where one pattern cannot hold the numbers of all elements."""
PIECE = 1 << 24
"""Elements that are made, or words that are compared, at once. More of them need more
memory. Fewer need more calls of torch, and each call waits for the interpreter while
another thread decodes.
"""
MOST_NAMED = 4
"""Most wrong entries that a message names."""
MARGIN_BYTES = 512 << 20
"""Bytes of a GPU's free memory that are never used."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

logger = upstream.init_logger(__name__)

Known = list[tuple[str, Entry]]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Params = Mapping[str, torch.Tensor]
Lend = Callable[[set[str], int], AbstractContextManager[Params] | None]
"""Names of parameters, and bytes of their patterns → context: these parameters, with
memory; None if there is no room for both."""


class ReplayCheck:
    """Checks the entries of a plan that are not checked yet.

    Args:
        plan: the recorded entries; wrong entries are removed for good.
        params: the parameters that loaders write, by name; they are overwritten.
        load: the model's own loader.
        between: called after each batch with the bytes written so far. An exception
            from it ends the check; entries checked by then stay checked.
        lend: lends memory to the parameters of a batch; by default they have their own.
        consequence: what becomes of tensors whose entries are wrong, for the log.

    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        load: Load,
        between: Callable[[int], None] = lambda num_bytes: None,
        lend: Lend | None = None,
        consequence: str = "these go through their loaders at every update",
    ) -> None:
        self._plan = plan
        self._consequence = consequence
        self._params = params
        self._lend = lend
        self._load = load
        self._between = between
        self._num_bytes = 0

    def begun(self) -> set[str]:
        """The parameters that the check will write."""
        return {
            param
            for _, entry in self._plan.items()
            if not entry.is_proved
            for param in entry.params
        }

    def run(self) -> None:
        """Check every unchecked entry; a wrong one is removed from the plan."""
        self._plan.reject(self._ambiguous())
        wrong: set[str] = set()
        unproved = [(n, e) for n, e in self._plan.items() if not e.is_proved]
        try:
            for batch in batches(unproved):
                found = self._wrong(batch)
                self._plan.reject(found)
                wrong |= found
        finally:
            if wrong:
                self._tell(wrong)
        self._plan.note_checked()

    def _tell(self, wrong: set[str]) -> None:
        """Log which entries are wrong, and what follows."""
        num_more = len(wrong) - MOST_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        logger.error(
            "the replay plan disagrees with the model's loaders for %d tensors "
            "(%s%s): %s. Please report this with the name of the model",
            len(wrong),
            ", ".join(sorted(wrong)[:MOST_NAMED]),
            more,
            self._consequence,
        )

    def _ambiguous(self) -> set[str]:
        """Tensors that write to the same elements: their order decides.

        Where memory is lent, of a tensor that is proved and one that is not, the
        latter.
        """
        params = overlapping(at for _, e in self._plan.items() for at in e.filled)
        return {
            name
            for name, entry in self._plan.items()
            if not params.isdisjoint(entry.params)
            and not (entry.is_proved and self._lend is not None)
        }

    def _wrong(self, batch: Known) -> set[str]:
        """Prove the entries of a batch; the tensors whose entries are wrong.

        A wrong entry may spoil the others, so the halves of its batch are checked, and
        theirs. An entry that is wrong has been checked alone in the end.
        """
        is_right = self._proves(batch)
        if is_right is None:
            return set()  # its loader is used until there is room
        if is_right:
            self._plan.prove(entry for _, entry in batch)
            return set()
        if len(batch) == 1:
            return {name for name, _ in batch}
        half = len(batch) // 2
        return self._wrong(batch[:half]) | self._wrong(batch[half:])

    def _proves(self, batch: Known) -> bool | None:
        """Whether loaders and replay do what the entries of a batch say.

        None if there is no room for the patterns.
        """
        names = {param for _, entry in batch for param in entry.params}
        num_bytes = sum(entry.nbytes for _, entry in batch)
        if self._lend is None:
            own = {name: self._params[name] for name in names}
            device = next(iter(own.values())).device
            has_room = num_bytes + MARGIN_BYTES < free_bytes(device)
            return self._proves_in(own, batch) if has_room else None
        if (lending := self._lend(names, num_bytes)) is None:
            return None
        with lending as lent:
            return self._proves_in(
                lent, [(name, located(entry, lent)) for name, entry in batch]
            )

    def _proves_in(self, touched: Params, batch: Known) -> bool:
        device = next(iter(touched.values())).device
        # New memory takes longer than to write to it.
        patterns = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device=device)
            for name, entry in batch
        }
        num_bytes = sum(pattern.nbytes for pattern in patterns.values())
        open_params = _not_filled(touched, batch)
        _, num_digits = numbering(batch)
        for digit, is_replayed in product(range(num_digits), (False, True)):
            if not is_replayed:
                write(patterns, batch, digit)
            for param in touched.values():
                param.fill_(NEITHER)
            if is_replayed:
                replay([(entry, patterns[name]) for name, entry in batch])
            elif not self._loads(patterns, device):
                return False
            found = [
                _is_there(entry, patterns[name], open_params) for name, entry in batch
            ]
            found += [_is_untouched(touched[name]) for name in open_params]
            self._num_bytes += 2 * num_bytes
            self._between(self._num_bytes)
            if not torch.stack(found).all():
                return False
        return True

    def _loads(
        self, patterns: Mapping[str, torch.Tensor], device: torch.device
    ) -> bool:
        # At an update, its thread has set the device.
        place = nullcontext() if self._lend is None else device
        try:
            with place:
                self._load(patterns.items())
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception:  # every loader raises its own kind of error
            return False
        return True


def free_bytes(device: torch.device) -> float:
    """Free bytes of a device; the host has enough."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def batches(known: Known) -> Iterator[Known]:
    """Batches of entries; entries of one parameter follow one another.

    All patterns of a batch hold as many bits. One tensor whose patterns hold few would
    cost all others of its batch more patterns.
    """

    def bits_of(pair: tuple[str, Entry]) -> int:
        return _bits(pair[1])

    in_order = sorted(known, key=lambda pair: (bits_of(pair), sorted(pair[1].params)))
    for _, alike in groupby(in_order, bits_of):
        batch: Known = []
        num_bytes = 0
        for name, entry in alike:
            if batch and num_bytes + entry.nbytes > BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append((name, entry))
            num_bytes += entry.nbytes
        yield batch


def numbering(batch: Known) -> tuple[int, int]:
    """Bits of one pattern, and patterns until no two elements of a batch are alike."""
    bits = min(_bits(entry) for _, entry in batch)
    sizes = [entry.shape.numel() for _, entry in batch]
    if sum(sizes) <= 1 << bits:
        return bits, 1
    bits = min(bits, ROW_BITS)
    num_rows = sum(math.ceil(size / (1 << bits)) for size in sizes)
    return bits, 1 + math.ceil((num_rows - 1).bit_length() / bits)


def write(patterns: Params, batch: Known, digit: int) -> None:
    """Write this digit of the numbers of the elements of each tensor of a batch.

    Where one digit is not enough, a tensor is numbered in rows. The first digit is the
    place in the row, and the others are the number of the row. So a pattern is copies
    of one row, or each of its rows is filled with one number.
    """
    bits, num_digits = numbering(batch)
    first = 0
    for name, entry in batch:
        is_exact = all(copied.is_exact for copied in entry.copies)
        pattern = patterns[name]
        flat = (as_integers(pattern) if is_exact else pattern).view(-1)
        if num_digits > 1:
            _write_rows(flat, first, bits, digit)
            first += math.ceil(len(flat) / (1 << bits))
            continue
        for piece in flat.split(PIECE):
            end = first + len(piece)
            piece.copy_(torch.arange(first, end, device=flat.device))
            first = end


def _write_rows(flat: torch.Tensor, first: int, bits: int, digit: int) -> None:
    """Write one digit of the numbers of elements; `first` is their first row."""
    size_of_row, device = 1 << bits, flat.device
    num_whole = len(flat) // size_of_row
    whole, rest = flat.split([num_whole * size_of_row, len(flat) % size_of_row])
    if digit == 0:
        row = torch.arange(size_of_row, device=device).to(flat.dtype)
        whole.view(num_whole, size_of_row).copy_(row)
        rest.copy_(row[: len(rest)])
        return
    rows = torch.arange(first, first + num_whole + 1, device=device)
    rows = ((rows >> bits * (digit - 1)) & (size_of_row - 1)).to(flat.dtype)
    whole.view(num_whole, size_of_row).copy_(rows[:num_whole, None])
    rest.copy_(rows[num_whole:])


def _bits(entry: Entry) -> int:
    """Bits of an element number that one pattern can hold.

    Where the dtype stays, all bits of an element are copied as they are, except those
    of NaN: a GPU that copies many tensors at once makes one NaN of all. Where a loader
    casts, the pattern uses numbers that both dtypes can hold.
    """
    casts = [c.target.dtype for c in entry.copies if not c.is_exact]
    if not casts and entry.dtype is not torch.bool:
        width = 8 * entry.dtype.itemsize
        return min(width - 2 if entry.dtype.is_floating_point else width, 32)
    return min(_exact_bits(dtype) for dtype in (entry.dtype, *casts))


def _exact_bits(dtype: torch.dtype) -> int:
    """Number of bits of the integers that a dtype holds exactly."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:
        return 1 - round(math.log2(torch.finfo(dtype).eps))
    return 8 * dtype.itemsize - 1


def _not_filled(touched: Params, batch: Known) -> set[str]:
    """Parameters with elements that no entry of a batch writes to."""
    num_open = {name: param.numel() for name, param in touched.items()}
    for _, entry in batch:
        for each in entry.writes:
            num_open[each.param] -= each.target.numel()
    return {name for name, num in num_open.items() if num}


def _is_there(
    entry: Entry, pattern: torch.Tensor, open_params: set[str]
) -> torch.Tensor:
    """Whether a pattern is where its entry says; it is erased in `open_params`."""
    found = []
    if entry.home is not None:  # its only copy
        found.append(is_equal(entry.home.tensor, pattern))
    for copied in entry.copies if entry.home is None else ():
        offset, shape, stride = copied.part
        expected = pattern.as_strided(shape, stride, offset)
        found.append(is_equal(copied.target, expected.to(copied.target.dtype)))
    for zeroed in entry.zeros:
        found.append(is_equal(zeroed.target, _constant(zeroed.target, 0)))
    for each in entry.writes:
        if each.param in open_params:
            each.target.fill_(NEITHER)
    return torch.stack(found).all()


def _is_untouched(param: torch.Tensor) -> torch.Tensor:
    return is_equal(param, _constant(param, NEITHER))


def _constant(like: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).expand_as(like)


def is_equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether all bits of two tensors of one shape are equal, in little memory."""
    a, b = in_words(a, b)
    if a.numel() <= PIECE:
        return (a == b).all()
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    half = a.shape[dim] // 2
    parts = [
        is_equal(a.narrow(dim, at, size), b.narrow(dim, at, size))
        for at, size in ((0, half), (half, a.shape[dim] - half))
    ]
    return torch.stack(parts).all()


def in_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one form as integers, of eight bytes if all of them allow it.

    Integers of two bytes take four times as long to compare.
    """
    wide = torch.int64.itemsize

    def is_wide(tensor: torch.Tensor) -> bool:
        size, steps = tensor.itemsize, tensor.stride()
        return (
            tensor.dim() > 0
            and steps[-1] == 1
            and not tensor.data_ptr() % wide
            and not any(
                n * size % wide
                for n in (tensor.shape[-1], tensor.storage_offset(), *steps[:-1])
            )
        )

    if all(map(is_wide, tensors)):
        return [tensor.view(torch.int64) for tensor in tensors]
    return [as_integers(tensor) for tensor in tensors]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as integers, since not every dtype can be compared."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])
