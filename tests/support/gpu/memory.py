"""What an engine takes of its GPU's memory, by where it stages; prints JSON.

Usage: python -m tests.support.gpu.memory STAGING OLD NEW
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.memory import held_by
from tests.support.engines.script import OPTIONS, tell

KV_BYTES = 1 << 30


def taken() -> int:
    """Bytes of the GPU that this process holds, but for what torch keeps for itself.

    What other processes take meanwhile does not count.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return held_by({os.getpid()})


def main(staging: str, old: Path, new: Path) -> None:
    from vllm import LLM

    torch.zeros(1, device="cuda")  # whatever CUDA itself takes
    before = taken()
    llm: Any = LLM(
        str(old),
        **OPTIONS | {"kv_cache_memory_bytes": KV_BYTES},
        weight_transfer_config={"backend": "local"},
        additional_config={"inflight": {"staging": staging}},
    )
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    held = held_by({os.getpid()}) - before  # with what torch keeps for itself
    seen = {
        "weights": sum(param.nbytes for param in model.parameters()),
        "held": held,
        "started": taken() - before,
    }
    if staging != "off":
        llm.update_weights_from_disk(str(new))
        llm.rollback_weights()
        seen["updated"] = taken() - before
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], *map(Path, sys.argv[2:]))
