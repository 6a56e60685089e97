"""Executors: how steps and calls reach the ranks, and which of them can be updated.

A commit is a call to every rank, and the steps before it are of the version before.

| executor | steps and calls | before a commit |
|---|---|---|
| of one process; `mp`; Ray's second | in one queue, as they were made | – |
| Ray's first (`ray`) | in a graph, and past it | steps are waited for |
| of an external launcher, several ranks | an engine for each rank | refused |
| others | not known | refused |
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
"""The steps of an engine core that have not been read; the first to be is the last."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What matters here of an executor."""

    refusal: str | None = None
    """Why its ranks cannot change together; None if they can."""
    is_ordered: bool = True
    """Whether ranks take steps and calls in the order in which they were made."""


def kind_of(executor: upstream.Executor) -> Kind:
    """Of which kind an executor is; one that is derived is what it is derived from."""
    num_ranks = executor.parallel_config.world_size
    if isinstance(executor, upstream.ExecutorWithExternalLauncher) and num_ranks > 1:
        return Kind(
            f"an external launcher runs {num_ranks} ranks as engines of their own, "
            "which would each change alone; with --distributed-executor-backend mp or "
            "ray one engine has them all"
        )
    # To look the class up imports Ray's names.
    if executor.uses_ray and isinstance(executor, upstream.RayDistributedExecutor):
        is_pooling = executor.model_config.runner_type == "pooling"
        lags = is_pooling and num_ranks > 1
        return Kind(_lagging("pooling models") if lags else None, is_ordered=False)
    if isinstance(executor, upstream.UniProcExecutor | upstream.MultiprocExecutor):
        return Kind()
    return Kind(
        f"of the executor {type(executor).__qualname__} it is not known in which order "
        "its ranks take steps and calls; derive it from vLLM's UniProcExecutor or "
        "MultiprocExecutor, or use --distributed-executor-backend mp"
    )


def asking(executor: upstream.Executor) -> AbstractContextManager[None]:
    """Around a call of its ranks, inside of what has to happen whole.

    A rank of another process may never answer, so a second Ctrl-C ends the wait. The
    one of this process is called, and is at work as long as there is no answer.
    """
    is_here = isinstance(executor, upstream.UniProcExecutor)
    return nullcontext() if is_here else waiting()


def lagging_drafter(kind: Kind, num_ranks: int) -> str | None:
    """Why a drafter with weights keeps updates out; None if it does not."""
    if kind.is_ordered or num_ranks == 1:
        return None
    return _lagging("drafters")


def _lagging(what: str) -> str:
    # Ranks that meet in the last layer have read all of their weights by then; what
    # comes after it, nobody waits for but on the rank that answers.
    return (
        f"in Ray's compiled graph a rank may still compute when another has answered, "
        f"and {what} read weights there; VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 has "
        "an executor that orders calls after steps"
    )


def wait_for_steps(in_flight: InFlight | None) -> None:
    """Wait until no step is in flight; what came out is read in its turn, as ever.

    Nothing is scheduled and nothing is read meanwhile, so batches stay as they are.

    Raises:
        EngineFault: a step has failed, and with the next one the engine will say so.

    """
    for index in reversed(range(len(in_flight or ()))):
        assert in_flight is not None
        step, *rest = in_flight[index]
        done: Future[Any] = Future()
        try:
            # Ray gives the result of a step once, and to whoever asks first.
            done.set_result(step.result())
        except Exception as error:
            done.set_exception(error)
        in_flight[index] = (done, *rest)
        if (failure := done.exception()) is not None:
            raise EngineFault(f"a step in flight failed: {failure}") from failure
