"""Turns between the steps of an engine in its caller's process."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.waiting import until
from vllm.inflight.engine.step_queue import StepQueue, waiting, whole


@pytest.fixture(autouse=True)
def interrupted() -> Iterator[None]:
    """Ctrl-C as usual: a shell that starts tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_end_of_an_engine_is_raised_to_steps_and_queued_calls():
    turns = StepQueue()

    def stop() -> None:
        raise SystemExit("of no version")

    future = turns.submit(stop)
    for _ in range(2):
        with pytest.raises(SystemExit, match="of no version"), turns.stepping():
            raise AssertionError("it has gone on after its end")
    assert isinstance(future.exception(), SystemExit)
    with pytest.raises(SystemExit, match="of no version"):
        turns.run(lambda: None)


def test_an_error_of_a_queued_call_goes_to_its_caller_and_steps_go_on():
    turns = StepQueue()
    with pytest.raises(ZeroDivisionError):
        turns.run(lambda: 1 // 0)
    future = turns.submit(lambda: 1 // 0)
    with turns.stepping():
        assert future.done()


def test_a_ctrl_c_during_a_queued_call_is_raised_after_the_call():
    turns, done = StepQueue(), []

    def switch() -> str:
        signal.raise_signal(signal.SIGINT)
        done.append("to its end")
        return "switched"

    future = turns.submit(switch)
    with pytest.raises(KeyboardInterrupt), turns.stepping():
        raise AssertionError("the step was not interrupted")
    assert (future.result(), done) == ("switched", ["to its end"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with turns.stepping():
        done.append("and on")


def test_a_second_ctrl_c_ends_a_turn_that_does_not_end():
    turns = StepQueue()

    def stand() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was not interrupted")

    future = turns.submit(stand)
    with pytest.raises(KeyboardInterrupt):
        turns.drain()
    assert isinstance(future.exception(), KeyboardInterrupt)


def test_a_thread_can_act_between_the_steps_of_a_thread_that_never_pauses():
    turns, steps, is_over = StepQueue(), [0], threading.Event()
    acted: list[tuple[int, int]] = []

    def step_on() -> None:
        while not is_over.is_set():
            with turns.stepping():
                steps[0] += 1

    stepping = threading.Thread(target=step_on)
    stepping.start()
    try:
        until(lambda: steps[0] > 0)
        for _ in range(5):
            with turns.between():
                before = steps[0]
                time.sleep(0.01)
                assert turns.run(lambda: "a turn of its own") == "a turn of its own"
                with turns.stepping(), turns.between():
                    acted.append((before, steps[0]))
        until(lambda: steps[0] > acted[-1][1])
    finally:
        is_over.set()
        stepping.join()
    assert all(before == after for before, after in acted)


def test_a_thread_can_act_at_once_if_no_thread_steps_or_inside_a_queued_call():
    turns, done = StepQueue(), []

    def nested() -> None:
        with turns.between():
            done.append("inside a turn")

    with turns.between():
        done.append("alone")
    turns.run(nested)
    with turns.stepping():
        nested()
    assert done == ["alone", "inside a turn", "inside a turn"]


def test_an_error_in_between_is_raised_in_its_own_thread():
    turns = StepQueue()
    with pytest.raises(ZeroDivisionError), turns.between():
        raise ZeroDivisionError
    turns.run(lambda: None)


def twice() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def test_a_section_marked_as_whole_is_not_interrupted_by_ctrl_c():
    turns, done = StepQueue(), []

    def switch() -> str:
        with whole():
            twice()
            twice()
            done.append("to its end")
        return "switched"

    future = turns.submit(switch)
    with pytest.raises(KeyboardInterrupt):
        turns.drain()
    assert (future.result(), done) == ("switched", ["to its end"])
    turns.submit(lambda: done.append("and on"))
    turns.drain()
    assert done[1:] == ["and on"]


def test_a_second_ctrl_c_interrupts_a_wait_inside_a_queued_call():
    turns = StepQueue()

    def switch() -> None:
        with whole():
            twice()
            with waiting():
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("it was not interrupted")

    future = turns.submit(switch)
    with pytest.raises(KeyboardInterrupt):
        turns.drain()
    assert isinstance(future.exception(), KeyboardInterrupt)


def test_a_ctrl_c_is_raised_after_another_threads_call_between_two_steps():
    turns, done = StepQueue(), []
    with pytest.raises(KeyboardInterrupt), turns.between():
        signal.raise_signal(signal.SIGINT)
        done.append("to its end")
    assert done == ["to its end"]


def test_a_ctrl_c_outside_of_queued_calls_is_raised_at_once():
    with pytest.raises(KeyboardInterrupt), whole():
        signal.raise_signal(signal.SIGINT)
