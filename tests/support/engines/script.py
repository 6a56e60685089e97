"""Scripts of tests/e2e in a process of their own: vLLM wants the choice for one."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from tests.support.excerpt import excerpt
from tests.support.preloaded_process import run
from tests.support.serving import NUM_KV_BLOCKS

ROOT = Path(__file__).parents[3]
RESULT = "RESULT "
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.5,
}
"""Of an `LLM` of a tiny model."""
if torch.cuda.is_available():
    # Lanes have their engines on one GPU. vLLM would measure what is left there for KV,
    # and give up if another lane lets memory go meanwhile.
    OPTIONS["gpu_memory_utilization"] /= int(
        os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    )
    OPTIONS["kv_cache_memory_bytes"] = 1 << 30
    # Engines are compared token by token. Of kernels that add up in different orders
    # torch's compiler takes the fastest at each start, on a busy GPU not always the
    # same. Its variable of the environment for this is lost: Dynamo puts the flag back
    # to what it was in eager mode before the kernels are chosen.
    # With combo kernels vLLM 0.29 has them timed, which that mode does not allow.
    OPTIONS["compilation_config"] = {
        "inductor_compile_config": {
            "deterministic": True,
            "benchmark_combo_kernel": False,
        }
    }
else:
    OPTIONS["num_gpu_blocks_override"] = NUM_KV_BLOCKS
LONGEST_S = 600 if torch.cuda.is_available() else 400
"""That a script may take. Engines on a GPU compile as they start."""


def tell(seen: dict[str, Any]) -> None:
    """What a script says when it is done; before that, in case it does not live on."""
    print(RESULT + json.dumps(seen), flush=True)


def run_script(
    name: str,
    *arguments: Any,
    room: str = "tests.support.engines",
    env: dict[str, str] | None = None,
    spawned: bool = False,
) -> dict[str, Any]:
    """Run `<name>.py` of a room, with `env` beside our own; returns what it told."""
    words = map(str, arguments)
    module = f"{room}.{name}"
    done = run(module, *words, env=env, timeout_s=LONGEST_S, spawned=spawned)
    told = [x for x in done.stdout.splitlines() if x.startswith(RESULT)]
    assert told, f"it ended with {done.returncode}\n" + "\n".join(
        map(excerpt, (done.stdout, done.stderr))
    )
    seen: dict[str, Any] = json.loads(told[-1].removeprefix(RESULT))
    return seen
