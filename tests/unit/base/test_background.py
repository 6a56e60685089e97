"""Background threads end before the interpreter does."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from tests.support.waiting import until
from vllm.inflight.background import Background, in_background, where_is

pytestmark = pytest.mark.seconds

BEGINNING = """
import _vllm_inflight_boot as boot
boot._defer_upstream()
"""
"""Nothing of upstream, which takes seconds to import, is used."""
NATIVE = """
import threading, time, torch
from vllm.inflight.background import Background
over = threading.Event()
def work():
    block = torch.ones(1 << 22)
    while not over.is_set():
        block.add_(1)
    print("ended", flush=True)
Background(work, name="native", end=over.set).start()
time.sleep(0.2)
"""
STUCK = """
import threading
from vllm.inflight.background import in_background
in_background(threading.Event().wait)
"""
JOURNAL = """
import sys
from types import SimpleNamespace
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.update.journal import Journal
from vllm.inflight.update import Version
InflightConfig.of = staticmethod(lambda _: SimpleNamespace(journal=sys.argv[1]))
parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
model = SimpleNamespace(model="m")
journal = Journal(SimpleNamespace(parallel_config=parallel, model_config=model))
for number in range(50):
    journal.note(Version(f"v{number}", number), None)
"""


def run(script: str, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-W", "ignore", "-c", BEGINNING + script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("attempt", range(2))
def test_a_thread_in_native_code_ends_before_the_interpreter(attempt):
    assert run(NATIVE) == (0, "ended", "")


def test_a_thread_that_cannot_end_does_not_keep_the_interpreter():
    assert run(STUCK) == (0, "", "")


def test_the_last_journal_entry_is_written_at_the_end(tmp_path):
    assert run(JOURNAL, str(tmp_path / "journal")) == (0, "", "")
    assert '"v49"' in (tmp_path / "journal").read_text()


def test_a_thread_that_has_ended_keeps_nothing_alive():
    class Owner:
        def __init__(self) -> None:
            self.thread = Background(self.work, name="test", end=self.end)
            self.thread.start()

        def work(self) -> None: ...

        def end(self) -> None: ...

    owner = Owner()
    owner.thread.join()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_errors_of_a_background_call_are_raised_by_its_future():
    def fail() -> None:
        raise KeyError(threading.current_thread().name)

    future = in_background(fail, "mine")
    until(future.done)
    with pytest.raises(KeyError, match="mine"):
        future.result()


def test_the_innermost_functions_of_a_thread_are_told_with_their_lines():
    begun, over = threading.Event(), threading.Event()

    def stands_still() -> None:
        begun.set()
        over.wait(60)

    thread = Background(stands_still, name="mine")
    thread.start()
    assert begun.wait(60)
    until(lambda: "Event.wait" in where_is(thread))
    newest, *_ = where_is(thread).split(" < ")
    assert newest.startswith("threading.py:")
    line = stands_still.__code__.co_firstlineno + 2
    name = stands_still.__qualname__
    assert f"{__file__.rpartition('/')[2]}:{line} {name}" in where_is(thread)
    over.set()
    thread.join()
    assert where_is(thread) == ""
