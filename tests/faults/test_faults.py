"""What harms vLLM as it is, and what the same calls do here.

The same sequence of calls is played twice: on vLLM as it is, where the failure has to
show (`make test-upstream-faults`; if it does not, upstream has mended it, and we may
stop saying so), and here, where it must not.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.script import run_script
from tests.faults.scenarios import NEED_TWO_RANKS, SCENARIOS

Seen = dict[str, Any]


def refused(step: Any, code: str | None = None) -> bool:
    """Whether a step raised, and if that matters, with which code."""
    is_error = isinstance(step, dict) and "raised" in step
    return is_error and code in (None, step.get("code"))


class BreaksOff:
    @staticmethod
    def upstream(seen: Seen) -> None:
        assert refused(seen["send"])
        assert "meta" in seen["after"]["text"]

    @staticmethod
    def here(seen: Seen) -> None:
        assert refused(seen["send"])
        assert seen["after"] == seen["before"]


class WithoutAPause:
    @staticmethod
    def upstream(seen: Seen) -> None:
        assert seen["start"] is None
        assert refused(seen["after"])

    @staticmethod
    def here(seen: Seen) -> None:
        assert not refused(seen["start"])
        assert seen["after"] == seen["before"]


class FinishedAllTheSame:
    @staticmethod
    def upstream(seen: Seen) -> None:
        assert not refused(seen["finish"])
        assert seen["label"] == "mixture"
        assert seen["after"] != seen["before"]

    @staticmethod
    def here(seen: Seen) -> None:
        assert refused(seen["finish"], "weights_mismatch")
        assert seen["label"] != "mixture"
        assert seen["after"] == seen["before"]


class Truncated:
    @staticmethod
    def upstream(seen: Seen) -> None:
        assert not refused(seen["send"]) and not refused(seen["finish"])
        assert seen["label"] == "truncated"
        assert seen["after"] != seen["before"]

    @staticmethod
    def here(seen: Seen) -> None:
        assert refused(seen["send"], "weights_mismatch")
        assert "model.layers.1.mlp.down_proj.weight" in seen["send"]["text"]
        assert seen["label"] != "truncated"
        assert seen["after"] == seen["before"]


class StalePrefix:
    @staticmethod
    def upstream(seen: Seen) -> None:
        assert seen["under the new weights"] == seen["second"] > 0

    @staticmethod
    def here(seen: Seen) -> None:
        assert seen["second"] > 0
        assert seen["under the new weights"] == 0
