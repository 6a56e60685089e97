"""Convolutions that the CPU build packs: Mamba's, in bf16 where a CPU multiplies it.

Their weight is then packed where it lies, and what was packed is kept in an attribute.
Mamba's layers look at neither but at a buffer, which showed the weight before it was
packed. Here the buffer is made to show what is kept, in both trees, so that all three
are of one version and change together.
"""

from __future__ import annotations

import torch

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
