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
from contextlib import AbstractContextManager

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
PIECE = 1 << 24
"""Elements that are made or compared at once. More elements need more memory. Fewer
elements need more calls of torch, and each call waits for the interpreter while
another thread decodes.
"""
MARGIN_BYTES = 512 << 20
"""Bytes of a GPU's free memory that are never used."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

logger = upstream.init_logger(__name__)

Known = list[tuple[str, Entry]]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Params = Mapping[str, torch.Tensor]
Lend = Callable[[set[str]], AbstractContextManager[Params]]
"""Names of parameters → context: these parameters, with memory."""


class ReplayCheck:
    """Checks the entries of a plan that are not checked yet.

    Args:
        plan: the recorded entries; wrong entries are removed for good.
        params: the parameters that loaders write, by name; they are overwritten.
        load: the model's own loader.
        between: called after each batch with the bytes written so far. An exception
            from it ends the check; entries checked by then stay checked.
        lend: lends memory to the parameters of a batch; by default they have their own.

    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        load: Load,
        between: Callable[[int], None] = lambda num_bytes: None,
        lend: Lend | None = None,
    ) -> None:
        self._plan = plan
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
        for batch in _batches(unproved):
            if not self._has_room(batch):
                continue  # its loader is used until there is room
            proved = self._proves(batch)
            # A wrong entry may have spoilt the others, so each entry is checked alone.
            good = batch if proved else [each for each in batch if self._proves([each])]
            self._plan.prove(entry for _, entry in good)
            wrong |= {name for name, entry in batch if not entry.is_proved}
            self._plan.reject(wrong)
        if wrong and self._lend is None:
            logger.error(
                "the replay plan disagrees with the model's loaders for %d tensors "
                "(%s): these go through their loaders at every update, which is slower",
                len(wrong),
                ", ".join(sorted(wrong)[:4]),
            )
        self._plan.note_checked()

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

    def _has_room(self, batch: Known) -> bool:
        target = next(iter(self._params.values()))
        if not target.is_cuda:
            return True
        free, _ = torch.cuda.mem_get_info(target.device)
        return sum(entry.nbytes for _, entry in batch) + MARGIN_BYTES < free

    def _proves(self, batch: Known) -> bool:
        """Whether loaders and replay do what the entries of a batch say."""
        names = {param for _, entry in batch for param in entry.params}
        if self._lend is None:
            return self._proves_in({name: self._params[name] for name in names}, batch)
        with self._lend(names) as lent:
            return self._proves_in(
                lent, [(name, located(entry, lent)) for name, entry in batch]
            )

    def _proves_in(self, touched: Params, batch: Known) -> bool:
        device = next(iter(touched.values())).device
        for digit in range(_num_digits(batch)):
            patterns = dict(_patterns(batch, digit, device))
            for is_replayed in (False, True):
                for param in touched.values():
                    param.fill_(NEITHER)
                if is_replayed:
                    replay([(entry, patterns[name]) for name, entry in batch])
                elif not self._loads(patterns):
                    return False
                found = [_is_there(entry, patterns[name]) for name, entry in batch]
                found += [_is_untouched(param) for param in touched.values()]
                self._num_bytes += 2 * sum(p.nbytes for p in patterns.values())
                self._between(self._num_bytes)
                if not torch.stack(found).all():
                    return False
        return True

    def _loads(self, patterns: Mapping[str, torch.Tensor]) -> bool:
        try:
            self._load(patterns.items())
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception:  # every loader raises its own kind of error
            return False
        return True


def _batches(known: Known) -> Iterator[Known]:
    """Batches of entries; entries of one parameter follow one another."""
    batch: Known = []
    num_bytes = 0
    for name, entry in sorted(known, key=lambda pair: sorted(pair[1].params)):
        if batch and num_bytes + entry.nbytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append((name, entry))
        num_bytes += entry.nbytes
    if batch:
        yield batch


def _num_digits(batch: Known) -> int:
    """Number of patterns until no two elements of a batch are alike."""
    highest = max(1, sum(entry.shape.numel() for _, entry in batch) - 1)
    return max(math.ceil(highest.bit_length() / _bits(entry)) for _, entry in batch)


def _patterns(
    batch: Known, digit: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """For each tensor of a batch, this digit of the numbers of its elements."""
    first = 0
    for name, entry in batch:
        bits, size = _bits(entry), entry.shape.numel()
        pattern = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        is_exact = all(copied.is_exact for copied in entry.copies)
        flat = (as_integers(pattern) if is_exact else pattern).view(-1)
        for start in range(0, size, PIECE):
            end = min(start + PIECE, size)
            numbers = torch.arange(first + start, first + end, device=device)
            numbers >>= bits * digit
            numbers &= (1 << bits) - 1
            flat[start:end] = numbers
        first += size
        yield name, pattern


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


def _is_there(entry: Entry, pattern: torch.Tensor) -> torch.Tensor:
    """Whether a pattern is where its entry says; the pattern is erased there."""
    found = []
    for copied in entry.copies:
        offset, shape, stride = copied.part
        expected = pattern.as_strided(shape, stride, offset)
        found.append(is_equal(copied.target, expected.to(copied.target.dtype)))
    if entry.home is not None:
        found.append(is_equal(entry.home.tensor, pattern))
    for zeroed in entry.zeros:
        found.append(is_equal(zeroed.target, _constant(zeroed.target, 0)))
    for target in (*(c.target for c in entry.copies), *(z.target for z in entry.zeros)):
        target.fill_(NEITHER)
    return torch.stack(found).all()


def _is_untouched(param: torch.Tensor) -> torch.Tensor:
    return is_equal(param, _constant(param, NEITHER))


def _constant(like: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).expand_as(like)


def is_equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether all bits of two tensors of one shape are equal, in little memory."""
    if a.numel() <= PIECE:
        return (as_integers(a) == as_integers(b)).all()
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    half = a.shape[dim] // 2
    parts = [
        is_equal(a.narrow(dim, at, size), b.narrow(dim, at, size))
        for at, size in ((0, half), (half, a.shape[dim] - half))
    ]
    return torch.stack(parts).all()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as integers, since not every dtype can be compared."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])
