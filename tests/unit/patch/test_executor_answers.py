"""Answers of several ranks: those of a call that is over are nobody's."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.inflight.patch.executor import _asked


class Queue:
    """What upstream's queue does of it."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.put = self._queue.put

    def dequeue(self, timeout: float | None = None) -> Any:
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None


class Executor:
    """Two ranks; asks as upstream does."""

    def __init__(self) -> None:
        self.ranks = [Queue(), Queue()]
        self.response_mqs = list(self.ranks)
        self.ask = _asked(Executor._collective_rpc).__get__(self)

    def _collective_rpc(
        self, method: str, timeout: Any, args: Any, kwargs: Any, later: bool, one: Any,
        *_: Any,
    ) -> Any:  # fmt: skip
        def read() -> list[Any]:
            found = []
            chosen = self.response_mqs if one is None else [self.response_mqs[one]]
            for each in chosen:
                answer = each.dequeue(timeout)
                if isinstance(answer, Exception):
                    raise answer
                found.append(answer)
            return found

        asked = SimpleNamespace(get_response=read)
        asked.result = lambda: asked.get_response()
        return asked

    def answers(self, *answers: Any) -> None:
        for rank, answer in zip(self.ranks, answers, strict=True):
            rank.put(answer)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_answers_to_a_failed_call_are_not_returned_to_the_next_call(failing):
    executor = Executor()
    answers: list[Any] = ["mine", "mine"]
    answers[failing] = ValueError("no")
    executor.answers(*answers)
    with pytest.raises(ValueError, match="no"):
        executor.ask("one")
    executor.answers("a", "b")
    assert executor.ask("another") == ["a", "b"]


def test_a_call_that_was_given_up_is_not_the_answer_to_the_next():
    executor = Executor()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            executor.ask("slow", timeout=0.01)
    executor.answers("late", "late")
    executor.answers("late too", "late too")
    executor.answers("a", "b")
    assert executor.ask("another", timeout=60) == ["a", "b"]


def test_a_call_that_was_interrupted_is_not_the_answer_to_the_next(monkeypatch):
    executor = Executor()
    executor.ranks[0].put("mine")

    def interrupted(timeout):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(executor.ranks[1], "dequeue", interrupted)
        executor.ask("slow")
    executor.ranks[1].put("mine")
    executor.answers("a", "b")
    assert executor.ask("another") == ["a", "b"]


def test_a_failed_call_to_one_rank_does_not_disturb_the_next_call_to_all():
    executor = Executor()
    executor.ranks[1].put(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        executor.ask("one", unique_reply_rank=1)
    executor.answers("a", "b")
    assert executor.ask("all") == ["a", "b"]
