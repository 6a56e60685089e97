"""Worker extensions of the packages, by names that every process of an engine finds.

`worker_extension_cls="benchmarks.frameworks.extensions.verl"` is verl's own class.
"""

from __future__ import annotations

import torch

from benchmarks.frameworks.on_host import use_host
from benchmarks.frameworks.packages import OWN


def __getattr__(name: str) -> type:
    if name not in OWN:
        raise AttributeError(name)
    if not torch.cuda.is_available():
        use_host()
    return OWN[name].worker_extension()
