"""A place in a group that a trainer opened with torch alone: in step, or left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.transports.peers import (
    BUCKET_BYTES,
    CPU,
    HOST,
    PATIENT,
    Recorder,
    host,
)
from tests.support.waiting import until
from vllm.inflight.errors import Cancelled, TransferFault
from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Group, Terms
from vllm.inflight.transport.torch_groups import receiver_engine
from vllm.inflight.transport.torch_groups.membership import Membership
from vllm.inflight.transport.torch_groups.receiver_engine import GroupsEngine
from vllm.inflight.transport.waiting import in_background

NAME = "trainers"


@pytest.fixture
def ends() -> Iterator[tuple[Group, Group]]:
    """A trainer's end of a group over gloo, and a worker's."""
    meeting = host()
    opening = in_background(lambda: open_group(meeting, CPU, PATIENT))
    terms = Terms(wire="gloo", world_size=2, bucket_bytes=BUCKET_BYTES)
    joined = Rendezvous.join(terms, HOST, meeting.port, 1, PATIENT)
    worker = open_group(joined, CPU, PATIENT)
    trainer = opening.result(timeout=60)
    yield trainer, worker
    worker.close()
    trainer.close()


@pytest.fixture
def opening() -> Future[Group]:
    return Future()


@pytest.fixture
def engine(opening: Future[Group]) -> Any:
    """A worker whose group is opening."""
    config = SimpleNamespace(parallel_config=None, model_config=None)
    made = GroupsEngine(None, config, CPU, Recorder())
    left = threading.Event()
    since = time.monotonic()
    made.joined[NAME] = Membership(NAME, since, opening, left, 20.0, Buffers(0, 0, CPU))
    return made


def receive(
    engine: Any, announcement: str, names: str = "a", *, flattened: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors of three numbers each."""
    told: dict[str, Any] = {"names": list(names), "flattened": flattened}
    told |= {"dtype_names": ["float32"] * len(names), "shapes": [[3]] * len(names)}
    told |= {"group_name": NAME, "announcement": announcement}
    engine.receive_weights(engine.parse_update_info(told))
    return engine.model.loaded


def broadcast(trainer: Group, value: float, times: int = 1) -> Future[float]:
    """Sent, once it has been received."""
    buffer = torch.full((3 * times,), float(value)).view(torch.uint8)
    sending = trainer.broadcast([buffer], PATIENT)
    return in_background(lambda: PATIENT.until(sending, "a broadcast"))


def test_an_update_cancelled_while_its_group_opens_ends_the_group(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group]
) -> None:
    engine.cancelled = lambda: True
    with pytest.raises(Cancelled):
        receive(engine, "first")
    engine.cancelled = lambda: False
    opening.set_result(ends[1])
    with pytest.raises(TransferFault, match="'trainers' has ended: stopped receiving"):
        receive(engine, "second")
    assert ends[1].ended is not None


def test_a_group_that_opens_after_it_was_left_is_closed(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group]
) -> None:
    assert engine.leave(NAME)
    assert not engine.leave(NAME)
    opening.set_result(ends[1])
    assert ends[1].ended is not None


def test_leaving_a_group_that_could_not_be_opened_succeeds(
    engine: Any, opening: Future[Group]
) -> None:
    opening.set_exception(TransferFault("nobody came"))
    assert engine.leave(NAME)


def test_a_rejected_announcement_ends_a_group_that_has_not_received_it(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group]
) -> None:
    opening.set_result(ends[1])
    broadcast(ends[0], 1.0)
    assert receive(engine, "first")["a"].tolist() == [1.0] * 3
    engine.miss(NAME, "first", 0.0)  # refused by the model, or by another rank
    broadcast(ends[0], 2.0)
    assert receive(engine, "second")["a"].tolist() == [2.0] * 3
    engine.miss("another", "third", 0.0)
    engine.miss(NAME, "third", 0.0)
    with pytest.raises(TransferFault, match="for an announcement that was refused"):
        receive(engine, "fourth")
    until(lambda: ends[1].ended is not None)


def test_a_group_is_not_ended_by_rejected_announcements_of_its_predecessor(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group]
) -> None:
    opening.set_result(ends[1])
    long_ago = time.monotonic() - engine.joined[NAME].since + 60
    engine.miss(NAME, "of the one before", long_ago)
    receiving = in_background(lambda: receive(engine, "first"))
    until(lambda: engine.joined[NAME]._is_receiving)
    engine.miss(NAME, "of the one before", long_ago)
    broadcast(ends[0], 1.0)
    assert receiving.result(timeout=60)["a"].tolist() == [1.0] * 3
    broadcast(ends[0], 2.0)
    assert receive(engine, "second")["a"].tolist() == [2.0] * 3


def test_an_announcement_during_a_join_is_of_the_new_group(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(*_: Any) -> Any:
        engine.miss(NAME, "refused meanwhile", 0.0)

    monkeypatch.setattr(receiver_engine.TorchRendezvous, "join", join)
    monkeypatch.setattr(receiver_engine, "join_torch_group", lambda *_: None)
    engine.parallel_config = SimpleNamespace(
        data_parallel_index=0, world_size=1, rank=0
    )
    told = {"init_method": "tcp://a:1", "world_size": 2, "backend": "gloo"}
    engine.init_transfer_engine(engine.parse_init_info(told | {"group_name": NAME}))
    assert engine.joined[NAME].ended is not None


def test_the_error_of_a_group_that_has_ended_names_it_and_how_to_join_anew(
    engine: Any,
) -> None:
    engine.miss(NAME, "first", 0.0)
    with pytest.raises(TransferFault) as raised:
        receive(engine, "second")
    for words in ("'trainers'", "let the trainer open", "/init_weights_update_group"):
        assert words in raised.value.message
    assert "init_weight_transfer_engine" not in raised.value.message


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_group_that_has_ended_keeps_no_buffers(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group], is_refused: bool
) -> None:
    opening.set_result(ends[1])
    broadcast(ends[0], 1.0)
    receive(engine, "first")
    slots = engine.joined[NAME].slots
    assert slots.num_bytes
    if is_refused:
        engine.miss(NAME, "second", 0.0)
        until(lambda: not slots.num_bytes)
        return
    engine.cancelled = lambda: True
    with pytest.raises(Cancelled):
        receive(engine, "second")
    assert (slots.count, slots.num_bytes) == (0, 0)


def test_a_receive_under_way_ends_before_its_group(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group]
) -> None:
    receiving = in_background(lambda: receive(engine, "first"))
    until(lambda: engine.joined[NAME]._is_receiving)
    engine.miss(NAME, "second", 0.0)
    opening.set_result(ends[1])
    broadcast(ends[0], 1.0)
    assert receiving.result(timeout=60)["a"].tolist() == [1.0] * 3
    with pytest.raises(TransferFault, match="has ended"):
        receive(engine, "third")


def test_equal_flat_buckets_reuse_their_buffer(
    engine: Any, opening: Future[Group], ends: tuple[Group, Group]
) -> None:
    opening.set_result(ends[1])
    for value, names in enumerate(["abc", "a", "abcdef"]):
        broadcast(ends[0], value, len(names))
        loaded = receive(engine, names, names, flattened=True)
        assert [loaded[name].tolist() for name in names] == [[value] * 3] * len(names)
        assert engine.joined[NAME].slots.count == 1
    for value in range(5):
        broadcast(ends[0], value)
    loaded = receive(engine, "one by one", "abcde")
    assert [loaded[name].tolist() for name in "abcde"] == [[v] * 3 for v in range(5)]
    assert engine.joined[NAME].slots.count == 3
