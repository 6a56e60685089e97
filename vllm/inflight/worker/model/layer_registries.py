"""Upstream's registers of layers, kept as the live model has left them.

Some layers enter themselves in a dictionary of their module when they are built, under
the name that they have in the model, and a step looks them up there. A second tree has
the same names. Without this, steps would compute with layers of the second tree, whose
weights are of another version or of none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

OF_MODELS = ("vllm.model_executor.", "vllm.models.")
"""Packages of upstream whose modules define layers."""


@contextmanager
def kept() -> Iterator[None]:
    """While a second tree is built: entries of layers that it replaces are put back."""
    before = [
        (register, key, layer)
        for register in _registers()
        for key, layer in list(register.items())
        if isinstance(layer, torch.nn.Module)
    ]
    try:
        yield
    finally:
        for register, key, layer in before:
            if register.get(key) is not layer:
                register[key] = layer


def _registers() -> Iterator[MutableMapping[Any, Any]]:
    """The variables of upstream's modules, and the dictionaries among them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(OF_MODELS) and module is not None:
            yield vars(module)
            for value in list(vars(module).values()):
                if isinstance(value, MutableMapping):
                    yield value
