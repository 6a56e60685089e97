"""How a trainer ends: closed, by an exception, by Ctrl-C, or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.trainers.fake_engine import (
    ABORT,
    FINISH,
    HELD_S,
    START,
    UPDATE,
    StandIn,
    publisher,
)
from tests.support.waiting import until
from tests.unit.trainer.conftest import noted
from vllm.inflight.background import in_background
from vllm.inflight.errors import Cancelled
from vllm.inflight.trainer import coordinator, publish_queue
from vllm.inflight.trainer.coordinator import GIVE_UP_S
from vllm.inflight.trainer.http_client import HttpEngine

pytestmark = pytest.mark.seconds

HOST = """
import json, os, signal, sys
import torch
import vllm.inflight.trainer
while line := sys.stdin.readline():
    pid = os.fork()
    if not pid:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
code, url, stderr = json.loads(line)
# What `make test &` starts ignores Ctrl-C, and so would what is forked off.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
exec(code, {"__name__": "__main__", "url": url})
"""
"""Python, torch and our package are imported once. Whoever is forked off runs a script
to its end, and then ends as any Python does that was started for it."""

BEGINNING = """
import sys, time, torch
from vllm.inflight.trainer import Publisher
weights = {f"{n}.weight": torch.full((1 << 20,), float(n)) for n in range(8)}
publisher = Publisher(url, weights)

def waits_for(publisher):
    job = publisher._queue._current
    return "" if job is None else job.retry_budget.waits_for
"""
SOON = """
from vllm.inflight.trainer import publish_queue
publish_queue.EXIT_S = 1.0
"""
"""For a script that does not have to wait the five seconds for what never comes."""
STARTING_S = 60
"""For torch to be imported, on a machine that has other things to do."""
LEAVING_S = publish_queue.EXIT_S + GIVE_UP_S + 20
"""Likewise, to be cleaned up. A publisher would wait for an engine for ten minutes."""


class Host:
    """Runs one script after another, each in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, code: str, engine: StandIn, stderr: Path) -> int:
        """Begin a script; returns its process id."""
        assert self._process.stdin is not None
        told = json.dumps([BEGINNING + textwrap.dedent(code), engine.url, str(stderr)])
        self._process.stdin.write(told + "\n")
        self._process.stdin.flush()
        return self.read(STARTING_S)

    def read(self, seconds: float) -> int:
        """The next number that it tells: a process id, or an exit code."""
        assert self._process.stdout is not None
        return int(in_background(self._process.stdout.readline).result(seconds))

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class Trainer:
    """A script that publishes to an engine."""

    def __init__(self, host: Host, engine: StandIn, code: str, stderr: Path) -> None:
        self._host, self._stderr = host, stderr
        self.pid = host.begin(code, engine, stderr)

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def ends(self, seconds: float = LEAVING_S) -> tuple[int, list[str]]:
        """Its exit code and the lines that it wrote to stderr."""
        try:
            code = self._host.read(seconds)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        return code, self._stderr.read_text().splitlines()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """What trainers are forked off."""
    running = Host()
    yield running
    running.close()


@pytest.fixture
def trainer(host: Host, engine: StandIn, tmp_path: Path) -> Callable[[str], Trainer]:
    """`trainer(code)`: a script with a `publisher` of 32 MiB to `engine`."""
    return lambda code: Trainer(host, engine, code, tmp_path / "stderr")


@pytest.mark.parametrize("attempt", range(3))
def test_an_unclosed_publisher_finishes_its_publish_at_exit(engine, trainer, attempt):
    begun = trainer('publisher.publish("last", block=False)')
    assert begun.ends() == (0, [])
    assert engine.version["weight_version"] == "last"


def test_a_queued_publish_is_finished_at_exit_without_a_close(engine, trainer):
    engine.delays[UPDATE] = 0.3
    code = """
        publisher.publish("first", block=False)
        publisher.publish("last", block=False)
    """
    assert trainer(code).ends() == (0, [])
    assert engine.version == engine.version | {"weight_version": "last", "epoch": 2}


@pytest.mark.parametrize("path", [UPDATE, FINISH])
def test_a_publish_not_served_soon_after_the_end_is_given_up_with_one_line(
    engine, trainer, path
):
    engine.held[path] = threading.Event()
    begun = trainer(SOON + 'publisher.publish("late", block=False)')
    until(lambda: engine.bodies(path))
    code, lines = begun.ends()
    assert (code, len(lines)) == (0, 1), lines
    assert "'late' was given up" in lines[0] and "close()" in lines[0]
    assert "it was not served within 1 s" in lines[0]
    assert engine.version["weight_version"] != "late" or path == FINISH
    assert engine.bodies(ABORT) != []
    engine.held[path].set()


def test_a_publisher_whose_engine_is_gone_ends_with_one_line(engine, trainer):
    engine.faults[START] = ["drop"] * 1000
    begun = trainer(SOON + 'publisher.publish("lost", block=False)')
    until(lambda: engine.bodies(START))
    code, lines = begun.ends()
    assert (code, len(lines)) == (0, 1), lines
    assert "'lost' was given up" in lines[0]


def test_an_exception_of_the_training_loop_is_shown_at_once(engine, trainer):
    engine.begin_elsewhere()
    code = """
        with publisher:
            publisher.publish("rb", block=False)
            while "elsewhere" not in waits_for(publisher):
                time.sleep(0.01)
            raise ValueError("my training loop broke")
    """
    begun = trainer(code)
    until(lambda: engine.bodies(START))
    code, lines = begun.ends()
    assert (code, lines[-1]) == (1, "ValueError: my training loop broke")
    assert "'rb' was given up: ValueError was raised" in lines[0]


@pytest.mark.parametrize("path", [UPDATE, FINISH])
def test_ctrl_c_aborts_an_uncommitted_publish_at_once(engine, trainer, path):
    engine.held[path] = threading.Event()
    begun = trainer('with publisher: publisher.publish("v")')
    until(lambda: engine.bodies(path))
    begun.interrupt()
    code, lines = begun.ends()
    assert (code, lines[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert engine.bodies(ABORT) != []
    engine.held[path].set()


def test_ctrl_c_while_a_publisher_is_closed_is_fast(engine, trainer):
    engine.begin_elsewhere()
    begun = trainer('with publisher: publisher.publish("v", block=False)')
    until(lambda: len(engine.bodies(START)) > 2)
    begun.interrupt()
    code, lines = begun.ends()
    assert (code, lines[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert any("'v' was given up" in line for line in lines)


def test_a_publish_given_up_by_an_exception_is_aborted_and_its_futures_fail(engine):
    engine.held[UPDATE] = threading.Event()
    with pytest.raises(KeyError, match="loop"), publisher(engine) as to:
        first = to.publish("first", block=False)
        second = to.publish("second", block=False)
        until(lambda: engine.bodies(UPDATE))
        raise KeyError("loop")
    for future in (first, second):
        with pytest.raises(Cancelled, match="KeyError was raised in the with block"):
            future.result(0)
    assert len(engine.bodies(ABORT)) == 1
    engine.held[UPDATE].set()
    with publisher(engine) as to:
        assert to.publish("next").epoch == 1, "the engine is still in it"


def test_a_commit_that_is_under_way_when_an_exception_comes_may_end(
    engine, monkeypatch
):
    monkeypatch.setattr(coordinator, "GRACE_S", 20)
    engine.delays[FINISH] = 0.3
    with pytest.raises(KeyError), publisher(engine) as to:
        future = to.publish("v", block=False)
        until(lambda: engine.bodies(FINISH))
        raise KeyError
    assert future.result(0).version == engine.version["weight_version"] == "v"


def test_closing_a_publisher_logs_what_it_waits_for(engine, logged):
    engine.begin_elsewhere()
    to = publisher(engine)
    to.publish("rb", block=False)
    closing = in_background(to.close)
    until(lambda: logged)
    assert "closing waits for 'rb'" in logged[0]
    assert engine.url in logged[0] and "'elsewhere'" in logged[0]
    engine.end_elsewhere()
    closing.result(60)
    assert engine.version["weight_version"] == "rb"


def test_a_blocking_publish_logs_what_it_waits_for(engine, logged):
    engine.faults[START] = ["drop"] * 4
    with publisher(engine) as to:
        to.publish("v")
    (line,) = set(logged)
    assert "publish of 'v'" in line and "no answer to POST /start_weight" in line


def test_an_update_that_takes_its_time_is_not_complained_about(engine, logged):
    engine.delays[UPDATE] = 2.5
    with publisher(engine) as to:
        to.publish("v")
    assert logged == []


def test_a_publish_that_is_interrupted_does_not_close_the_publisher(engine):
    """As in a notebook."""
    engine.held[UPDATE] = threading.Event()
    with publisher(engine) as to:
        job = to._queue
        interrupting = in_background(lambda: to.publish("v"))
        until(lambda: engine.bodies(UPDATE))
        assert job._current is not None
        job._current.retry_budget.give_up(Cancelled("the call was interrupted"))
        with pytest.raises(Cancelled, match="interrupted"):
            interrupting.result(GIVE_UP_S + 5)
        engine.held[UPDATE].set()
        assert to.publish("w").epoch == 1


def test_a_publish_is_given_up_soon_though_the_engine_does_not_answer(
    engine, monkeypatch
):
    aborts = noted(monkeypatch, HttpEngine, "abort")
    engine.held[UPDATE] = threading.Event()
    engine.held[ABORT] = threading.Event()
    with pytest.raises(KeyError), publisher(engine) as to:
        to.publish("v", block=False)
        until(lambda: engine.bodies(UPDATE))
        began = time.monotonic()
        raise KeyError
    assert [call.args[-1].timeout_s <= GIVE_UP_S for call in aborts] == [True]
    assert time.monotonic() - began < HELD_S
    engine.held[UPDATE].set()
    engine.held[ABORT].set()
