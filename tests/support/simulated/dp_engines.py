"""Two simulated data-parallel engines, each with upstream's own busy loop.

Those that step together meet over gloo, as engines of a mixture-of-experts model do.
Their workers note with which weights each forward ran, those without requests too:
forwards of one number are one step of both. Those of a dense model step alone.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import (
    DPEngineCoreProc,
    EngineCore,
    EngineCoreProc,
    EngineShutdownState,
)

from tests.support.engines.bare_core import add, call, prompt
from tests.support.engines.stamps import Stamps
from tests.support.ports import free_port
from tests.support.simulated.core import simulated_core
from tests.support.simulated.worker import SimulatedExecutor
from tests.support.waiting import until
from vllm.inflight.calls import Call, call_to_dict

HOST = "127.0.0.1"
NUM_ENGINES = 2
SYNC_INTERVAL = 4
FORWARD_S = 0.0005
NUM_FAST, SLOW_S = 100, 0.1
"""So many forwards are fast. Requests do not end by themselves while a busy machine
keeps the test from its next call, but in `finish`."""


class Noting(SimulatedExecutor):
    """Notes the weights of every forward, and may be told to fail a flip."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.forwards: list[int] = []
        self.may_end = threading.Event()
        self.is_to_fail = False

    def _forward(self, scheduled: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            self._execute_dummy_batch()
        return super()._forward(scheduled)

    def _execute_dummy_batch(self) -> None:
        if len(self.forwards) < NUM_FAST or self.may_end.is_set():
            time.sleep(FORWARD_S)
        else:
            self.may_end.wait(SLOW_S)
        self.forwards.append(self.live)

    def _inflight_flip(self, *args: Any) -> Any:
        if self.is_to_fail:
            self.is_to_fail = False
            return {"error": "the test says so"}
        return super()._inflight_flip(*args)


class Alone(EngineCoreProc):
    """One of the engines; what its process would have been given is given here."""

    dp_rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.process_input_queue_block = True
        self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.engines_running = self.has_coordinator = False
        self.engine_index = self.dp_rank
        EngineCore.__init__(self, *args, **kwargs)

    def _handle_shutdown(self) -> bool:
        return bool(self.shutdown_state == EngineShutdownState.RUNNING)

    def shutdown(self) -> None:
        EngineCore.shutdown(self)


class Member(Alone, DPEngineCoreProc):
    """One that steps together with the other."""

    dp_group: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pending_pause = self.ignore_start_dp_wave = False
        self.step_counter = self.current_wave = 0
        self.eep_scaling_state = None
        self.dp_sync_interval, self.prefill_schedule_interval = SYNC_INTERVAL, 1
        self.dp_size = NUM_ENGINES
        Alone.__init__(self, *args, **kwargs)


class Together:
    """The engines, their loops in threads, and a client of both."""

    def __init__(self, model: Path, *, is_dense: bool = False, **options: Any) -> None:
        kinds = [
            type("Alone", (Alone,), {"dp_rank": rank}) for rank in range(NUM_ENGINES)
        ]
        if not is_dense:
            kinds = [
                type("Member", (Member,), {"dp_rank": g.rank(), "dp_group": g})
                for g in _groups()
            ]
        self.cores: list[Any] = [
            simulated_core(model, Noting, kind=kind, **options) for kind in kinds
        ]
        self.stamps: dict[str, list[str]] = {}
        self._read = Stamps()
        self.ends: dict[str, str] = {}
        """Why requests have ended."""
        self._num_updates = 0
        self._threads = [
            threading.Thread(target=self._loop, args=(core,), daemon=True)
            for core in self.cores
        ]
        for thread in self._threads:
            thread.start()

    def _loop(self, core: Any) -> None:
        with suppress(SystemExit):
            core.run_busy_loop()

    def ask(self, rank: int, act: Callable[[Any], Any]) -> Future[Any]:
        """Have `act(core)` done between two steps of that engine's loop."""
        core = self.cores[rank]
        return core.vllm_inflight.step_queue.submit(lambda: act(core))

    def of_both(self, act: Callable[[Any], Any], lag_s: float = 0.0) -> list[Any]:
        """The same for both, the second some time later; what it came to."""
        asked = []
        for rank in range(NUM_ENGINES):
            asked.append(self.ask(rank, act))
            time.sleep(lag_s)
        return [future.result(timeout=60) for future in asked]

    def start(self, *counts: int) -> None:
        """So many requests for each engine, of 150 tokens; both begin to step."""

        def begin(core: Any) -> None:
            for index in range(counts[core.dp_rank]):
                seed = 10 * core.dp_rank + index
                add(core, f"r{seed}", prompt(seed), max_tokens=150)
            core.engines_running = isinstance(core, Member)

        self.of_both(begin)

    def stage(self, weights: int, *, is_named: bool = True) -> None:
        """On both, under one id or under ids that they make up."""
        self._num_updates += 1
        name = f"update {self._num_updates}" if is_named else None

        def all_of_it(core: Any) -> None:
            call(core, "start", transport="local", update_id=name)
            call(core, "receive", update_info={"weights": weights})
            call(core, "prepare")

        self.of_both(all_of_it)

    def control(self, method: str, lag_s: float = 0.0, **body: Any) -> list[Any]:
        """The answers of both engines to a control call, whenever they come."""
        answers = self.of_both(lambda core: core.inflight(method, dict(body)), lag_s)
        return [a.result(timeout=60) if isinstance(a, Future) else a for a in answers]

    def control_apart(self, method: str, **body: Any) -> None:
        """Ask the first, and the second once the first is some steps further."""

        def act(core: Any) -> Any:
            return core.inflight(method, dict(body))

        self.ask(0, act).result(timeout=60)
        forwards = self.cores[0].model_executor.forwards
        num_before = len(forwards)
        until(lambda: len(forwards) > num_before + 2 * SYNC_INTERVAL)
        self.ask(1, act).result(timeout=60)

    @property
    def num_engines(self) -> int:
        """As a door has it, by which a `Control` may ask both."""
        return NUM_ENGINES

    async def call(self, asked: Call) -> list[Any]:
        """Likewise: the answers of both."""
        return self.control(asked.name, **call_to_dict(asked))

    def finish(self) -> tuple[list[int], list[int]]:
        """Until both are idle; the weights of each forward, of both engines."""
        self.let_end()
        deadline = time.monotonic() + 30
        while any(c.scheduler.has_requests() or c.engines_running for c in self.cores):
            assert time.monotonic() < deadline, "they do not come to an end"
            time.sleep(0.01)
        self.of_both(lambda core: None)  # what their last steps brought is out
        for core in self.cores:
            self.read(core)
        first, second = (list(c.model_executor.forwards) for c in self.cores)
        return first, second

    def start_over(self) -> None:
        """Without requests and without a pause; what they have noted is forgotten."""
        self.control("resume")
        self.finish()
        for core in self.cores:
            core.reset_prefix_cache()
            core.model_executor.forwards.clear()
            core.model_executor.sampled.clear()
            core.model_executor.may_end.clear()
        self.stamps, self.ends = {}, {}

    def let_end(self) -> None:
        """Let requests come to their end soon."""
        for core in self.cores:
            core.model_executor.may_end.set()

    def read(self, core: Any) -> None:
        """Note what an engine has put out, in `stamps` and `ends`."""
        while not core.output_queue.empty():
            _, group = core.output_queue.get()
            for output in group.outputs:
                label = self._read.label(group, output)
                told = self.stamps.setdefault(output.request_id, [])
                told += [label] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = str(output.finish_reason)

    def close(self) -> None:
        self.let_end()
        for core in self.cores:
            core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
            core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        for core, thread in zip(self.cores, self._threads, strict=True):
            thread.join(timeout=60)
            core.shutdown()


def _groups() -> Iterator[Any]:
    port = free_port()
    made: list[Any] = [None] * NUM_ENGINES
    takes = signature(stateless_init_torch_distributed_process_group).parameters
    # Before 0.32, a group has torch's deadline.
    deadline = {"timeout": timedelta(seconds=30)} if "timeout" in takes else {}

    def join(rank: int) -> None:
        made[rank] = stateless_init_torch_distributed_process_group(
            *(HOST, port, rank, NUM_ENGINES, "gloo"), **deadline
        )

    threads = [
        threading.Thread(target=join, args=(rank,)) for rank in range(NUM_ENGINES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from made


@contextmanager
def together(
    model: Path, *, is_dense: bool = False, **options: Any
) -> Iterator[Together]:
    """Both engines, for the length of a `with`; those of a dense model step alone."""
    both = Together(model, is_dense=is_dense, **options)
    try:
        yield both
    finally:
        both.close()


@pytest.fixture(scope="module")
def inflight() -> dict[str, Any]:
    """Fields of the configuration of a module's engines."""
    return {}


@pytest.fixture(scope="module")
def engines(model: Path, inflight: dict[str, Any]) -> Iterator[dict[str, Together]]:
    """Those that step together, and those that step alone."""
    with (
        together(model, inflight=inflight) as mixture,
        together(model, is_dense=True, inflight=inflight) as dense,
    ):
        yield {"mixture": mixture, "dense": dense}


@pytest.fixture(params=["mixture", "dense"])
def both(engines: dict[str, Together], request: pytest.FixtureRequest) -> Together:
    """The two engines of either kind, and nothing in them."""
    engines[request.param].start_over()
    return engines[request.param]


@pytest.fixture
def mixture(engines: dict[str, Together]) -> Together:
    """The two engines that step together, and nothing in them."""
    engines["mixture"].start_over()
    return engines["mixture"]
