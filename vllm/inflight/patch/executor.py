"""Changes in the executor of several processes, and in its workers.

An answer belongs to its question. Ranks answer in the order in which they are asked,
and upstream tells answers apart by nothing else. A call that fails on one rank, or is
not waited for any longer, leaves the answers of the others behind, and every later call
would be given those of the one before it: a flip that all ranks have made would look
like one that failed.

A worker ends with its core. Upstream's leaves when it is next to be asked for a step,
and one may have been asked for a step that another was not, when its core was killed:
in that step it waits for the other for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.parent_watchdog import end_with_parent
from vllm.inflight.patch.record import Patch


class Answers:
    """The answers of one rank, without those that nobody waits for any longer."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.num_read = 0
        self.num_left = 0
        """Of calls that are over: to be thrown away when they come."""

    def dequeue(self, timeout: float | None = None) -> Any:
        """The next answer, as upstream's queue gives it."""
        while self.num_left:
            self._queue.dequeue(timeout=timeout)
            self.num_left -= 1
        answer = self._queue.dequeue(timeout=timeout)
        self.num_read += 1
        return answer

    def __getattr__(self, name: str) -> Any:
        """All else is the queue's."""
        return getattr(self._queue, name)


def _asked(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: upstream.Executor,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Any = None,
        ec_output_aggregator: Any = None,
    ) -> Any:
        # An executor derived from upstream's, as Ray's is, makes queues of its own.
        if not all(isinstance(each, Answers) for each in self.response_mqs):
            self.response_mqs = [Answers(queue) for queue in self.response_mqs]
        future = original(
            self,
            method,
            timeout,
            args,
            kwargs,
            True,
            unique_reply_rank,
            kv_output_aggregator,
            ec_output_aggregator,
        )
        answers = self.response_mqs
        # What is put together needs an answer of every rank.
        is_of_all = kv_output_aggregator or ec_output_aggregator
        if unique_reply_rank is not None and not is_of_all:
            answers = answers[unique_reply_rank : unique_reply_rank + 1]
        future.get_response = _all_or_left(future.get_response, answers)
        return future if non_block else future.result()

    return collective_rpc


def _all_or_left(read: Any, answers: list[Answers]) -> Any:
    def get_response() -> Any:
        before = [each.num_read for each in answers]
        try:
            return read()
        except BaseException:  # Ctrl-C in a notebook, too
            for each, num_read in zip(answers, before, strict=True):
                each.num_left += each.num_read == num_read
            raise

    return get_response


def _end_with_core(original: Callable[..., Any]) -> Callable[..., Any]:
    def monitor_death_pipe(
        self: upstream.WorkerProc, death_pipe: Any, shutdown_requested: Any
    ) -> None:
        original(self, death_pipe, shutdown_requested)
        end_with_parent()

    return monitor_death_pipe


_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"

PATCHES = [
    Patch(
        target=f"{_EXECUTOR}.collective_rpc",
        expects=(
            "self",
            "method",
            "timeout",
            "args",
            "kwargs",
            "non_block",
            "unique_reply_rank",
            "kv_output_aggregator",
            "ec_output_aggregator",
        ),
        why="a call that fails on one rank leaves no answers to the next call",
        remove_when="upstream's answers say which call they belong to",
        around=_asked,
    ),
    Patch(
        target="vllm.v1.executor.multiproc_executor:WorkerProc.monitor_death_pipe",
        expects=("self", "death_pipe", "shutdown_requested"),
        why="a worker whose core was killed ends, whatever it waits for",
        remove_when="upstream's workers do not wait for other ranks without a limit",
        around=_end_with_core,
    ),
]
