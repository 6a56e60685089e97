"""Memory that a kernel may still write is held until that kernel has ended."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.inflight.transport.collective import nccl


class Stream:
    """A stream whose kernels end when the test says so."""

    has_ended = False

    def query(self) -> bool:
        return self.has_ended


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    nccl._undrained.clear()


def keep(stream: Any) -> None:
    nccl.keep_until_drained(stream, "memory")


def test_memory_is_held_for_each_stream_until_that_stream_is_done() -> None:
    first, second = Stream(), Stream()
    keep(first)
    keep(second)
    assert nccl.still_writes()
    first.has_ended = True
    assert nccl.still_writes()
    second.has_ended = True
    assert not nccl.still_writes()


def test_memory_that_is_still_written_is_held_while_two_threads_check_it() -> None:
    """The next update looks as it begins; a sleep or a shutdown may look as well."""

    class Looking(Stream):
        """Asking a stream lets other threads run, and here another one looks then."""

        def query(self) -> bool:
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=nccl.still_writes)
                other.start()
                other.join()
            return self.has_ended

    ended, going_on = Looking(), Stream()
    ended.has_ended = True
    keep(ended)
    keep(going_on)
    assert nccl.still_writes()
    assert nccl.still_writes()
    going_on.has_ended = True
    assert not nccl.still_writes()
