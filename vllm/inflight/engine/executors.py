"""Executors: how steps and calls reach the ranks, and which executors allow updates.

A commit is a call to every rank. The steps before it must use the version before it.

| executor | order of steps and calls | at a commit |
|---|---|---|
| one process; `mp`; Ray's V2 executor | one queue, in order | nothing to do |
| Ray's first executor (`ray`) | steps in a graph, calls past it | waits for the steps |
| external launcher, several ranks | each rank is an engine | updates are rejected |
| others | unknown | updates are rejected |
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.step_queue import waiting
from vllm.inflight.errors import EngineFault

InFlight = deque[tuple[Any, ...]]
"""Steps of an engine core whose output is unread; the oldest is at the end."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of an executor that matter for updates."""

    refusal: str | None = None
    """Why its ranks cannot commit together; None if they can."""
    is_ordered: bool = True
    """Whether ranks execute steps and calls in the order of sending."""


def kind_of(executor: upstream.Executor) -> Kind:
    """The kind of an executor; a subclass has the kind of its base class."""
    num_ranks = executor.parallel_config.world_size
    if isinstance(executor, upstream.ExecutorWithExternalLauncher) and num_ranks > 1:
        return Kind(
            f"an external launcher runs {num_ranks} ranks as separate engines, which "
            "would each commit alone; use --distributed-executor-backend mp or ray, "
            "where one engine has all ranks"
        )
    # Checked first, because looking the class up imports Ray.
    if executor.uses_ray and isinstance(executor, upstream.RayDistributedExecutor):
        is_pooling = executor.model_config.runner_type == "pooling"
        lags = is_pooling and num_ranks > 1
        return Kind(_lagging("pooling models") if lags else None, is_ordered=False)
    if isinstance(executor, upstream.UniProcExecutor | upstream.MultiprocExecutor):
        return Kind()
    return Kind(
        f"the executor {type(executor).__qualname__} is unknown, and so is the order "
        "in which its ranks execute steps and calls; derive it from vLLM's "
        "UniProcExecutor or MultiprocExecutor, or use --distributed-executor-backend mp"
    )


def asking(executor: upstream.Executor) -> AbstractContextManager[None]:
    """Use around a call of the ranks inside of `step_queue.whole`.

    A rank in another process may never answer, so a second Ctrl-C ends the wait. A rank
    in this process is a plain call, which must not be interrupted.
    """
    is_here = isinstance(executor, upstream.UniProcExecutor)
    return nullcontext() if is_here else waiting()


def lagging_drafter(kind: Kind, num_ranks: int) -> str | None:
    """Why a drafter with weights rules updates out; None if it does not."""
    if kind.is_ordered or num_ranks == 1:
        return None
    return _lagging("drafters")


def _lagging(what: str) -> str:
    # The ranks synchronise in the last layer and have read their weights by then. Only
    # the rank that answers waits for later computations.
    return (
        f"in Ray's compiled graph a rank may still compute when another has answered, "
        f"and {what} read weights there; VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 has "
        "an executor that orders calls after steps"
    )


def wait_for_steps(in_flight: InFlight | None) -> None:
    """Wait until no step is in flight; the engine reads their outputs later, in order.

    Nothing is scheduled or read meanwhile, so batches do not change.

    Raises:
        EngineFault: a step has failed; the engine core reports it at its next step.

    """
    for index in reversed(range(len(in_flight or ()))):
        assert in_flight is not None
        step, *rest = in_flight[index]
        done: Future[Any] = Future()
        try:
            # Ray returns the result of a step only once.
            done.set_result(step.result())
        except Exception as error:
            done.set_exception(error)
        in_flight[index] = (done, *rest)
        if (failure := done.exception()) is not None:
            raise EngineFault(f"a step in flight failed: {failure}") from failure
