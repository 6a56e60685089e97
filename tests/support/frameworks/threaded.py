"""A worker extension whose methods start threads, in ways that a test names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.support.frameworks.direct import NORM, TENSORS
from vllm.inflight.frameworks.known_call import KnownCall, Role


class Held:
    """What a test lets go on, and what the threads of a method have met."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_return = threading.Event()
        self.may_go_on = threading.Event()
        self.may_end = threading.Event()
        self.threads: list[threading.Thread] = []
        self.errors: list[str] = []
        self.num_written = 0
        self.kept: dict[str, Callable[[], object]] = {}
        """What the method has left to a thread that is older than its call."""

    def go_on(self) -> None:
        """Let the threads go on, and wait until they have ended."""
        self.may_go_on.set()
        self.may_end.set()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


HELD: list[Held] = []
"""Of the test that runs."""


class Threaded:
    """One call that sends a version, and one that sends a part of it."""

    def tests_send(self: Any, way: str) -> str:
        with torch.no_grad():
            WAYS[way](self.model_runner.model)
        return way

    def tests_send_part(self: Any, names: list[str], way: str, is_last: bool) -> None:
        tensors = TENSORS["checkpoint"]
        self.model_runner.model.load_weights([(n, tensors[n]) for n in names])
        WAYS[way](self.model_runner.model)


def load(model: Any) -> None:
    model.load_weights(list(TENSORS["checkpoint"].items()))


def write(model: Any) -> None:
    """Write other numbers into a parameter, and hide the error."""
    param = dict(model.named_parameters())[NORM]
    attempt(lambda: param.data.copy_(torch.full_like(param.data, 3)))


def attempt(act: Callable[[], object]) -> None:
    held = HELD[0]
    try:
        with torch.no_grad():
            act()
    except Exception as error:
        held.errors.append(str(error))
    else:
        held.num_written += 1


def start(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    HELD[0].threads.append(thread)
    return thread


def loads_in_a_thread(model: Any) -> None:
    start(lambda: load(model)).join()


def writes_in_a_thread(model: Any) -> None:
    load(model)
    start(lambda: write(model)).join()


def writes_in_a_pool(model: Any) -> None:
    load(model)
    with ThreadPoolExecutor() as pool:
        pool.submit(write, model).result()


POOL = ThreadPoolExecutor(1)
"""Kept from one call to the next, with its thread."""


def loads_in_a_kept_pool(model: Any) -> None:
    POOL.submit(load, model).result()


def writes_in_a_kept_pool(model: Any) -> None:
    load(model)
    POOL.submit(write, model).result()


def writes_in_a_thread_of_a_thread(model: Any) -> None:
    load(model)
    start(lambda: start(lambda: write(model)).join()).join()


def loads_in_two_threads(model: Any) -> None:
    def tensors() -> Any:
        for pair in TENSORS["checkpoint"].items():
            if pair[0] == NORM:
                start(lambda: attempt(lambda: load(model))).join()
            yield pair

    model.load_weights(tensors())


def goes_on(model: Any) -> None:
    held = HELD[0]

    def later() -> None:
        held.may_go_on.wait(30)
        write(model)
        attempt(lambda: load(model))
        attempt(lambda: model.model.load_weights([("norm.weight", torch.ones(128))]))
        start(lambda: write(model)).join()

    load(model)
    start(later)


def writes_for_long(model: Any) -> None:
    """As a method that its trainer has left, whose thread still receives."""
    held = HELD[0]
    params = dict(model.named_parameters())

    def write_on() -> None:
        held.has_begun.set()
        while not held.may_end.wait(0.001):
            for param in params.values():
                attempt(lambda param=param: param.data.zero_())

    start(write_on)
    held.may_return.wait(30)


def writes_slowly(model: Any) -> None:
    """Write each parameter, and wait after the first one."""
    held = HELD[0]
    for param in dict(model.named_parameters()).values():
        param.data.zero_()
        held.num_written += 1
        held.has_begun.set()
        held.may_return.wait(30)


def stops_in_its_iterator(model: Any) -> None:
    """Return while a thread loads, whose next tensor does not come."""
    held = HELD[0]

    def tensors() -> Any:
        for number, pair in enumerate(TENSORS["checkpoint"].items()):
            if number == 5:
                held.has_begun.set()
                held.may_go_on.wait(60)
            yield pair

    start(lambda: attempt(lambda: model.load_weights(tensors())))
    assert held.has_begun.wait(30)


def leaves_its_loaders(model: Any) -> None:
    first, *rest = TENSORS["checkpoint"].items()
    model.load_weights([first])  # from here on the loaders of parameters are known
    param = dict(model.named_parameters())[NORM]
    load, load_one = model.load_weights, param.weight_loader
    tensor = torch.full_like(TENSORS["checkpoint"][NORM], 3)
    HELD[0].kept["load_weights"] = lambda: load([(NORM, tensor)])
    HELD[0].kept["weight_loader"] = lambda: load_one(param, tensor)
    model.load_weights(rest)


WAYS: dict[str, Callable[[Any], None]] = {
    "stops in its iterator": stops_in_its_iterator,
    "leaves its loaders": leaves_its_loaders,
    "writes slowly": writes_slowly,
    "nothing more": lambda model: None,
    "loads in a thread": loads_in_a_thread,
    "writes in a thread": writes_in_a_thread,
    "writes in a pool": writes_in_a_pool,
    "loads in a kept pool": loads_in_a_kept_pool,
    "writes in a kept pool": writes_in_a_kept_pool,
    "writes in a thread of a thread": writes_in_a_thread_of_a_thread,
    "loads in two threads": loads_in_two_threads,
    "goes on": goes_on,
    "writes for long": writes_for_long,
    "writes later": lambda model: (
        start(lambda: (HELD[0].may_go_on.wait(30), write(model))) and None
    ),
}

ROWS = [
    KnownCall(
        framework="threaded",
        method="tests_send",
        parameters=("way",),
        role=Role.VERSION,
        label=lambda arguments: str(arguments["way"]),
    ),
    KnownCall(
        framework="threaded parts",
        method="tests_send_part",
        parameters=("names", "way", "is_last"),
        role=Role.PART,
        is_last=lambda arguments: bool(arguments.get("is_last")),
    ),
]
