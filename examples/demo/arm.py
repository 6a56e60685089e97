"""An arm of the experiment: clients stream while the trainer trains.

Both arms are the same but for one thing: in the control the server keeps the
weights it has.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.child import Child, Event


@dataclass
class Arm:
    """What happened in an arm, as it was reported."""

    steps: list[Event] = field(default_factory=list)
    commits: list[Event] = field(default_factory=list)
    requests: list[Event] = field(default_factory=list)

    @property
    def failed(self) -> list[Event]:
        """Requests that did not get every token they asked for."""
        return [request for request in self.requests if request["error"] is not None]

    @property
    def finished(self) -> list[Event]:
        """Requests that did."""
        return [request for request in self.requests if request["error"] is None]


def run_arm(
    trainer: Child,
    order: dict[str, Any],
    *,
    num_streams: int,
    log: Path,
    watch: Callable[[Arm], None],
) -> Arm:
    """Stream from before the first step until after the last.

    Args:
        trainer: the trainer's process, waiting for an order.
        order: what it is told; see trainer.py.
        log: where the clients' complaints go.
        watch: called after every step and every commit.

    """
    arm = Arm()
    flags = ("--streams", str(num_streams), "--seed", str(order["seed"]))
    with (
        ThreadPoolExecutor(1) as pool,
        Child("examples.demo.clients", *flags, log=log) as clients,
    ):
        clients.order(url=order["url"])
        # A pipe that nobody reads would fill up and stop the clients.
        reading = pool.submit(lambda: arm.requests.extend(clients.events()))
        trainer.order(**order)
        for event in trainer.events():
            if event["event"] == "done":
                break
            (arm.commits if event["event"] == "commit" else arm.steps).append(event)
            watch(arm)
        clients.release()
        reading.result()  # raises if they ended badly
    return arm
