"""Packing: for how many threads oneDNN packs a matrix on the CPU.

Its form depends on that number, and a multiplication takes the form that the first
matrix of its size had in the process. So all of them are packed for as many threads as
the first, by whatever thread: a staging thread has one, and what it packed for one
would be multiplied to other numbers, for some sizes, by a model that was loaded with
more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_threads(number: int) -> None:
    """Have torch use so many; the number is the calling thread's own, on Linux."""
    # Upstream's CPU workers replace the public name by a refusal.
    torch._C.set_num_threads(number)


@functools.cache
def num_threads_of_first_packing() -> int:
    """The number of torch threads at the first packing of this process.

    oneDNN's cache of matrix forms belongs to the process, so this number does, too.
    """
    return torch.get_num_threads()


@contextmanager
def as_at_first() -> Iterator[None]:
    """Inside, torch has as many threads as at the first packing of this process."""
    own, first = torch.get_num_threads(), num_threads_of_first_packing()
    if own == first:
        yield
        return
    set_threads(first)
    try:
        yield
    finally:
        set_threads(own)


UNPACKED = "_cpu_unpacked_conv_weight"
"""Attribute of the convolution: its weight as it was loaded, without the middle one of
its three dimensions."""

LAYER, BUFFER = "conv1d", "conv_weights"
"""What a Mamba layer calls its convolution, and the buffer."""


def show(model: torch.nn.Module) -> None:
    """Have every such buffer of `model` show what its convolution was loaded with."""
    for layer in model.modules():
        unpacked = vars(layer._modules.get(LAYER) or layer).get(UNPACKED)
        buffer = layer._buffers.get(BUFFER)
        if unpacked is not None and buffer is not None:
            buffer.data = unpacked
