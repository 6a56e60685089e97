"""Fingerprints of tensors: whether a tensor was written, and whether all of it was.

A fingerprint is a sample of the bytes of a tensor, copied to the host. It detects
writes of every kind: through `.data`, by a kernel on another stream, by a network card.
Reading whole weights would take much longer than a step. `LINES` lines of `LINE_BYTES`
are 2048 numbers in bf16. An optimizer's step that changes one number in a hundred is
missed with a probability of 1e-9 per tensor. A write of a few numbers by such a way can
be missed.

A blank tensor is filled with one 64-bit number. A word that differs has been written,
so the words that are left show whether the whole tensor was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.inflight.ops.arriving import to_host

LINES = 64
"""Sampled lines of a tensor, at equal distances."""
LINE_BYTES = 64
WORD_BYTES = 8
SLAB_WORDS = 1 << 24
"""Words that are compared at once; each takes a byte of memory."""
BLANK = 0x0D0B_0705_0B03_0907
"""A small finite number in every dtype, so that a step on blank weights is harmless."""

Sample = list[torch.Tensor]
"""Sampled bytes on the host."""


def words_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor as int64 words, shape `[nbytes // 8]`.

    A word that is shared with a neighbouring tensor is left out. None if the elements
    of the
    tensor are not adjacent.
    """
    if not _is_dense(tensor):
        return None
    begin = tensor.storage_offset() * tensor.element_size()
    first, last = -(-begin // WORD_BYTES), (begin + tensor.nbytes) // WORD_BYTES
    return _memory_of(tensor, torch.int64, first, max(0, last - first))


class Lines:
    """The lines of tensors that are sampled, as views of their memory.

    Making the views of a model takes milliseconds of Python. Reading them takes few
    operators, so views of memory that stays are kept.

    Args:
        tensors: to sample; a tensor without lines is sampled whole.

    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._num = len(tensors)
        grouped: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        pieces = [_piece_of(tensor) for tensor in tensors]
        for number, piece in enumerate(pieces):
            grouped.setdefault((piece.device, piece.dtype), []).append(number)
        self._groups = [
            (numbers, [pieces[number] for number in numbers])
            for numbers in grouped.values()
        ]

    def read(self) -> Sample:
        """The bytes as they are now, joined in host tensors; waits for the stream."""
        return [to_host(torch.cat(pieces)) for _, pieces in self._groups]

    def split(self, sample: Sample) -> Sample:
        """What `read` returned, as one host tensor for each sampled tensor."""
        found: Sample = [torch.empty(0)] * self._num
        for (numbers, pieces), joined in zip(self._groups, sample, strict=True):
            sizes = [len(piece) for piece in pieces]
            for number, part in zip(numbers, joined.split(sizes), strict=True):
                found[number] = part
        return found


def sample(tensors: Sequence[torch.Tensor]) -> Sample:
    """A sample of each tensor, on the host; waits for the current stream."""
    lines = Lines(tensors)
    return lines.split(lines.read())


def is_same(one: Sample, other: Sample) -> bool:
    """Whether two samples of the same tensors are equal."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in pairs
    )


def make_blank(tensor: torch.Tensor) -> bool:
    """Fill a tensor with `BLANK`; returns whether blank words can be recognised."""
    words = words_of(tensor)
    if words is None or not words.numel():
        return False
    words.fill_(BLANK)
    return True


def is_blank_in(sampled: torch.Tensor) -> bool:
    """Whether the sample of a tensor that was blank still has a blank word."""
    flat = sampled.reshape(-1)
    if flat.dtype is not torch.int64:
        flat = flat[: flat.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
    return bool((flat == BLANK).any())


def has_blank(tensor: torch.Tensor) -> bool:
    """Whether a tensor still has a blank word; reads all of it."""
    words = words_of(tensor)
    if words is None:
        return False
    return any(bool((slab == BLANK).any()) for slab in words.split(SLAB_WORDS))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _lines_of(words: torch.Tensor) -> torch.Tensor:
    width = LINE_BYTES // WORD_BYTES
    step = (words.numel() - width) // (LINES - 1)
    return words.as_strided((LINES, width), (step, 1), words.storage_offset())


def _piece_of(tensor: torch.Tensor) -> torch.Tensor:
    """What is sampled of a tensor: int64 [LINES, words of a line], or bytes."""
    words = words_of(tensor)
    if words is not None and words.nbytes > LINES * LINE_BYTES:
        return _lines_of(words)
    return _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a small tensor; the first bytes of a tensor with gaps."""
    whole = tensor.detach()
    if not _is_dense(whole):
        whole = whole.reshape(-1)[: LINES * LINE_BYTES // whole.element_size()]
    begin = whole.storage_offset() * whole.element_size()
    return _memory_of(whole, torch.uint8, int(begin), whole.nbytes)


def _memory_of(
    tensor: torch.Tensor, dtype: torch.dtype, first: int, count: int
) -> torch.Tensor:
    """A part of the storage of a tensor, counted in elements of `dtype`."""
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), first, (count,), (1,))
