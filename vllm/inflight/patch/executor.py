"""Changes in the multi-process executor.

Each answer must belong to its call. Ranks answer in the order of the calls, and
upstream matches answers by order alone. A call that fails on one rank, or that is given
up, leaves the answers of other ranks unread. Every later call would then read the
answers of the call before. A successful flip would look like a failed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.patch.records.record import Patch


class Answers:
    """The answer queue of one rank, which drops the answers of ended calls."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.num_read = 0
        self.num_left = 0
        """Number of pending answers of ended calls, which are dropped on arrival."""

    def dequeue(self, timeout: float | None = None) -> Any:
        """The next answer of upstream's queue to a current call."""
        while self.num_left:
            self._queue.dequeue(timeout=timeout)
            self.num_left -= 1
        answer = self._queue.dequeue(timeout=timeout)
        self.num_read += 1
        return answer

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the queue."""
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
        # A subclass, such as Ray's executor, makes queues of its own.
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
        # An aggregated output needs an answer of every rank.
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
        why="the next call must not read answers of a call that failed on one rank",
        remove_when="upstream's answers identify their call",
        around=_asked,
    ),
]
