"""When a module of this process has last got another parameter or layer.

Whoever remembers where parameters are has to look again then, and need not before. A
load may register parameters anew, layer by layer. Torch tells of that; code of ours
that goes past torch's registration says so by `changed`.
"""

from __future__ import annotations

import functools

import torch

_latest = object()


def latest() -> object:
    """An object that is another one after each change."""
    return _latest


def changed() -> None:
    """A module has another parameter or layer, or a parameter other memory."""
    global _latest
    _latest = object()


@functools.cache
def follow() -> None:
    """Notice every registration of a parameter or a layer from now on."""
    torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, param: changed()
    )
    torch.nn.modules.module.register_module_module_registration_hook(
        lambda module, name, layer: changed()
    )
