"""Workers that compute nothing before somebody asks for it, as late as can be.

Through a graph, as with Ray, calls overtake the steps. What is real there is the class
it is derived from, by which the engine knows what to expect.
"""

from collections import deque
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.simulated.worker import SimulatedExecutor, done
from vllm.inflight.upstream import RayDistributedExecutor


class Step(Future[Any]):
    """The result of a step; it is given once, as Ray gives it."""

    def __init__(self, executor: "Late") -> None:
        super().__init__()
        self._executor = executor
        self._is_given = False

    def result(self, timeout: float | None = None) -> Any:
        assert not self._is_given, "Ray gives the result of a step once"
        self._is_given = True
        while not self.done():
            self._executor.run_one()
        return super().result()


class Late(SimulatedExecutor):
    """Steps wait, one behind the other."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.submitted: deque[tuple[SchedulerOutput, Step]] = deque()
        self.is_to_fail = False

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        if not scheduled.total_num_scheduled_tokens:
            return self._submit(scheduled, non_block)
        self.scheduled = scheduled
        return done(None) if non_block else None

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._submit(self.scheduled, non_block)

    def _submit(self, scheduled: SchedulerOutput, non_block: bool) -> Any:
        step = Step(self)
        self.submitted.append((scheduled, step))
        return step if non_block else step.result()

    def run_one(self) -> None:
        """Run the step that has waited longest."""
        scheduled, step = self.submitted.popleft()
        if self.is_to_fail:
            step.set_exception(RuntimeError("an actor has died"))
        else:
            step.set_result(self._forward(scheduled))


class Queued(Late):
    """Calls wait in the same queue."""

    def _inflight_flip(self, *args: Any) -> Any:
        while self.submitted:
            self.run_one()
        return super()._inflight_flip(*args)


class Graph(Late, RayDistributedExecutor):
    """Steps wait in the graph, and calls are made at once."""

    uses_ray = True

    def _init_executor(self) -> None:
        super()._init_executor()
        self.num_overtaken: list[int] = []
        """Of every call that changes weights: how many steps it came before."""

    def _inflight_flip(self, *args: Any) -> Any:
        self.num_overtaken.append(len(self.submitted))
        return super()._inflight_flip(*args)

    def _inflight_adapter(self, move: str, request: Any, *_: Any) -> Any:
        self.num_overtaken.append(len(self.submitted))
        return {"ok": True}
