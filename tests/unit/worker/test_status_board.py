"""The status board: what one process posts, another reads whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.shared_memory import names, nothing_came
from tests.support.waiting import until
from vllm.inflight.worker import status_board as module
from vllm.inflight.worker.status_board import PAGE_BYTES, StatusBoard, board_bytes

WRITER = """if True:
    import runpy, sys

    # The file alone: importing vLLM takes longer than a writer here lives.
    board = runpy.run_path(sys.argv[1])["StatusBoard"](sys.argv[2], 2)
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        # Every notice has another length, and says it in every part.
        board.post(0, {"number": number, "copies": [number] * (number % 5000)})
"""


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    made = StatusBoard.create(2)
    yield made
    made.close()
    with contextlib.suppress(FileNotFoundError):
        made.unlink()


@contextlib.contextmanager
def writer(board: StatusBoard) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, module.__file__, board.path],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def is_whole(notice: dict) -> bool:
    number = notice["number"]
    return notice["copies"] == [number] * (number % 5000)


def test_an_empty_board_has_empty_notices(board):
    assert board.read_all() == [{}, {}]
    assert board.cancelled() == 0


def test_the_last_notice_of_each_rank_is_read(board):
    board.post(1, {"state": "open"})
    board.post(0, {"state": "staging", "bytes": 7})
    board.post(1, {"state": "staged", "name": "ä"})
    assert board.read_all() == [
        {"state": "staging", "bytes": 7},
        {"state": "staged", "name": "ä"},
    ]


def test_a_stamp_changes_with_every_post_of_anybody(board):
    stamps = {board.stamp()}
    for rank in (0, 0, 1):
        board.post(rank, {})
        stamps.add(board.stamp())
    assert len(stamps) == 4


def test_a_post_of_the_same_process_ends_a_rest(board):
    other = StatusBoard(board.path, 2)
    other.post(1, {})
    began = time.monotonic()
    board.rest(60.0)  # it came before
    posting = threading.Timer(0.05, other.post, (0, {}))
    posting.start()
    board.rest(60.0)
    assert time.monotonic() - began < 50.0
    posting.join()
    began = time.monotonic()
    board.rest(0.02)  # nothing has come since
    assert time.monotonic() - began >= 0.02
    other.close()


def test_a_post_on_another_board_ends_no_rest(board):
    other = StatusBoard.create(1)
    other.post(0, {})
    began = time.monotonic()
    board.rest(0.02)
    assert time.monotonic() - began >= 0.02
    other.unlink()
    other.close()


def test_a_cancelled_update_stays_cancelled(board):
    other = StatusBoard(board.path, 2)
    board.cancel(7)
    board.cancel(3)
    assert other.cancelled() == 7
    other.close()


def test_a_stage_can_name_all_tensors_of_another_one_of_a_large_model(board):
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{which}_proj.{kind}"
        for layer in range(30, 61)
        for expert in range(256)
        for which in ("gate", "up", "down")
        for kind in ("weight", "weight_scale_inv")
    ]
    notice = {"state": "staged", "unfilled": names}
    board.post(1, notice)
    assert board.read(1) == notice
    board.post(1, {"state": "open"})
    assert board.read(1) == {"state": "open"}


def test_a_notice_that_does_not_fit_is_rejected_and_the_last_one_stays(board):
    board.post(0, {"state": "open"})
    with pytest.raises(ValueError, match="does not fit"):
        board.post(0, {"text": os.urandom(PAGE_BYTES).hex()})
    assert board.read(0) == {"state": "open"}
    text = os.urandom(PAGE_BYTES // 2 - 2048).hex()
    board.post(0, {"text": text})
    assert board.read(0) == {"text": text}


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9)),
        ),
        max_size=8,
    )
)
def test_every_post_is_read_back_unchanged(posts):
    made = StatusBoard.create(2)
    made.unlink()
    last = [{}, {}]
    for rank, notice in posts:
        made.post(rank, notice)
        last[rank] = notice
        assert made.read_all() == last
    made.close()


# Another process


def test_a_process_reads_the_board_after_its_name_is_unlinked(board):
    with writer(board):
        board.unlink()
        assert not Path(board.path).exists()
        deadline = time.monotonic() + 30
        while board.read(0).get("number", 0) < 10:
            assert time.monotonic() < deadline
    assert board.read(1) == {}


def test_no_notice_is_ever_read_torn(board):
    with writer(board):
        numbers = []
        began = time.monotonic()
        while time.monotonic() < began + 1.5 or len(set(numbers)) <= 50:
            assert time.monotonic() < began + 30, "nothing new is read"
            notice = board.read(0)
            if notice:
                assert is_whole(notice)
                numbers.append(notice["number"])
    assert numbers == sorted(numbers)


def test_a_writer_killed_in_the_middle_leaves_the_last_whole_notice(board):
    for turn in range(20):
        before = board.stamp()
        with writer(board) as process:
            until(lambda before=before: board.stamp() != before, "it does not begin")
            # Somewhere in the middle of a post, a different place every time.
            time.sleep(0.001 * turn)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        notice = board.read(0)
        assert is_whole(notice)
        assert board.read(0) == notice
    board.post(0, {"number": 1, "copies": [1]})
    assert is_whole(board.read(0))


def test_a_page_half_written_by_the_dead_is_never_read(board):
    """What a kill leaves behind, at every byte it can happen."""
    board.post(0, {"state": "staging", "bytes": 1})
    before = bytes(board._map)
    board.post(0, {"state": "staged", "digest": "0" * 32})
    after = bytes(board._map)
    changed = [i for i in range(len(before)) if before[i] != after[i]]
    # A post writes its page first and the sequence, which lies before it, last.
    sequence, *page = changed
    board._map[:] = before
    for place in page:
        board._map[place] = after[place]
        assert board.read(0) == {"state": "staging", "bytes": 1}
    board._map[sequence] = after[sequence]
    assert board.read(0) == {"state": "staged", "digest": "0" * 32}


def test_a_board_without_memory_is_rejected_when_it_is_created(monkeypatch):
    """Memory that is only promised ends the process that writes to it first."""

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    known = names()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space left"):
        StatusBoard.create(2)
    nothing_came(known)


def test_the_file_of_a_board_has_the_stated_size():
    made = StatusBoard.create(3)
    assert os.path.getsize(made.path) == board_bytes(3) == len(made._map)
    made.unlink()
    made.close()


def beside(once: Callable[[], None]) -> Callable[[], None]:
    """The other thread's call, which may have to wait for this one's."""
    thread = threading.Thread(target=once)

    def begin() -> None:
        if thread.ident is None:
            thread.start()
            thread.join(0.2)

    return begin


def test_a_cancellation_is_not_overwritten_by_another_thread(board, monkeypatch):
    read = StatusBoard.cancelled
    other = beside(lambda: board.cancel(9))

    def cancelled(self):
        found = read(self)
        other()
        return found

    monkeypatch.setattr(StatusBoard, "cancelled", cancelled)
    board.cancel(5)
    until(lambda: read(board) == 9, "it was lost")


def test_two_threads_of_a_rank_never_write_the_same_page(board, monkeypatch):
    sequence = StatusBoard._sequence
    other = beside(lambda: board.post(0, {"by": "the other"}))

    def read(self, rank):
        found = sequence(self, rank)
        other()
        return found

    monkeypatch.setattr(StatusBoard, "_sequence", read)
    board.post(0, {"by": "this one"})
    until(lambda: board.stamp()[0] == 2, "both wrote to one page")
    assert board.read(0) == {"by": "the other"}
