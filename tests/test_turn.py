"""Turns between the steps of an engine in its caller's process."""

import threading

import pytest

from vllm.inflight.engine.turn import Turns


def test_the_end_of_an_engine_ends_whoever_steps():
    turns, stepping, asked = Turns(), threading.Event(), []

    def stop() -> None:
        raise SystemExit("of no version")

    def ask() -> None:
        try:
            turns.run(stop)
        except SystemExit as error:
            asked.append(str(error))

    def step() -> None:
        with turns.stepping():
            stepping.set()
            while not turns._queue:
                pass
        with turns.stepping():
            raise AssertionError("it has gone on after its end")

    asking = threading.Thread(target=lambda: stepping.wait() and ask())
    asking.start()
    with pytest.raises(SystemExit, match="of no version"):
        step()
    asking.join()
    assert asked == ["of no version"]


def test_what_fails_is_the_askers_and_the_steps_go_on():
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        turns.run(lambda: 1 // 0)
    future = turns.submit(lambda: 1 // 0)
    with turns.stepping():
        assert future.done()
