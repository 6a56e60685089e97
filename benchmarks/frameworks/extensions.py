"""Worker extensions of the packages, by names that every process of an engine finds.

`worker_extension_cls="benchmarks.frameworks.extensions.verl"` is verl's own class, and
`openrlhf_and_verl` one that has the calls of both.
"""

from __future__ import annotations

from functools import cache

import torch

from benchmarks.frameworks.on_host import use_host, use_host_for_checkpoint_engine
from benchmarks.frameworks.packages import OWN

AND = "_and_"


def __getattr__(name: str) -> type:
    if not OWN.keys() >= set(name.split(AND)):
        raise AttributeError(name)
    return _made(name)


@cache
def _made(name: str) -> type:
    if not torch.cuda.is_available():
        use_host()
    found = [OWN[each].worker_extension() for each in name.split(AND)]
    if name == "checkpoint_engine" and not torch.cuda.is_available():
        use_host_for_checkpoint_engine(*found)
    return found[0] if len(found) == 1 else type(name, tuple(found), {})
