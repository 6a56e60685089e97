"""The cost of each part of staging for decoding; on one GPU, or two.

`python -m benchmarks.gpu.parts [--shape 8B] [--updates 8]`. One engine is updated while
it decodes. If there is a next GPU, a trainer on it lends its tensors (`inflight_ipc`).
In every round another part of staging does nothing. The weights of such an update are
wrong; only its time counts. In the last round all parts run, and every call is timed
(stopwatch.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import stopwatch
from benchmarks.arm import Arm
from benchmarks.figures import summary
from benchmarks.gpu.arm import Trainer
from benchmarks.machine import facts
from benchmarks.record import Plan
from benchmarks.shapes import SHAPES, TRAINER_GPU, write_shape

TIMED = "timed"
ROUNDS = (
    "all",
    "no digest",
    "no copies",
    "no samples",
    "nothing but Python",
    "a launch for every bucket",
    "no pace",
    "80 GB/s",
    "all again",
    TIMED,
)
KV_BYTES = 40 << 30


def leave_out(worker: Any, name: str) -> None:
    """Runs in the engine's process: switch one part of staging off."""
    del worker
    from vllm.inflight.ops import gpu_digest
    from vllm.inflight.transport.cuda_ipc.driver import CudaMemory
    from vllm.inflight.worker.staging import throttle
    from vllm.inflight.worker.verify import drift

    # Kept where the next round finds it, which comes with a function of its own.
    kept = vars(gpu_digest).setdefault(
        "_kept_by_benchmark",
        {
            "add": gpu_digest.GpuDigest.add,
            "results": gpu_digest.GpuDigest.results,
            "copy": CudaMemory.copy,
            "sample": drift.Sampler.add,
            "samples": drift.Sampler.samples,
            "bytes": gpu_digest.AT_ONCE_BYTES,
            "rest": throttle.DeviceThrottle.rest,
            "pace": throttle.DeviceThrottle.__init__,
        },
    )
    gpu_digest.GpuDigest.add, gpu_digest.GpuDigest.results = (
        kept["add"],
        kept["results"],
    )
    CudaMemory.copy = kept["copy"]
    drift.Sampler.add, drift.Sampler.samples = kept["sample"], kept["samples"]
    gpu_digest.AT_ONCE_BYTES = kept["bytes"]
    throttle.DeviceThrottle.rest = kept["rest"]
    throttle.DeviceThrottle.__init__ = kept["pace"]
    if name == "no pace":
        throttle.DeviceThrottle.rest = lambda self, num_bytes: None
    if name == "80 GB/s":
        usual = kept["pace"]
        throttle.DeviceThrottle.__init__ = lambda self, gb_per_s: usual(self, 80.0)
    is_bare = name == "nothing but Python"
    if is_bare or name == "no digest":
        gpu_digest.GpuDigest.add = lambda self, pairs: None
        gpu_digest.GpuDigest.results = lambda self: []
    if is_bare or name == "no copies":
        CudaMemory.copy = lambda self, *arguments: None
    if is_bare or name == "no samples":
        drift.Sampler.add = lambda self, pairs: None
        drift.Sampler.samples = lambda self: {}
    if name == "a launch for every bucket":
        gpu_digest.AT_ONCE_BYTES = 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every round."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_shape(options.shape, Path(folder)))
        trainer = Trainer("inflight_ipc", path)

        async def update(engine: Any, _: str) -> dict[str, float]:
            await trainer.send(engine)
            return trainer.facts

        try:
            arm = Arm(
                path,
                update,
                load_format="dummy",
                dtype="bfloat16",
                max_model_len=8192,
                gpu_memory_utilization=0.85,
                kv_cache_memory_bytes=KV_BYTES,
                weight_transfer_config={"backend": "inflight_ipc"},
            )
            await trainer.join(arm.engine)
            gc.collect()
            gc.freeze()
            await arm.carry_out(Plan(options.streams, 64, 0.5, [""] * 2))
            for name in options.rounds:
                await arm.engine.collective_rpc(leave_out, args=(name,))
                plan = Plan(options.streams, 64, 0.4, [""] * options.updates)
                if name == TIMED:
                    await arm.engine.collective_rpc(stopwatch.put_on)
                report[name] = figures(await arm.carry_out(plan))
                print(name, line(report[name]), flush=True)
            if TIMED in report:
                (timed,) = await arm.engine.collective_rpc(stopwatch.read)
                report[TIMED] |= timed
            arm.engine.shutdown()
        finally:
            trainer.end()
    return report


def figures(record: Any) -> dict[str, float]:
    """Medians over the updates of a round."""
    found = summary([record])
    told = [update.facts for update in record.updates]
    found |= {f"{key}_s": median(t[key] for t in told) for key in ("staging", "cpu")}
    del found["updates"]
    return found


def line(found: dict[str, float]) -> str:
    """The figures that are compared, in milliseconds, in one line."""
    parts = {
        "call": "update_s",
        "staging": "staging_s",
        "cpu": "cpu_s",
        "decoding lost": "lost_s",
    }
    told = ", ".join(f"{k} {1e3 * found[key]:.0f}" for k, key in parts.items())
    gap = f"{found['gap_update_median_ms']:.1f}/{found['gap_update_max_ms']:.1f}"
    return f"{told}, gap {gap}; {found['tokens_share']:.1%} of the tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--updates", type=int, default=8, help="per round")
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    # How a function gets into the engine's process.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ[TRAINER_GPU] = str(min(1, torch.cuda.device_count() - 1))
    options.out.mkdir(parents=True, exist_ok=True)
    machine = facts() | {"trainer_gpu": int(os.environ[TRAINER_GPU])}
    report = {"machine": machine, "rounds": asyncio.run(measure(options))}
    (options.out / "gpu-parts.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
