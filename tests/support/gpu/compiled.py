"""Which kernels of ours Triton compiles once vLLM has warmed up; prints JSON.

Usage: python -m tests.support.gpu.compiled STAGING OLD NEW
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from triton import knobs

from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell


def main(staging: str, old: Path, new: Path) -> None:
    from vllm import LLM
    from vllm.utils import jit_monitor

    from vllm.inflight.trainer import Publisher

    compiled: list[str] = []

    def note(**facts: Any) -> None:
        kernel = facts["fn"]
        if jit_monitor.is_active() and kernel.module.startswith("vllm.inflight"):
            compiled.append(kernel.name)

    # vLLM's own hook calls the one that was there.
    knobs.runtime.jit_post_compile_hook = note
    log = {"delta_gib": 1.0} if staging == "delta" else {}
    llm: Any = LLM(
        str(old),
        **OPTIONS | {"enforce_eager": False},  # else vLLM watches no kernels
        weight_transfer_config={"backend": "local"},
        additional_config={"inflight": {"staging": staging} | log},
    )
    before = greedy(llm)
    seen: dict[str, Any] = {"watched": jit_monitor.is_active(), "start": list(compiled)}
    llm.update_weights_from_disk(str(new), "new")
    after = greedy(llm)
    weights = load_file(new / "model.safetensors")
    with Publisher(llm, weights) as to:
        to.publish()
        for tensor in weights.values():
            tensor.view(-1).view(torch.int16)[::100] ^= 1
        seen["is_delta"] = to.publish().is_delta
    llm.rollback_weights()
    seen["rolled back"] = greedy(llm) == after
    llm.update_weights_from_disk(str(old), "old")
    seen["back"] = greedy(llm) == before
    seen["verified"] = llm.verify_weights()["result"]
    tell(seen | {"later": compiled[len(seen["start"]) :]})


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], *map(Path, sys.argv[2:]))
