"""Frameworks' pauses, obeyed and absorbed: `python -m benchmarks.frameworks.pauses`.

Two engines of one model take turns. One obeys pauses and the other absorbs them. Both
get the same calls: those that TRL, OpenRLHF, prime-rl, SkyRL and PipelineRL make around
an update, and those of ms-swift, checkpoint-engine and NeMo-RL, which do not pause. The
benchmark measures the longest gap between two tokens at each update, as a client sees
it.

With `--shape 8B` the engines run on a GPU each, with compiled code and CUDA graphs. On
one GPU they run one after the other. An engine and the tensors of its updates need a
GPU of 141 GB. Without a shape the engines share a CPU and have a small model.

The same as with the frameworks are the calls of the engine, their order, and how a
call loads its tensors. Not the same is where tensors come from. They lie on the
engine's device already, as a trainer on the same GPU lends them by CUDA IPC. TRL and
PipelineRL send theirs over NCCL, as OpenRLHF, SkyRL and ms-swift may: a real pause is
then longer by the transfer. prime-rl's files are read at each update, from the host's
page cache. What comes in buckets comes in four here, whatever its size. Trainer, Ray
and HTTP are left out: the calls go to `AsyncLLM` itself. `python -m
benchmarks.frameworks` measures the own transports of some frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import cycle, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import make_checkpoint, num_parameters
from benchmarks.figures import UpdateFigures, steady, update_figures
from benchmarks.frameworks.arm import ENGINE
from benchmarks.frameworks.pauses_arm import SEQUENCES, UNPAUSED
from benchmarks.frameworks.trainer import device_of, write_files
from benchmarks.machine import GPUS, facts, visible_gpus
from benchmarks.process import ArmProcess, arm
from benchmarks.record import Plan
from benchmarks.shapes import write_shape

OBEY, ABSORB = "obey", "absorb"
ARMS = (OBEY, ABSORB)
SHAPES: dict[str, dict[str, Any]] = {
    # With so much KV vLLM measures no free memory. The process that writes the
    # checkpoints changes it. Streams must not end while the first round warms up.
    "8B": {
        "max_model_len": 32768,
        "gpu_memory_utilization": 0.6,
        "kv_cache_memory_bytes": 60 << 30,
    },
    "tiny": {"max_model_len": 32768, "enforce_eager": True},
}
"""Shape → options of its engine."""
OF_SHAPE = {"streams": 64, "rounds": 2, "steady": 0.5, "warm_tokens": 64}
OF_SMALL_MODEL = {"streams": 4, "rounds": 3, "steady": 5.0, "warm_tokens": 40}

Versions = Callable[[], list[Path]]
"""Returns the folders of both versions, once they are written."""

console = Console()


@contextmanager
def model(options: argparse.Namespace) -> Iterator[tuple[Path, Versions]]:
    """Context: the folder that engines start from, and both versions.

    The versions of a shape are written while the engines start with dummy weights.
    """
    if options.shape is None:
        folders = [options.out / "checkpoints" / f"seed-{seed}" for seed in (1, 2)]
        for seed, folder in enumerate(folders, 1):
            make_checkpoint(folder, seed)
        yield folders[0], lambda: folders
        return
    # The process that draws them gives its memory of the GPU back as it ends.
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(1, get_context("spawn")) as writer,
    ):
        # An engine that starts looks into its own folder, where no half of a file is.
        folder, files = (
            write_shape(options.shape, Path(root, name)) for name in ("engine", "files")
        )
        written = writer.submit(write_files, files, device_of(0))

        def versions() -> list[Path]:
            found = written.result()
            writer.shutdown()
            return found

        yield folder, versions


def plans(options: argparse.Namespace, versions: list[Path]) -> list[Plan]:
    """The rounds: each has one update by each framework. The first one warms up."""
    folders = cycle(str(path.resolve()) for path in versions[::-1])
    return [
        Plan(
            options.streams,
            options.warm_tokens,
            options.steady,
            [f"{framework}={next(folders)}" for framework in options.frameworks],
        )
        for _ in range(options.rounds + 1)
    ]


def at_once(gpus: list[str]) -> list[dict[str, dict[str, str]]]:
    """Arms that run at the same time, and the environment of each.

    Args:
        gpus: as `visible_gpus` tells them; empty: the arms share the CPU.

    """
    if len(gpus) == 1:
        return [{name: {GPUS: gpus[0]}} for name in ARMS]
    if not gpus:
        return [{name: {} for name in ARMS}]
    return [{name: {GPUS: gpu} for name, gpu in zip(ARMS, gpus, strict=False)}]


def measure(
    options: argparse.Namespace, folder: Path, versions: Versions
) -> Iterator[list[ArmProcess]]:
    """All arms that have been measured so far, after each round."""
    done: list[ArmProcess] = []
    for together in at_once(visible_gpus()):
        started = time.monotonic()
        with ExitStack() as stack, ThreadPoolExecutor() as pool:
            entered = [
                pool.submit(stack.enter_context, _started(options, folder, *each))
                for each in together.items()
            ]
            arms = [each.result() for each in entered]
            first, *rounds = plans(options, versions())
            console.print(f"up in {time.monotonic() - started:.0f} s")
            # The model's loaders are recorded now, and tensors are read.
            list(pool.map(ArmProcess.carry_out, arms, repeat(first)))
            for each in arms:
                console.print(f"[dim]to warm up, {each.name}: {_line(each)}")
                each.records.clear()
                each.others.clear()
            for number, plan in enumerate(rounds, 1):
                for each in arms if number % 2 else arms[::-1]:
                    each.carry_out(plan)
                    console.print(f"[dim]round {number}, {each.name}: {_line(each)}")
                yield done + arms
        done += arms


def _started(
    options: argparse.Namespace, folder: Path, name: str, environment: dict[str, str]
) -> AbstractContextManager[ArmProcess]:
    module = "benchmarks.frameworks.pauses_arm"
    return arm(name, module, folder, options.out / f"pauses-{name}.log", environment)


def _line(each: ArmProcess) -> str:
    """Seconds and longest gap of each update of the last round."""
    return ", ".join(
        f"{u.seconds:.2f} s/{u.gap_max_ms:.0f} ms"
        for u in update_figures(each.records[-1])
    )


def figures(
    arms: list[ArmProcess], frameworks: Collection[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Framework → arm → its figures over all rounds."""
    found: dict[str, dict[str, list[UpdateFigures]]] = {}
    for each in arms:
        for record in each.records:
            of_round = update_figures(record)
            for framework, update in zip(frameworks, of_round, strict=True):
                by_arm = found.setdefault(framework, {})
                by_arm.setdefault(each.name, []).append(update)
    return {
        framework: {
            name: {
                "gap_median_ms": median(u.gap_max_ms for u in updates),
                "gap_max_ms": max(u.gap_max_ms for u in updates),
                "update_s": median(u.seconds for u in updates),
                "tokens_share": median(u.tokens_share for u in updates),
                "lost_s": median(u.lost_s for u in updates),
            }
            for name, updates in by_arm.items()
        }
        for framework, by_arm in found.items()
    }


def are_same(arms: list[ArmProcess], what: str) -> bool:
    """Whether `probe` or `served` of all arms is equal, after each of their rounds."""
    rounds = zip(*(each.records for each in arms), strict=False)
    return all(len({tuple(getattr(r, what)) for r in round_}) == 1 for round_ in rounds)


def show(report: dict[str, Any]) -> None:
    """The table, and the gaps of decoding alone."""
    size = f"{report['bytes'] / 1e6:.0f} MB"
    table = Table(title=f"longest gap at an update of {size}, and its seconds")
    table.add_column("", no_wrap=True)
    for name in ARMS:
        table.add_column(f"{name}: median / worst, ms", justify="right")
    for name in ARMS:
        table.add_column(f"{name}, s", justify="right")
    for framework, by_arm in report["frameworks"].items():
        of_arms = [by_arm[name] for name in ARMS]
        table.add_row(
            framework,
            *(f"{of['gap_median_ms']:.0f} / {of['gap_max_ms']:.0f}" for of in of_arms),
            *(f"{of['update_s']:.2f}" for of in of_arms),
        )
    console.print(table)
    for name in ARMS:
        alone = report["steady"][name]
        console.print(
            f"{name}: decoding alone, {alone['tokens_per_s']:.0f} tokens/s, gaps of "
            f"{alone['gap_steady_p50_ms']:.1f} ms, {alone['gap_steady_max_ms']:.1f} ms "
            "at the most"
        )


def reported(options: argparse.Namespace, arms: list[ArmProcess]) -> dict[str, Any]:
    """The figures of the arms that have been measured, and how that was done."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    size = {"parameters": num_parameters()} if options.shape is None else {}
    return {
        "frameworks": figures(arms, options.frameworks),
        "steady": {each.name: steady(each.records) for each in arms},
        "are_tokens_same": are_same(arms, "probe"),
        "are_weights_same": are_same(arms, "served"),
        **size,
        "shape": options.shape,
        "streams": options.streams,
        "rounds": min(len(each.records) for each in arms),
        "machine": facts()
        | {"gpus": gpus}
        | {"others_cores": max(busy for each in arms for busy in each.others)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    suppress = argparse.SUPPRESS
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument(
        "--unpaused",
        action="store_const",
        dest="frameworks",
        const=UNPAUSED,
        default=tuple(SEQUENCES),
        help="only those that do not pause",
    )
    parser.add_argument("--streams", type=int, default=suppress)
    parser.add_argument("--rounds", type=int, default=suppress)
    parser.add_argument(
        "--steady", type=float, default=suppress, help="seconds around each"
    )
    parser.add_argument("--warm-tokens", type=int, default=suppress)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    given = parser.parse_args()
    usual = OF_SMALL_MODEL if given.shape is None else OF_SHAPE
    options = argparse.Namespace(**(usual | vars(given)))
    options.out.mkdir(parents=True, exist_ok=True)
    engine: dict[str, Any] = {"enforce_eager": True}
    if options.shape is not None:
        engine = SHAPES[options.shape] | {"load_format": "dummy"}
    os.environ |= {
        ENGINE: json.dumps(engine),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # workers are sent a function
    }
    what = "unpaused" if options.frameworks == UNPAUSED else "pauses"
    file = options.out / f"framework-{what}.json"
    started = time.monotonic()
    report: dict[str, Any] = {}
    with model(options) as (folder, versions):
        for arms in measure(options, folder, versions):
            files = versions()[0].glob("*.safetensors")
            report = reported(options, arms) | {
                "bytes": sum(each.stat().st_size for each in files),
                "seconds": time.monotonic() - started,
            }
            file.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    console.print(f"Written: {file}")
    if not report["are_tokens_same"]:
        console.print("the arms decode differently after the same update")
    if not report["are_weights_same"]:
        raise SystemExit("the arms serve different weights after the same update")


if __name__ == "__main__":
    main()
