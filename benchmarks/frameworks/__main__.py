"""Frameworks' own updates while decoding, here and on plain vLLM, on GPUs.

`python -m benchmarks.frameworks verl openrlhf_ipc`. Transport and worker extension are
the framework's own (`make test-frameworks` installs the packages). `openrlhf` has its
weights on the GPU after the engine's; all others need one GPU. The first arm has
vllm-inflight, and the second is vLLM with the same files, without the plugin. Both make
the same calls:

- verl: one worker call, and nothing around it. (verl's trainer aborts all requests
  around it, and sends them again. Nothing would be left to measure.)
- checkpoint-engine: one worker call. It has no pause.
- OpenRLHF: a pause `keep`, a worker call for each parameter, and the end of the pause.
  The tensors come over NCCL (`openrlhf`) or by CUDA IPC (`openrlhf_ipc`).
- prime-rl: a pause `keep` that keeps the cache, one worker call that reads a folder,
  and the end of the pause. Both versions are in the host's page cache.

The first arm absorbs pauses; OpenRLHF's takes force at its first tensor. Of OpenRLHF
and prime-rl it also makes the calls without the pause. OpenRLHF's would let plain vLLM
decode with a mixture of both versions.

With `--profile` the file has where the staging thread's time goes, in the first arm.
`--tiny` tries the benchmark out with a tiny model, also without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import summary, update_figures
from benchmarks.frameworks.arm import (
    ENGINE,
    FRAMEWORK,
    IN_PAUSE,
    PROFILED,
    WITHOUT_PAUSE,
)
from benchmarks.frameworks.on_host import JOB, UNPACKED
from benchmarks.frameworks.packages import OWN
from benchmarks.frameworks.trainer import SENDERS
from benchmarks.machine import facts
from benchmarks.process import arm
from benchmarks.record import OURS, UPSTREAM, Plan, Record
from benchmarks.shapes import write_shape

_PAUSED = {OURS: (IN_PAUSE, WITHOUT_PAUSE), UPSTREAM: (IN_PAUSE,)}
_FREE = {OURS: (WITHOUT_PAUSE,), UPSTREAM: (WITHOUT_PAUSE,)}
WAYS = {
    "verl": _FREE,
    "checkpoint_engine": _FREE,
    "openrlhf": _PAUSED,
    "openrlhf_ipc": _PAUSED,
    "prime_rl": _PAUSED,
}
"""Trainer → arm → how its updates are made; the first way is compared."""
ROWS = {
    "tokens_per_s": ("decoding alone, tokens/s", "{:.0f}"),
    "tokens_per_s_before": ("the same before the first update, tokens/s", "{:.0f}"),
    "context_tokens": ("mean length of a stream, decoding alone, tokens", "{:.0f}"),
    "gap_steady_max_ms": ("gap, decoding alone: max, ms", "{:.1f}"),
    "gap_update_median_ms": ("largest gap at an update: median, ms", "{:.1f}"),
    "gap_update_max_ms": ("largest gap at an update: worst, ms", "{:.1f}"),
    "tokens_share": ("tokens/s during an update, of decoding alone", "{:.1%}"),
    "update_s": ("from call to return, s", "{:.3f}"),
    "lost_s": ("decoding time lost to an update, s", "{:.3f}"),
}
ENGINES = {
    # With so much KV vLLM measures no free memory, which a trainer's process changes.
    "8B": {
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.6,
        "kv_cache_memory_bytes": 40 << 30,
    },
    "tiny": {"max_model_len": 8192, "enforce_eager": True},
}

console = Console()


def measure(framework: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """`arm: way` → its figures, one arm after the other."""
    ends: dict[str, list[Record]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(options.shape, Path(folder))
        for name in options.arms:
            log = options.out / f"frameworks-{framework}-{name}.log"
            started = time.monotonic()
            with arm(name, "benchmarks.frameworks.arm", path, log) as process:
                took = time.monotonic() - started
                console.print(f"{framework}, {name}: up in {took:.0f} s")
                for way in WAYS[framework][name]:
                    first = process.carry_out(plan(options, way, 2))
                    console.print(f"[dim]{name}, {way}, the first: {_line(first)}")
                    process.records.clear()
                    for _ in range(options.rounds):
                        record = process.carry_out(plan(options, way, options.updates))
                        console.print(f"[dim]{name}, {way}: {_line(record)}")
                    records = list(process.records)
                    ends.setdefault(way, []).append(records[-1])
                    found = summary(records)
                    found["first"] = [asdict(u) for u in update_figures(first)]
                    found |= {"probe": records[-1].probe, "served": records[-1].served}
                    found["are_tokens_same"] = is_one(r.probe for r in ends[way])
                    found["are_weights_same"] = is_one(r.served for r in ends[way])
                    if options.profile and name == OURS:
                        record = process.carry_out(plan(options, PROFILED + way, 1))
                        found["profile"] = record.updates[0].facts["found"]
                    yield f"{name}, {way}", found


def is_one(found: Iterable[list[int]]) -> bool:
    """Whether all lists are equal."""
    return len(set(map(tuple, found))) == 1


def plan(options: argparse.Namespace, way: str, num_updates: int) -> Plan:
    """A round: its streams, and so many updates while they decode."""
    return Plan(options.streams, 64, options.steady, [way] * num_updates)


def compared(framework: str, arms: dict[str, Any]) -> dict[str, float] | None:
    """What plain vLLM has, divided by what this package has; with the same calls."""
    way = WAYS[framework][UPSTREAM][0]
    ours, upstream = arms.get(f"{OURS}, {way}"), arms.get(f"{UPSTREAM}, {way}")
    if ours is None or upstream is None:
        return None
    rows = "gap_update_median_ms", "gap_update_max_ms", "lost_s", "update_s"
    return {row: upstream[row] / ours[row] for row in rows if ours[row] > 0}


def show(framework: str, report: dict[str, Any]) -> None:
    """The table of one framework, and how its arms compare."""
    table = Table(title=f"{framework}'s own update")
    table.add_column("")
    for name in report["arms"]:
        table.add_column(name, justify="right")
    for key, (label, style) in ROWS.items():
        table.add_row(label, *(style.format(a[key]) for a in report["arms"].values()))
    console.print(table)
    for row, ratio in (report["ratios"] or {}).items():
        console.print(f"{framework}: {row}: plain vLLM has {ratio:.1f} times ours")


def _line(record: Record) -> str:
    return ", ".join(
        f"{u.seconds:.3f} s/{u.gap_max_ms:.1f} ms/{u.tokens_share:.0%}"
        for u in update_figures(record)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frameworks", nargs="+", choices=WAYS)
    parser.add_argument("--arms", nargs="+", default=[OURS, UPSTREAM])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=10, help="per way and round")
    parser.add_argument("--steady", type=float, default=0.5, help="seconds around each")
    parser.add_argument(
        "--tiny", action="store_const", const="tiny", default="8B", dest="shape"
    )
    parser.add_argument("--profile", action="store_true", help="one more of each way")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    for framework in options.frameworks:
        if not OWN[SENDERS[framework].package].folder.is_dir():
            raise SystemExit(f"{framework} is not here; `make test-frameworks` does it")
        if len(gpus) == 1 and not SENDERS[framework].is_beside:
            raise SystemExit(f"the trainer of {framework} needs a GPU of its own")
    os.environ |= {
        ENGINE: json.dumps(ENGINES[options.shape]),
        JOB: str(os.getpid()),
        UNPACKED: "1",
        # As OpenRLHF does, whose calls have a dtype among their arguments.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    report: dict[str, Any] = {
        "machine": facts() | {"gpus": gpus},
        "shape": options.shape,
        "streams": options.streams,
        "frameworks": {},
    }
    file = options.out / "frameworks.json"
    for framework in options.frameworks:
        os.environ[FRAMEWORK] = framework
        found: dict[str, Any] = {"arms": {}, "ratios": None}
        report["frameworks"][framework] = found
        for name, figures in measure(framework, options):
            found["arms"][name] = figures
            found["ratios"] = compared(framework, found["arms"])
            file.write_text(json.dumps(report, indent=1) + "\n")
        show(framework, found)
    console.print(f"Written: {file}")


if __name__ == "__main__":
    main()
