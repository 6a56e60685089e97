"""Whole versions and deltas while decoding, beside upstream's update, on GPUs.

`python -m benchmarks.gpu.delta [--shape 8B] [--arms device delta upstream]`. A trainer
on the next GPU changes a share of all elements by one unit in the last place, and sends
what has changed. Rounds of whole versions come before and after. The search for the
changes is shown apart, as it runs on the trainer's GPU: an update with a share begins
with the engine's first call. docs/performance.md explains the figures.

The arms run one after the other, each in an engine of its own:

- `device`: two sets of weights.
- `delta`: one set of weights and a log. It starts with the trainer's weights, and its
  whole versions change as many elements as the delta in the middle.
- `upstream`: vLLM without this package. It gets whole versions in a pause.
- `upstream, sparse`: the same, with its own sparse updates in a pause. The changes are
  on the engine's GPU before, so that they are neither found nor sent (sparse_arm.py).

More than one rank: `--ranks 2`, and further options of the engine with `--engine`. With
`{"data_parallel_size": 3}` these are three engines in one group with the trainer: then
`told_skew_ms` is the time from the first engine's commit to the last one's. With
`--trainer-ranks 2` the trainer has two GPUs too, and FSDP2 shares its weights out over
them. Each rank looks for changes in its shards, and only the changes are gathered on
rank 0. Upstream's trainer gathers all tensors.

On one GPU, `BENCH_TRAINER_GPU=0` and `--backend inflight_ipc` put the trainer beside
the engine, which needs `--engine '{"gpu_memory_utilization": 0.6}'` then.

Without a GPU, `--shape tiny --backend inflight_gloo` tries the first two arms out.

With `--every 1` one more round of each share has an update a second. Its `kept_share`
are the tokens of the whole round as a share of those of decoding alone.

A share such as `"auto 0.06"` leaves it to the trainer whether it sends a delta.

With `--trace` one update of each kind is traced afterwards, in the first two arms. The
traces are kept in a file that `python -m benchmarks.gpu.watch.trace` prints. With
`--profile` the staging thread is profiled at one more of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import kept_share, summary
from benchmarks.gpu.arm import PROFILED, ROLLBACK, TRACED
from benchmarks.machine import facts
from benchmarks.process import AS_IT_IS, arm
from benchmarks.record import UPSTREAM, Plan, Record
from benchmarks.shapes import (
    GIVEN_RANKS,
    SAVES,
    SHAPES,
    TRAINER_RANKS,
    require_gpus,
    write_shape,
)

DEVICE, DELTA = ARMS = "device", "delta"
"""The arms of this package, by where they stage."""
SPARSE = "upstream, sparse"
WHOLE = ""
NUM_ROLLBACKS = 4


def measure(name: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Each round of an arm, and its figures."""
    inflight: dict[str, Any] = {"staging": name if name == DELTA else "auto"}
    environment: dict[str, str] = dict(AS_IT_IS) if name == SPARSE else {}
    module = "benchmarks.gpu.sparse_arm" if name == SPARSE else "benchmarks.gpu.arm"
    whole, shares = WHOLE, [] if name == UPSTREAM else options.shares
    if name == DELTA:
        inflight["delta_gib"] = options.log_gib
        environment[SAVES] = "1"
        whole = f"whole {shares[len(shares) // 2].split()[-1]}"
    environment["BENCH_INFLIGHT"] = json.dumps(inflight)
    log = options.out / f"gpu-delta-{options.shape}-{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(options.shape, Path(folder))
        started = time.monotonic()
        with arm(name, module, path, log, environment) as process:
            print(f"{name}: up in {time.monotonic() - started:.0f} s", flush=True)

            def play(share: str, count: int, every_s: float | None = None) -> Record:
                return process.carry_out(
                    Plan(options.streams, 64, 0.5, [share] * count, every_s)
                )

            titles = shares if name == SPARSE else [whole, *shares, whole]
            if name != SPARSE:
                # At the first of these the model's loaders are recorded.
                play(whole, 2)
            for number, share in enumerate(titles):
                if share != whole:
                    # After whole versions the trainer keeps none, so the first update
                    # is whole. At the first delta all parameters are brought up.
                    play(share, 2)
                title = share if share != whole else "whole" + " again" * bool(number)
                yield title, figures(play(share, options.updates))
            for share in shares if options.every else ():
                play(share, 1)
                record = play(share, options.updates, options.every)
                kept = {"kept_share": kept_share(record)}
                yield f"every {options.every:g} s, {share}", figures(record) | kept
            if name in ARMS:
                yield "rollbacks", figures(play(ROLLBACK, NUM_ROLLBACKS))
            tools = {"trace": TRACED, "profile": PROFILED}
            for tool in tools if name in ARMS else ():
                if not getattr(options, tool):
                    continue
                found = {}
                for share in [whole, *shares]:
                    # After a whole version, the first is whole, too, and at the second
                    # all parameters are brought up.
                    play(share, 2)
                    (update,) = play(tools[tool] + share, 1).updates
                    found[share or "whole"] = update.facts["found"]
                file = options.out / f"gpu-delta-{options.shape}-{name}-{tool}.json"
                file.write_text(json.dumps(found))


def figures(record: Record) -> dict[str, Any]:
    """Medians over the updates of a round."""
    found = summary([record])
    told = [update.facts for update in record.updates]
    found |= {
        f"told_{key}": median(each[key] for each in told)
        for key in told[0]
        if all(key in each for each in told)
    }
    found["gaps"] = [(u["gap_at_s"], u["gap_max_ms"]) for u in found.pop("updates")]
    return found


def run(options: argparse.Namespace, keep: Callable[[dict[str, Any]], object]) -> None:
    """The rounds of every arm; `keep` gets those that there are after each one."""
    found: dict[str, Any] = {}
    for name in options.arms:
        rounds = found[name] = {}
        for title, of_round in measure(name, options):
            rounds[title] = of_round
            print(name, title, json.dumps(of_round), flush=True)
            keep(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument(
        "--arms", nargs="+", choices=[*ARMS, UPSTREAM, SPARSE], default=[DEVICE]
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--updates", type=int, default=8, help="per round")
    parser.add_argument("--shares", nargs="+", default=["0.001", "0.01", "0.03"])
    parser.add_argument(
        "--log-gib", type=float, default=0.0, help="for the arm delta; 0: by default"
    )
    parser.add_argument("--ranks", default="", help="of the engine, a GPU each")
    parser.add_argument("--trainer-ranks", type=int, default=1, help="a GPU each")
    parser.add_argument(
        "--every", type=float, help="seconds between updates of one more round each"
    )
    parser.add_argument("--trace", action="store_true", help="one more of each kind")
    parser.add_argument("--profile", action="store_true", help="likewise")
    parser.add_argument("--engine", default="{}", help="more options, as JSON")
    parser.add_argument(
        "--backend",
        choices=("inflight_nccl", "inflight_ipc", "inflight_gloo"),
        default="inflight_nccl",
        help="ours; upstream's is nccl",
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        GIVEN_RANKS: options.ranks,
        TRAINER_RANKS: str(options.trainer_ranks),
        "BENCH_ENGINE": options.engine,
        "BENCH_BACKEND": options.backend,
    }
    if (
        options.trace or options.profile or SPARSE in options.arms
    ):  # a function goes into the engine
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    gpus = require_gpus(options.shape)
    given = {k: v for k, v in vars(options).items() if k != "out"}
    report: dict[str, Any] = {"machine": facts() | {"gpus": gpus}, "options": given}
    file = options.out / f"gpu-delta-{options.shape}.json"

    def keep(found: dict[str, Any]) -> None:
        file.write_text(json.dumps(report | {"arms": found}, indent=1) + "\n")

    run(options, keep)

    from benchmarks.delta.chart import draw

    draw(json.loads(file.read_text()), file.with_suffix(".png"))
    print(f"Written: {file} and {file.with_suffix('.png')}")


if __name__ == "__main__":
    main()
