"""Turns between the steps of an engine in its caller's process."""

import pytest

from vllm.inflight.engine.turn import Turns


def test_the_end_of_an_engine_ends_whoever_steps_and_whoever_asks():
    turns = Turns()

    def stop() -> None:
        raise SystemExit("of no version")

    future = turns.submit(stop)
    for _ in range(2):
        with pytest.raises(SystemExit, match="of no version"), turns.stepping():
            raise AssertionError("it has gone on after its end")
    assert isinstance(future.exception(), SystemExit)
    with pytest.raises(SystemExit, match="of no version"):
        turns.run(lambda: None)


def test_what_fails_is_the_askers_and_the_steps_go_on():
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        turns.run(lambda: 1 // 0)
    future = turns.submit(lambda: 1 // 0)
    with turns.stepping():
        assert future.done()
