"""What a row of the table is, and how its checks read what was seen."""

from __future__ import annotations

import inspect
from typing import Any

from tests.robustness.faults.in_process import Seen, failed


class Row:
    """A way in which vLLM as it is fails around an update: the docstring names it.

    A check raises where what was seen is not what the row says, and otherwise tells in
    a sentence what it was.

    Attributes:
        play: the sequence of calls, of `in_process` or `served`; none if the fault
            cannot be had on this build.
        tests: others that show what holds here, as `file::function`.
        not_shown: why there is no play.
        instead: what holds here, where nothing is played here.
        takes_minutes: whether the play here is left to `make test-slow`.
        needs_gpu: whether it is played by `make test-gpu` only.

    """

    play: str | None = None
    tests: tuple[str, ...] = ()
    not_shown = ""
    instead = ""
    takes_minutes = False
    needs_gpu = False

    @staticmethod
    def upstream(seen: Seen) -> str:
        """What vLLM as it is did; AssertionError if it did not fail."""
        raise NotImplementedError

    @staticmethod
    def here(seen: Seen) -> str:
        """What vLLM in-flight did; AssertionError if it failed."""
        raise NotImplementedError

    @classmethod
    def fault(cls) -> str:
        """The docstring, in one line."""
        return " ".join(inspect.cleandoc(cls.__doc__ or "").split())


def refused(step: Any, code: str | None = None) -> bool:
    """Whether a call of an `LLM` raised, and if that matters, with which code."""
    return failed(step) and code in (None, step.get("code"))


def first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def code_of(reply: Any) -> str | None:
    """The code of the error that a server answered with, if it has one."""
    error = reply["body"].get("error") if isinstance(reply["body"], dict) else None
    return error.get("code") if isinstance(error, dict) else None
