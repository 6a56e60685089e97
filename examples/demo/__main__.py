"""An online RL run on one host, end to end: `python -m examples.demo`.

    pre-train ─► vllm serve ─► exam ─► control ─► exam ─► published run ─► exam
                     ▲                                        │
                     └────────── a version after every step ──┘

A small model is made here and served by vLLM. A trainer takes rollouts from the live
server, improves the model with GRPO and publishes every step in flight, while
clients stream without pause. Exit code 0 means that the goals in report.py were met.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx

from examples.demo.arm import Arm, run_arm
from examples.demo.child import Child
from examples.demo.learning.exam import examine
from examples.demo.results.page import write_page
from examples.demo.results.picture import draw_rewards, draw_timeline
from examples.demo.results.report import Report
from examples.demo.results.screen import Phase, Screen, sparkline
from examples.demo.server import Server

STEPS, STREAMS = 40, 8


def main() -> int:
    """Run, report, and say whether the goals were met."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="versions to publish")
    parser.add_argument("--streams", type=int, default=STREAMS, help="clients")
    parser.add_argument("--pretrain-steps", type=int, help="fewer for a rehearsal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    # An order to end unwinds like Ctrl-C, so that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    screen = Screen()
    report = run(screen, flags)
    report.write(flags.out)
    draw_timeline(report, flags.out / "timeline.png")
    draw_rewards(report, flags.out / "reward.png")
    write_page(report, flags.out)
    screen.console.print(report.table())
    screen.console.print(f"{flags.out}/demo.html shows it, demo.json has the numbers")
    return 0 if all(report.goals().values()) else 1


def run(screen: Screen, flags: argparse.Namespace) -> Report:
    """All phases, one after the other; every process ended at the end."""
    out: Path = flags.out
    with ExitStack() as stack:
        stack.enter_context(screen)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pretrain(screen, folder, flags)
        with screen.phase("start", "vllm serve starts"):
            server = stack.enter_context(Server(folder, out / "server.log"))
            # Loads beside the server, and then waits for an order.
            trainer = stack.enter_context(
                Child("examples.demo.trainer", str(folder), log=out / "trainer.log")
            )
            server.await_ready()
        with screen.phase("exam_before", "exam, first version") as phase:
            before = examine(server.url)
            phase.show(1, f"reward {before.reward}")
        arms: list[Arm] = []
        exams = []
        for name, title, keep in (
            ("control", "control: trained, not published", True),
            ("published", "published in flight", False),
        ):
            order = {
                "url": server.url,
                "epoch": served_epoch(server.url),
                "steps": flags.steps,
                "seed": flags.seed,
                "keep": keep,
            }
            with screen.phase(name, title, flags.steps) as phase:
                arm = run_arm(
                    trainer,
                    order,
                    num_streams=flags.streams,
                    log=out / "clients.log",
                    watch=lambda arm, phase=phase: show(phase, arm),
                )
                arms.append(arm)
            with screen.phase(f"exam_{name}", f"exam, {title.split(':')[0]}") as phase:
                marks = examine(server.url)
                exams.append(marks)
                phase.show(1, f"reward {marks.reward}")
    return Report(
        seed=flags.seed,
        num_steps=flags.steps,
        num_streams=flags.streams,
        before=before,
        control=exams[0],
        after=exams[1],
        kept=arms[0],
        published=arms[1],
        seconds=screen.seconds,
    )


def pretrain(screen: Screen, folder: Path, flags: argparse.Namespace) -> None:
    """Make the checkpoint that everything starts from."""
    with screen.phase("load", "torch and transformers load"):
        from examples.demo.learning import model as models

    steps = flags.pretrain_steps or models.PRETRAIN_STEPS
    with screen.phase("pretrain", "pre-training", steps) as phase:
        model = models.make_model(flags.seed)
        models.pretrain(
            model,
            flags.seed,
            steps,
            lambda step, loss: phase.show(step, f"loss {loss:.2f}"),
        )
        models.save(model, folder)


def served_epoch(url: str) -> int:
    """The epoch of the version that the server has now."""
    epoch: int = httpx.get(f"{url}/weight_info").raise_for_status().json()["epoch"]
    return epoch


def show(phase: Phase, arm: Arm) -> None:
    """One line about an arm under way."""
    rewards = [step["reward"] for step in arm.steps]
    if not rewards:
        return
    facts = f"reward {rewards[-1]:.2f} {sparkline(rewards)}"
    if arm.commits:
        last = arm.commits[-1]
        kind = "delta" if last["is_delta"] else "whole"
        facts += f"  live: {last['version']} ({kind}, {last['num_bytes'] / 1e6:.1f} MB)"
    facts += f"  streams: {len(arm.finished)} done, {len(arm.failed)} failed"
    phase.show(len(rewards), facts)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Before torch is loaded: its threads must not spin while they wait, for on a
    # busy host whom they wait for is not running then.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
