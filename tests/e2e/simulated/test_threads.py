"""An engine in its caller's process: one thread steps, another changes its weights."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core_client import InprocClient

from tests.support.engines.bare_core import prompt, request
from tests.support.simulated.core import simulated_core
from tests.support.simulated.worker import SimulatedExecutor

pytestmark = pytest.mark.engine


class Slow(SimulatedExecutor):
    """Takes its time between the forward and the sampling, and notes what came then."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.in_step = threading.Event()
        self.torn: list[str] = []

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        self.in_step.set()
        return super().execute_model(scheduled, non_block)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        time.sleep(0.02)
        self.in_step.clear()
        return super().sample_tokens(grammar, non_block)

    def note(self, what: str) -> None:
        if self.in_step.is_set():
            self.torn.append(what)

    def _inflight_flip(self, *args: Any) -> Any:
        self.note("flip")
        return super()._inflight_flip(*args)


@pytest.fixture
def client(model: Path) -> Iterator[Any]:
    transport = WeightTransferConfig(backend="local")
    made: Any = simulated_core(
        model, Slow, kind=InprocClient, weight_transfer_config=transport
    )
    yield made
    made.shutdown()


@pytest.fixture
def stepping(client: Any) -> Iterator[Slow]:
    """Requests that a thread of their own decodes; the worker that it steps."""
    for seed in range(3):
        client.add_request(request(f"r{seed}", prompt(seed), max_tokens=400))
    over = threading.Event()

    def steps() -> None:
        while not over.is_set():
            client.get_output()

    thread = threading.Thread(target=steps)
    thread.start()
    worker = client.engine_core.model_executor
    yield worker
    over.set()
    thread.join()


def test_upstreams_phases_flip_between_two_steps(client: Any, stepping: Slow) -> None:
    for weights in (1, 2, 3):
        client.collective_rpc("start_weight_update")
        client.collective_rpc("update_weights", args=({"weights": weights},))
        assert stepping.in_step.wait(60)
        client.collective_rpc("finish_weight_update")
    assert (stepping.live, stepping.torn) == (3, [])


def test_a_new_label_comes_between_two_steps(
    client: Any, stepping: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = client.engine_core.scheduler.vllm_inflight
    serve = state.serve

    def noted(*args: Any) -> None:
        stepping.note("label")
        serve(*args)

    monkeypatch.setattr(state, "serve", noted)
    for label in ("one", "two", "three"):
        assert stepping.in_step.wait(60)
        client.set_weight_version(label)
    assert (client.get_weight_version(), stepping.torn) == ("three", [])
