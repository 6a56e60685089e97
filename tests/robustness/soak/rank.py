"""What each rank of a long run tells of itself."""

import ctypes
import gc
from typing import Any

import torch

from tests.support.engines.oracle import Oracle
from vllm.inflight.transport.collective import nccl
from vllm.inflight.transport.collective.gloo import GlooGroup

GROUPS = nccl.NcclGroup, GlooGroup
MIB = 1 << 20


class Rank(Oracle):
    """A worker extension."""

    def tests_held(self) -> dict[str, float]:
        """See `held`."""
        return held()


def held() -> dict[str, float]:
    """Groups that are in this process, open or not, and memory of its tensors.

    Memory that is freed is given back to the system: a thread that sends or receives
    has a heap of its own, and glibc keeps what was freed there.
    """
    gc.unfreeze()  # a rank freezes what it has before it stages
    gc.collect()
    groups: list[Any] = [g for g in gc.get_objects() if type(g) in GROUPS]
    gc.freeze()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    on_gpu = torch.cuda.is_available()
    return {
        "groups": len(groups),
        "open_groups": sum(group.ended is None for group in groups),
        "undrained": len(nccl._undrained),
        "tensors_mib": torch.cuda.memory_allocated() / MIB if on_gpu else 0.0,
    }
