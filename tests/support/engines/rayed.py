"""Two ranks under one of Ray's executors, run as a script: prints what happened.

vLLM's CPU platform does not say as which resource Ray counts its devices, and so it
refuses Ray. Where there is no GPU a platform plugin says it, through the entry point
that vLLM has for that: vLLM's own Ray executors run after that, and Ray itself.

Usage: python -m tests.support.engines.rayed A B tensor|pipeline
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell
from tests.support.engines.stages import (
    send,
    state,
    streams_during,
    streams_under_commits,
)

PLUGIN = {
    "ray_on_cpu.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 1\n"
    ),
    "ray_on_cpu.dist-info/entry_points.txt": (
        "[vllm.platform_plugins]\nray_on_cpu = ray_on_cpu:name\n"
    ),
    "ray_on_cpu.py": 'def name():\n    return "ray_on_cpu_platform.RayOnCpu"\n',
    "ray_on_cpu_platform.py": (
        "from vllm.platforms.cpu import CpuPlatform\n\n\n"
        'class RayOnCpu(CpuPlatform):\n    ray_device_key = "GPU"\n'
    ),
}
NUM_COMMITS = 24
STEADY_S = 1.0
"""Of decoding without a commit."""


def start(folder: str, shape: dict[str, int]) -> Any:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    return LLM(
        folder,
        distributed_executor_backend="ray",
        dtype="float32",
        weight_transfer_config=WeightTransferConfig(backend="other"),
        worker_extension_cls="tests.support.engines.transport.Extension",
        # Staging need not be modest here: it is the commits that are looked at.
        additional_config={"inflight": {"stage_share": 1.0}},
        **(OPTIONS | shape),
    )


def main(a: str, b: str, parallel: str) -> None:
    llm = start(a, {f"{parallel}_parallel_size": 2})
    if parallel == "pipeline" and not torch.cuda.is_available():
        llm.collective_rpc("tests_make_room")
    seen: dict[str, Any] = {"before": state(llm)}
    name = "model.layers.0.mlp.down_proj.weight"
    seen["both ranks poisoned"] = send(llm, b, poison=name)
    for rank in (0, 1):
        seen[f"rank {rank} poisoned"] = send(llm, b, poison=name, fail_rank=rank)
        seen[f"rank {rank} broken"] = send(llm, b, fail_after=9, fail_rank=rank)
    seen["after refusals"] = state(llm)
    seen["label after refusals"] = llm.get_weight_version()
    seen["whole"] = send(llm, b)
    seen["after commit"] = state(llm)
    llm.rollback_weights()
    seen["after rollback"] = state(llm)
    llm.update_weights_from_disk(a, "a")

    seen["steady streams"] = streams_during(lambda: time.sleep(STEADY_S), llm)
    seen["streams"] = streams_under_commits(llm, a, b, NUM_COMMITS)
    seen["after many commits"] = greedy(llm)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


def with_ray(run: Any) -> None:
    """Call `run` beside a Ray cluster of this script's own, which ends with it."""
    import ray

    # Ray's processes may still be writing logs when they are told to end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        plugin = {} if torch.cuda.is_available() else PLUGIN
        for path, text in plugin.items():
            (Path(folder) / path).parent.mkdir(exist_ok=True)
            (Path(folder) / path).write_text(text)
        sys.path.append(folder)
        os.environ["PYTHONPATH"] += os.pathsep + folder
        cluster = ray.init(
            num_cpus=2,
            num_gpus=2,  # a number: Ray looks for none
            include_dashboard=False,
            _temp_dir=f"{folder}/ray",
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        os.environ["RAY_ADDRESS"] = cluster.address_info["gcs_address"]
        try:
            run()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    # On GPUs vLLM would fork, and what a fork asks of Ray is never answered.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if torch.cuda.is_available():
        # Where Ray's compiled graph looks for a worker's GPU; vLLM has Ray not set it.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0,1")
        if sys.argv[-1] == "pipeline":
            # The other one waits for tokens that Ray's graph has no stage ask for.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with_ray(lambda: main(*sys.argv[1:]))
