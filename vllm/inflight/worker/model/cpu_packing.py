"""Packing: for how many threads oneDNN packs a matrix on the CPU.

Its form depends on that number, and a multiplication takes the form that the first
matrix of its size had in the process. So all of them are packed for as many threads as
the first, by whatever thread: a staging thread has one, and what it packed for one
would be multiplied to other numbers, for some sizes, by a model that was loaded with
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_num_threads: list[int] = []
"""Of the first packing, once there was one."""


def set_threads(number: int) -> None:
    """Have torch use so many; the number is the calling thread's own, on Linux."""
    # Upstream's CPU workers replace the public name by a refusal.
    torch._C.set_num_threads(number)


@contextmanager
def as_at_first() -> Iterator[None]:
    """Inside, there are as many threads as when this was entered first."""
    own = torch.get_num_threads()
    if not _num_threads:
        _num_threads.append(own)
    if own == _num_threads[0]:
        yield
        return
    set_threads(_num_threads[0])
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
