"""The proof of a plan: what it replays is what the loaders do.

A loader is recorded at one update. Before the next one receives anything, the model's
own loaders are given index patterns in the place of tensors: no two elements of a
pattern are alike, so where every element went can be read off the parameters. That has
to be what the plan says, element by element, and nothing else may have been written.
The same is asked of the replay itself. Weights could not prove it: those of a norm are
all ones, and a matrix may be symmetric.

The patterns are written into the second set, which the update is about to fill anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import InflightError
from vllm.inflight.worker.replay_plan import Entry, Plan, overlapping, replay

NEITHER = 3
"""What is in no place of a pattern's that is looked at: nothing was written there."""

BATCH_BYTES = 256 << 20
"""Patterns that are loaded at once; a larger tensor comes alone."""
PIECE = 1 << 24
"""Elements that are made or compared at once: more need more memory, and fewer more
calls of torch, each of which waits for the interpreter beside a thread that decodes."""
MARGIN_BYTES = 512 << 20
"""Of a GPU's free memory, what is left alone."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

logger = upstream.init_logger(__name__)

Known = list[tuple[str, Entry]]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class ReplayCheck:
    """The proof of what a plan has recorded and nobody has proved yet.

    Args:
        plan: what was recorded; entries that are wrong are refused for good.
        params: the parameters that loaders write, by name; overwritten.
        load: the model's own loader.
        between: called after each batch with the bytes written so far; what it raises
            ends the proof, and what is proved by then stays so.

    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        load: Load,
        between: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._plan = plan
        self._params = params
        self._load = load
        self._between = between
        self._num_bytes = 0

    def begun(self) -> set[str]:
        """The parameters that the proof is going to write."""
        return {
            param
            for _, entry in self._plan.items()
            if not entry.is_proved
            for param in entry.params
        }

    def run(self) -> None:
        """Prove every entry that is not proved, or refuse it."""
        self._plan.refuse(self._ambiguous())
        wrong: set[str] = set()
        unproved = [(n, e) for n, e in self._plan.items() if not e.is_proved]
        for batch in _batches(unproved):
            if not self._has_room(batch):
                continue  # it goes through its loader until there is some
            proved = self._proves(batch)
            # One that is wrong may have spoilt the others: each is asked alone.
            good = batch if proved else [each for each in batch if self._proves([each])]
            self._plan.prove(entry for _, entry in good)
            wrong |= {name for name, entry in batch if not entry.is_proved}
            self._plan.refuse(wrong)
        if wrong:
            logger.error(
                "what was recorded of the model's loaders is not what they do with %d "
                "tensors (%s): these go through them at every update, which is slower",
                len(wrong),
                ", ".join(sorted(wrong)[:4]),
            )

    def _ambiguous(self) -> set[str]:
        """Tensors that write to places of each other: the order of them decides."""
        params = overlapping(at for _, e in self._plan.items() for at in e.filled)
        return {n for n, e in self._plan.items() if not params.isdisjoint(e.params)}

    def _has_room(self, batch: Known) -> bool:
        target = next(iter(self._params.values()))
        if not target.is_cuda:
            return True
        free, _ = torch.cuda.mem_get_info(target.device)
        return sum(entry.nbytes for _, entry in batch) + MARGIN_BYTES < free

    def _proves(self, batch: Known) -> bool:
        """Whether loaders and replay do what the entries of a batch say."""
        touched = {p: self._params[p] for _, entry in batch for p in entry.params}
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
        except Exception:  # each loader has its own for what it does not take
            return False
        return True


def _batches(known: Known) -> Iterator[Known]:
    """Entries of one parameter one after the other, as many as fit a batch."""
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
    """Patterns that it takes until no two elements of a batch are alike."""
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
        flat = (_as_integers(pattern) if is_exact else pattern).view(-1)
        for start in range(0, size, PIECE):
            end = min(start + PIECE, size)
            numbers = torch.arange(first + start, first + end, device=device)
            numbers >>= bits * digit
            numbers &= (1 << bits) - 1
            flat[start:end] = numbers
        first += size
        yield name, pattern


def _bits(entry: Entry) -> int:
    """Bits of an element's number that one pattern can tell.

    Where the dtype stays, all bits of an element travel as they are, but for those of
    what is not a number: a GPU that copies many tensors at once makes one NaN of all.
    Where a loader casts, the numbers are such that both dtypes have them.
    """
    casts = [c.target.dtype for c in entry.copies if not c.is_exact]
    if not casts and entry.dtype is not torch.bool:
        width = 8 * entry.dtype.itemsize
        return min(width - 2 if entry.dtype.is_floating_point else width, 32)
    return min(_exact_bits(dtype) for dtype in (entry.dtype, *casts))


def _exact_bits(dtype: torch.dtype) -> int:
    """Numbers of so many bits can be kept in a dtype."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:
        return 1 - round(math.log2(torch.finfo(dtype).eps))
    return 8 * dtype.itemsize - 1


def _is_there(entry: Entry, pattern: torch.Tensor) -> torch.Tensor:
    """Whether a pattern is where its entry says; it is taken away from there."""
    found = []
    for copied in entry.copies:
        offset, shape, stride = copied.part
        expected = pattern.as_strided(shape, stride, offset)
        found.append(_is_equal(copied.target, expected.to(copied.target.dtype)))
    if entry.home is not None:
        found.append(_is_equal(entry.home.tensor, pattern))
    for zeroed in entry.zeros:
        found.append(_is_equal(zeroed.target, _constant(zeroed.target, 0)))
    for target in (*(c.target for c in entry.copies), *(z.target for z in entry.zeros)):
        target.fill_(NEITHER)
    return torch.stack(found).all()


def _is_untouched(param: torch.Tensor) -> torch.Tensor:
    return _is_equal(param, _constant(param, NEITHER))


def _constant(like: torch.Tensor, value: int) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).expand_as(like)


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether all bits of two tensors of one shape are equal, in little memory."""
    if a.numel() <= PIECE:
        return (_as_integers(a) == _as_integers(b)).all()
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    half = a.shape[dim] // 2
    parts = [
        _is_equal(a.narrow(dim, at, size), b.narrow(dim, at, size))
        for at, size in ((0, half), (half, a.shape[dim] - half))
    ]
    return torch.stack(parts).all()


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element, since not every dtype can be compared."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])
