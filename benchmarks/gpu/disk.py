"""Updates from files on a GPU: staged on the GPU, staged on the host, and upstream's.

`python -m benchmarks.gpu.disk [--shape 8B] [--updates 4]`. Two random checkpoints of a
shape differ in their heads. Up to three engines decode one after the other: ours with
shadow weights on the GPU, ours with shadow weights in host memory, and plain vLLM,
which is paused for `reload_weights`. The files are in the host's page cache, except for
one last update of ours: before it, exactly these files are dropped from the cache. Then
ours decodes for as long beside a process that reads the files from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.figures import steady, summary, update_figures
from benchmarks.gpu.staging_arm import HOST
from benchmarks.machine import GPUS, facts, visible_gpus
from benchmarks.process import ArmProcess, arm
from benchmarks.record import OURS, UPSTREAM, Plan
from benchmarks.shapes import SHAPES, write_shape

ARMS = OURS, HOST, UPSTREAM
SHARD_BYTES = 4 << 30
SPREAD = 0.02
HEADS = "lm_head.weight", "model.embed_tokens.weight"

console = Console()


def write_checkpoints(shape: str, root: Path) -> list[Path]:
    """Two folders; all files but one are the same, by hard links."""
    first = write_shape(shape, root / "old")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(first))
    shapes = {name: param.shape for name, param in model.named_parameters()}
    head = next(name for name in HEADS if name in shapes)
    shard: dict[str, torch.Tensor] = {}
    for name, size in (item for item in shapes.items() if item[0] != head):
        tensor = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        shard[name] = tensor.normal_(0, SPREAD).cpu()
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            _save(shard, first)
    _save(shard, first)
    second = write_shape(shape, root / "new")
    for file in first.glob("*.safetensors"):
        os.link(file, second / file.name)
    top = torch.empty(shapes[head], dtype=torch.bfloat16).normal_(0, SPREAD)
    for folder, tensor in ((first, top), (second, -top)):
        save_file({head: tensor}, folder / "head.safetensors", {"format": "pt"})
    return [first, second]


def _save(shard: dict[str, torch.Tensor], folder: Path) -> None:
    number = len(list(folder.glob("*.safetensors")))
    save_file(shard, folder / f"shard-{number}.safetensors", {"format": "pt"})
    shard.clear()


def measure(options: argparse.Namespace, root: Path, report: dict[str, Any]) -> None:
    """Measure every arm, and save its figures at once."""
    old, new = write_checkpoints(options.shape, root)
    arms: list[str] = options.arms
    num_bytes = sum(file.stat().st_size for file in new.glob("*.safetensors"))
    report |= {"bytes": num_bytes, "arms": {}}
    versions = [str((new, old)[n % 2]) for n in range(options.updates)]
    gpus = visible_gpus()
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def begin(number: int) -> ArmProcess:
            name, gpu = arms[number], gpus[number % len(gpus)]
            log = options.out / f"gpu-disk-{number}.log"
            module, environment = "benchmarks.gpu.staging_arm", {GPUS: gpu}
            context = arm(name, module, old, log, environment)
            return stack.enter_context(context)

        probes = []
        # All are there before the first decodes: to start one takes the host's cores.
        processes = list(pool.map(begin, range(len(arms))))
        for name, process in zip(arms, processes, strict=True):
            process.carry_out(Plan(options.streams, 32, 0.3, [str(new), str(old)]))
            record = process.carry_out(Plan(options.streams, 32, 1.0, versions))
            report["arms"][name] = figures = summary([record])
            told = [update.facts for update in record.updates if update.facts]
            if told:
                figures["phases_s"] = {k: median(t[k] for t in told) for k in told[0]}
            probes.append(record.probe)
            console.print(name, line(figures))
            if name == OURS:
                report["cold"] = cold = _cold(process, options.streams, new)
                console.print(cold)
            written = json.dumps(report, indent=1)
            (options.out / "gpu-disk.json").write_text(written + "\n")
    if any(probe != probes[0] for probe in probes):
        raise SystemExit("the arms do not say the same under the same weights")


def _cold(process: ArmProcess, streams: int, folder: Path) -> dict[str, Any]:
    """Measure one update from the disk, and decoding beside a reader of the disk."""
    files = sorted(folder.glob("*.safetensors"))
    _drop(files)
    record = process.carry_out(Plan(streams, 32, 1.0, [str(folder)]))
    (found,) = update_figures(record)
    _drop(files)
    with subprocess.Popen(["cat", *files], stdout=subprocess.DEVNULL) as reader:
        record = process.carry_out(Plan(streams, 32, found.seconds, []))
        reader.kill()
    return {
        "seconds": found.seconds,
        "gap_max_ms": found.gap_max_ms,
        "gap_at_s": found.gap_at_s,
        "gap_beside_reader_ms": steady([record])["gap_steady_max_ms"],
    }


def _drop(files: list[Path]) -> None:
    """Drop exactly these files from the host's page cache."""
    os.sync()  # what has not been written stays
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def line(found: dict[str, Any]) -> str:
    """The figures that are compared, in one line."""
    gaps = [
        found[f"gap_{of}_ms"] for of in ("update_median", "update_max", "steady_max")
    ]
    median_gap, worst, alone = gaps
    return (
        f"{found['update_s']:.2f} s, gap {median_gap:.1f}/{worst:.1f} ms (alone "
        f"{alone:.1f}), {found['tokens_share']:.1%} of the tokens, "
        f"{found['lost_s']:.3f} s of decoding lost"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--folder", type=Path, help="where the files go")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": facts()}
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        measure(options, Path(root), report)


if __name__ == "__main__":
    main()
