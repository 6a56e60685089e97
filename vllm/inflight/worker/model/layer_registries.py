"""Upstream's registries of layers, kept as the live model has left them.

Some layers registry themselves in a dictionary of their module when they are built, by
their name in the model. A step looks them up there. The layers of the shadow model have
the same names. Without this module, steps would compute with layers of the shadow
model, whose weights belong to another version or to none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

OF_MODELS = ("vllm.model_executor.", "vllm.models.")
"""Upstream's packages whose modules define layers."""


@contextmanager
def kept() -> Iterator[None]:
    """Context for building a second tree: entries that it replaces are restored."""
    before = [
        (registry, key, layer)
        for registry in _registries()
        for key, layer in list(registry.items())
        if isinstance(layer, torch.nn.Module)
    ]
    try:
        yield
    finally:
        for registry, key, layer in before:
            if registry.get(key) is not layer:
                registry[key] = layer


def _registries() -> Iterator[MutableMapping[Any, Any]]:
    """The variables of upstream's modules, and the dictionaries among them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(OF_MODELS) and module is not None:
            yield vars(module)
            for value in list(vars(module).values()):
                if isinstance(value, MutableMapping):
                    yield value
