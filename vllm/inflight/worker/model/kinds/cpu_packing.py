"""Packing on the CPU build: weights that oneDNN packs, and convolutions that are
packed.

oneDNN packs a matrix for a number of threads. A multiplication uses the form that the
first matrix of its size had in the process. So all matrices are packed for as many
threads as the first one, whichever thread packs them. A staging thread has one torch
thread. For some sizes, a matrix that it packed for one thread would be multiplied
wrongly by a model that was loaded with more.

Mamba's convolutions are packed in bf16, where a CPU multiplies it. The weight is packed
where it lies, and the unpacked weight is kept in an attribute. Mamba's layers read
neither: they read a buffer, which showed the weight before it was packed. Here the
buffer is made to show the kept weight, in both models, so that all three belong to one
version and are flipped together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_threads(number: int) -> None:
    """Set the number of torch threads; on Linux, of the calling thread alone."""
    # Upstream's CPU workers replace the public function by one that warns.
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
"""Mamba's names of the convolution and of the buffer."""


def show(model: torch.nn.Module) -> None:
    """Make every such buffer of `model` show the weight its convolution was loaded
    with."""
    for layer in model.modules():
        unpacked = vars(layer._modules.get(LAYER) or layer).get(UNPACKED)
        buffer = layer._buffers.get(BUFFER)
        if unpacked is not None and buffer is not None:
            buffer.data = unpacked
