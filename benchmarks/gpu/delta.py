"""Whole versions and deltas over NCCL while decoding, in one engine, on two GPUs.

`python -m benchmarks.gpu.delta [--shape 8B] [--shares 0.001 0.01 0.1]`. A trainer on
the next GPU changes a share of all elements by one unit in the last place, and sends
what has changed. Rounds of whole versions come before and after. The search for the
changes is shown apart, as it runs on the trainer's GPU: an update begins with the
engine's first call. docs/performance.md explains the figures.

With `--trace` an update of each kind is traced afterwards, and the traces are kept in a
file that `python -m benchmarks.gpu.trace` prints.

With `--staging delta` the engine has one set of weights and a log. It starts with the
trainer's weights, and whole versions change as many elements as the delta in the
middle.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arm import Arm
from benchmarks.figures import summary
from benchmarks.gpu import trace
from benchmarks.gpu.arm import ENGINE, Trainer
from benchmarks.gpu.trainer import SAVES
from benchmarks.machine import facts
from benchmarks.record import Plan
from benchmarks.shapes import SHAPES, write_shape

WHOLE = ""
NUM_ROLLBACKS = 4


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every round."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_shape(options.shape, Path(folder)))
        is_logged = options.staging == "delta"
        whole = f"whole {options.shares[len(options.shares) // 2]}" * is_logged
        if is_logged:
            os.environ[SAVES] = "1"
        trainer = Trainer("inflight_nccl", path)

        async def update(engine: Any, share: str) -> dict[str, float]:
            await trainer.send(engine, share)
            assert trainer.called is not None
            return trainer.facts | {"called": trainer.called}

        inflight = {"staging": options.staging}
        if is_logged:
            inflight["delta_gib"] = options.log_gib
            await trainer.ready()
        try:
            arm = Arm(
                path,
                update,
                load_format="auto" if is_logged else "dummy",
                additional_config={"inflight": inflight},
                dtype="bfloat16",
                weight_transfer_config={"backend": "inflight_nccl"},
                **(ENGINE | json.loads(options.engine)),
            )
            await trainer.join(arm.engine)
            gc.collect()
            gc.freeze()
            # At the first of these the model's loaders are recorded.
            await arm.carry_out(Plan(options.streams, 64, 0.5, [whole] * 2))
            rounds = [whole, *options.shares, whole]
            for number, share in enumerate(rounds):
                if share != whole:
                    # After whole versions the trainer keeps none, so the first update
                    # is whole. At the first delta all parameters are brought up.
                    await arm.carry_out(Plan(options.streams, 64, 0.5, [share] * 2))
                plan = Plan(options.streams, 64, 0.5, [share] * options.updates)
                found = figures(await arm.carry_out(plan))
                name = share if share != whole else "whole" + " again" * bool(number)
                report[name] = found
                print(name, json.dumps(found), flush=True)
            replies = [
                await arm.engine.rollback_weights() for _ in range(NUM_ROLLBACKS)
            ]
            report["rollbacks"] = {
                "gap_ms": median(reply["gap_ms"] for reply in replies)
            }
            print("rollbacks", json.dumps(report["rollbacks"]), flush=True)
            if options.trace:
                traces = {
                    share or "whole": await traced(arm, options, share)
                    for share in [whole, *options.shares]
                }
                file = options.out / f"gpu-delta-trace-{options.staging}.json"
                file.write_text(json.dumps(traces))
            arm.engine.shutdown()
        finally:
            trainer.end()
    return report


async def traced(arm: Arm, options: argparse.Namespace, share: str) -> dict[str, Any]:
    """The trace of one update, after one that prepares for it."""
    await arm.carry_out(Plan(options.streams, 64, 0.2, [share]))
    await arm.engine.collective_rpc(trace.begin)
    await arm.carry_out(Plan(options.streams, 64, 0.2, [share]))
    (found,) = await arm.engine.collective_rpc(trace.end)
    return found  # type: ignore[no-any-return]


def figures(record: Any) -> dict[str, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--updates", type=int, default=8, help="per round")
    parser.add_argument("--shares", nargs="+", default=["0.001", "0.01", "0.03"])
    parser.add_argument("--staging", choices=["auto", "delta"], default="auto")
    parser.add_argument("--log-gib", type=float, default=3.0, help="for delta staging")
    parser.add_argument("--trace", action="store_true", help="one more of each kind")
    parser.add_argument("--engine", default="{}", help="more options, as JSON")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.trace:  # how a function gets into the engine's process
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    report = {"machine": facts(), "rounds": asyncio.run(measure(options))}
    staging = "-staging" if options.staging == "delta" else ""
    file = options.out / f"gpu-delta{staging}-{options.shape}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
