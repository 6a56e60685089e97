"""Fixtures: stand-ins for engines, and a look for parcels that were left."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trainers.fake_engine import StandIn
from tests.support.waiting import until
from vllm.inflight.trainer import retry, snapshot
from vllm.inflight.trainer.publish_queue import PublishQueue
from vllm.inflight.trainer.snapshot import SHARED_MEMORY


@pytest.fixture
def engine() -> Iterator[StandIn]:
    """A stand-in for an engine."""
    with StandIn() as stand_in:
        yield stand_in


@pytest.fixture
def other() -> Iterator[StandIn]:
    """A second one."""
    with StandIn() as stand_in:
        yield stand_in


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the trainer's side logs; vLLM's logging keeps it from pytest."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, listener = logging.getLogger("vllm.inflight.trainer"), Listener()
    logger.addHandler(listener)
    yield lines
    logger.removeHandler(listener)


def noted(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> list[SimpleNamespace]:
    """The calls of `kind.name` from now on: the `args` of each, and its `result`."""
    real, calls = getattr(kind, name), []

    def note(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(SimpleNamespace(args=args, result=None))
        call = calls[-1]
        call.result = real(self, *args, **options)
        return call.result

    monkeypatch.setattr(kind, name, note)
    return calls


def stopped_at_once(looks: list[SimpleNamespace], least_s: float) -> bool:
    """Whether nobody looked at `RetryBudget.overdue_s` again, once it was above
    `least_s`.

    Whoever waits looks every moment, so it ended then, however slow the machine is.
    """
    *before, last = [look.result for look in looks]
    return bool(max(before, default=0.0) <= least_s < last)


@pytest.fixture
def leaping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Whenever somebody waits to try again, the clock leaps instead: the leaps.

    It stands still otherwise, so a slow machine makes as many tries as a fast one.
    """
    leaps: list[float] = []

    def leap(_: PublishQueue, seconds: float) -> bool:
        leaps.append(seconds)
        return False

    def pause(self: retry.RetryBudget, seconds: float, waits_for: str = "") -> bool:
        self.note(waits_for)
        leaps.append(min(seconds, self.left()))
        return self.left() > 0

    # From 0 on: beside the hours that a host has been up, leaps would be rounded.
    clock = SimpleNamespace(monotonic=lambda: float(sum(leaps)))
    monkeypatch.setattr(PublishQueue, "give_way", leap)
    monkeypatch.setattr(retry.RetryBudget, "pause", pause)
    monkeypatch.setattr(retry, "time", clock)
    return leaps


def parcels(folder: Path = SHARED_MEMORY) -> set[Path]:
    """The parcels of these tests that lie in a folder."""
    return set(folder.glob(snapshot.PREFIX + "*"))


@pytest.fixture(autouse=True)
def no_parcel_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, its parcels in shared memory are gone afterwards."""
    # Apart from those of other processes of this machine.
    monkeypatch.setattr(snapshot, "PREFIX", f"{snapshot.PREFIX}tests-{os.getpid()}-")
    yield
    until(lambda: not parcels(), "a parcel stayed")
