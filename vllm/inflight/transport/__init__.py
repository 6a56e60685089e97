"""How the bytes of an update travel from a trainer to the workers.

A trainer imports from here what it gives to upstream's
`WeightTransferTrainerFactory.trainer_init`. A name is looked up when it is first used,
so that importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.inflight.transport.buckets.tensor_slices import Shard as Shard
    from vllm.inflight.transport.collective.trainer_engine import (
        GlooTrainerInitInfo as GlooTrainerInitInfo,
    )
    from vllm.inflight.transport.collective.trainer_engine import (
        NcclTrainerInitInfo as NcclTrainerInitInfo,
    )
    from vllm.inflight.transport.collective.trainer_engine import ShardMeta as ShardMeta
    from vllm.inflight.transport.cuda_ipc.trainer_engine import (
        IpcTrainerInitInfo as IpcTrainerInitInfo,
    )
    from vllm.inflight.transport.weight_source import Weights as Weights

HOMES = {
    "GlooTrainerInitInfo": "collective.trainer_engine",
    "IpcTrainerInitInfo": "cuda_ipc.trainer_engine",
    "NcclTrainerInitInfo": "collective.trainer_engine",
    "Shard": "buckets.tensor_slices",
    "ShardMeta": "collective.trainer_engine",
    "Weights": "weight_source",
}
"""Public name -> the module of this package that defines it."""


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
