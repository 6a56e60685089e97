"""A thread of an adopted method, when the method has returned."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight import upstream
from vllm.inflight.errors import Conflict
from vllm.inflight.patch.worker import _load_straight, _unless_calling
from vllm.inflight.worker.adopted_call import AdoptedCall, running
from vllm.inflight.worker.shadow.flip import Exchange
from vllm.inflight.worker.staging.adopted.door import Door
from vllm.inflight.worker.staging.adopted.guard import Guard, follow_threads

CPU = torch.device("cpu")


class Late:
    """A thread of a method; it acts when the method has returned."""

    def __init__(self, num_layers: int = 1) -> None:
        self.model, self.live = (_model(num_layers) for _ in "12")
        self.door: Door | None = Door(
            lambda _: None, self.model, self.live, clones=False, device=CPU
        )
        self.call = AdoptedCall("it", self.door.note)
        self._acts: list[Callable[[], Any]] = []
        self._results: list[Any] = []
        self._is_due, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work)

    def run(self) -> None:
        follow_threads()
        assert self.door is not None
        with running(self.call), Guard(self.call, self.door):
            self._thread.start()
        self.call.end()

    def does(self, act: Callable[[], Any]) -> Any:
        """What the thread gets for `act`, or its error."""
        self._acts.append(act)
        self._is_due.release()
        assert self._is_done.acquire(timeout=30)
        return self._results.pop()

    def writes(self, param: torch.Tensor) -> str:
        """What the thread is told when it writes into a parameter."""
        error = self.does(lambda: param.data.zero_())
        assert isinstance(error, Conflict)
        return error.message

    def end(self) -> None:
        self._is_due.release()
        self._thread.join(30)

    def _work(self) -> None:
        while self._is_due.acquire(timeout=30) and self._acts:
            try:
                with torch.no_grad():
                    self._results.append(self._acts.pop()())
            except Exception as error:
                self._results.append(error)
            self._is_done.release()


def _model(num_layers: int) -> torch.nn.Module:
    layers = (torch.nn.Linear(2, 2, bias=False) for _ in range(num_layers))
    return torch.nn.Sequential(*layers)


@contextmanager
def made(num_layers: int = 1) -> Iterator[Late]:
    late = Late(num_layers)
    late.run()
    try:
        yield late
    finally:
        late.end()


@pytest.fixture
def late() -> Iterator[Late]:
    with made() as late:
        yield late


def test_it_keeps_nothing_of_its_update_alive(late: Late) -> None:
    """A pool or a monitor that a method has started may wait for ever."""
    update = weakref.ref(late.door)
    late.door = None
    gc.collect()
    assert update() is None
    assert "0.weight of the shadow model" in late.writes(late.model[0].weight)
    assert late.model[0].weight.abs().sum() > 0


def test_it_keeps_no_parameter_alive_after_a_write(late: Late) -> None:
    late.door = None
    late.writes(late.model[0].weight)
    param = weakref.ref(late.model[0].weight)
    late.model[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    gc.collect()
    assert param() is None


@pytest.mark.parametrize("of", ["model", "live"])
def test_it_does_not_write_into_a_parameter_that_has_come_since(
    late: Late, of: str
) -> None:
    layer = getattr(late, of)[0]
    late.writes(layer.weight)
    layer.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert "0.weight of the" in late.writes(layer.weight)
    assert layer.weight.sum() == 4


def test_after_a_flip_it_is_told_the_model_that_has_the_parameter_now(
    late: Late,
) -> None:
    data = late.model[0].weight.data
    assert "0.weight of the shadow model" in late.writes(data)
    Exchange(late.live, late.model)()
    assert "0.weight of the live model" in late.writes(data)


def test_its_own_tensors_cost_it_the_same_whatever_the_number_of_parameters() -> None:
    assert _seconds(2000) < 10 * _seconds(10)


def _seconds(num_layers: int) -> float:
    """Seconds of one operator in place; the shortest of some."""
    own = torch.zeros(4)

    def once() -> float:
        began = time.perf_counter()
        own.add_(1)
        return time.perf_counter() - began

    with made(num_layers) as late:
        return min(float(late.does(once)) for _ in range(50))


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The groups of two ranks that decode."""
    groups = SimpleNamespace(
        world_size=2,
        unique_name="tp:0",
        device_group=SimpleNamespace(group_name="1"),
        cpu_group=SimpleNamespace(group_name="2"),
        device_communicator=None,
        all_reduce=lambda tensor: tensor,
        mq_broadcaster=SimpleNamespace(enqueue=lambda value: None),
    )
    monkeypatch.setattr(upstream, "GROUPS", {"tp": lambda: groups})
    return groups


def test_it_calls_no_collective_of_ranks_that_decode(
    decoding: SimpleNamespace,
) -> None:
    with made() as late:
        reduced = late.does(lambda: torch.ops.vllm.all_reduce(torch.ones(1), "tp:0"))
        queued = late.does(lambda: decoding.mq_broadcaster.enqueue(1))
    for error in (reduced, queued):
        assert isinstance(error, Conflict)
        assert "ranks that decode" in error.message
    decoding.mq_broadcaster.enqueue(1)


class Noted:
    def note(self, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("around", [_load_straight, _unless_calling])
def test_it_reloads_no_layers(around: Callable[..., Any]) -> None:
    """Upstream's reload would give the served layers other memory."""
    reloaded: list[object] = []
    patched, noted = around(lambda model: reloaded.append(model)), Noted()
    call = AdoptedCall("a method", noted.note)
    call.is_over = True
    model = torch.nn.Linear(1, 1)
    with running(call):
        patched(model)
    assert reloaded == []
    patched(model)
    assert reloaded
