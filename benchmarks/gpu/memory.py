"""Memory that an engine takes of one GPU, by where it stages.

`python -m benchmarks.gpu.memory [--shape 8B]`. The engine has the same KV cache each
time: without updates (`off`), with a log (`delta`), and with two sets (`device`). A
trainer on the same GPU sends whole versions and deltas over CUDA IPC while requests
are decoded. The driver tells what the processes of the engine hold of the GPU, those
of the trainer not counted: from time to time, and the most at an update. With
`--blocks` torch tells what it keeps after updates of each kind, and where in the code
it was taken. Torch's own notes of that are in the host's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from vllm.third_party import pynvml

from benchmarks.gpu.arm import KEPT, OFF
from benchmarks.machine import facts
from benchmarks.process import ArmProcess, arm
from benchmarks.record import Plan
from benchmarks.shapes import SAVES, SHAPES, TRAINER_GPU, require_gpus, write_shape

ARMS = OFF, "delta", "device"
ENGINE = {
    # Compiled code and CUDA graphs are the same in all arms.
    "enforce_eager": True,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 8 << 30,
}
EVERY_S = 0.02
TRAINER = "benchmarks.gpu.trainer"


def held_by(pids: Collection[int]) -> int:
    """Bytes of GPUs that processes hold, as the driver tells.

    Raises:
        RuntimeError: the driver knows none of these processes.

    """
    pynvml.nvmlInit()
    gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    every = chain.from_iterable(map(pynvml.nvmlDeviceGetComputeRunningProcesses, gpus))
    held = [found.usedGpuMemory for found in every if found.pid in pids]
    if not held or None in held:
        raise RuntimeError(
            "the driver does not tell what these processes hold of a GPU; in a "
            "container it may know them by other numbers: share those of the host"
        )
    return sum(held)


def taken(process: ArmProcess) -> int:
    """Bytes of the GPU that the engine's processes hold."""
    top = psutil.Process(process.pid)
    family = [top, *top.children(recursive=True)]
    return held_by({each.pid for each in family if TRAINER not in _command(each)})


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has ended, or is about to
        return []


@contextmanager
def watched(process: ArmProcess) -> Iterator[dict[str, Any]]:
    """What it holds at the most meanwhile, and at the end; in bytes."""
    found: dict[str, Any] = {"most": 0}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            found["most"] = max(found["most"], taken(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
    found["after"] = taken(process)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What an arm holds after its start, and at updates of each kind."""
    environment = {"BENCH_INFLIGHT": json.dumps({"staging": name})}
    if name != OFF:  # a log has no room for weights that differ everywhere
        environment[SAVES] = "1"
    log = options.out / f"gpu-memory-{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(options.shape, Path(folder))
        with arm(name, "benchmarks.gpu.arm", path, log, environment) as process:
            found: dict[str, Any] = {"started": taken(process)}
            kinds = [] if name == OFF else ["whole 0.01", "0.001", "0.01"]
            for kind in ["", *kinds]:
                # The second of a kind shows what stays of the first.
                updates = [kind] * 3 if kind else []
                if options.blocks:
                    updates = [KEPT + each for each in updates]
                plan = Plan(options.streams, 64, 0.5, updates)
                with watched(process) as held:
                    record = process.carry_out(plan)
                found[kind or "decoding"] = held
                if options.blocks and updates:
                    held["kept"] = record.updates[-1].facts["found"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--blocks", action="store_true", help="what torch keeps")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        TRAINER_GPU: "0",
        "BENCH_BACKEND": "inflight_ipc",
        "BENCH_ENGINE": json.dumps(ENGINE),
    }
    if options.blocks:  # the worker is sent a function
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    gpus = require_gpus(options.shape)
    report: dict[str, Any] = {"machine": facts() | {"gpus": gpus}, "bytes": {}}
    for name in options.arms:
        found = report["bytes"][name] = measure(name, options)
        print(name, json.dumps(found), flush=True)
        text = json.dumps(report, indent=1) + "\n"
        (options.out / f"gpu-memory-{options.shape}.json").write_text(text)


if __name__ == "__main__":
    main()
