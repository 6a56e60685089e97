"""NCCL's variables that upstream has set, while groups are opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from vllm.inflight import upstream
from vllm.inflight.transport.collective.environment import unpinned
from vllm.inflight.transport.collective.nccl_api import UniqueId
from vllm.inflight.transport.liveness import Liveness
from vllm.inflight.transport.torch_groups import rendezvous
from vllm.inflight.transport.torch_groups.receiver_engine import GroupsEngine
from vllm.inflight.transport.torch_groups.rendezvous import (
    FIRST_COMMUNICATOR,
    TorchRendezvous,
    _PlainNccl,
)
from vllm.inflight.transport.waiting import WaitLimit, in_background

NAME = bytes(range(128))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with the environment, in order."""
    seen: list[str] = []

    @contextmanager
    def recorded() -> Iterator[None]:
        seen.append("taken away")
        yield
        seen.append("brought back")

    monkeypatch.setattr(upstream, "unpinned_nccl_env", recorded, raising=False)
    return seen


def test_a_torch_group_waits_for_its_trainer_with_upstreams_and_opens_without(
    seen: list[str],
) -> None:
    class Told(_PlainNccl):
        def __init__(self, store: Any) -> None:
            self._rendezvous = SimpleNamespace(store=store, liveness=Liveness())

        def _agree(self, watch: WaitLimit) -> bytes:
            name = super()._agree(watch)
            seen.append("agreed")
            return name

        def _open(self, unique: UniqueId, *_: Any) -> None:
            assert bytes(unique) == NAME
            seen.append("opened")

    store = HashStore()
    store.set(FIRST_COMMUNICATOR, NAME)
    Told(store)._connect(WaitLimit(5.0), None)
    assert seen == ["agreed", "taken away", "opened", "brought back"]


def test_a_torch_group_waits_long_for_its_trainer_and_not_for_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, short_s, opened = HashStore(), 0.05, []

    class Told(_PlainNccl):
        def __init__(self, meeting: Any, _: Any, watch: WaitLimit, **__: Any) -> None:
            self._rendezvous = meeting
            self._connect(watch, None)

        def _open(self, unique: UniqueId, watch: WaitLimit, _: Any) -> None:
            assert bytes(unique) == NAME
            opened.append(watch.timeout_s)

    terms = SimpleNamespace(wire="nccl")
    meeting = SimpleNamespace(store=store, terms=terms, liveness=Liveness())
    monkeypatch.setattr(rendezvous, "_PlainNccl", Told)
    monkeypatch.setattr(TorchRendezvous, "join", lambda *_: meeting)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    worker = GroupsEngine(None, config, torch.device("meta"), None)
    told = {"init_method": "tcp://a:1", "world_size": 2, "backend": "nccl"}
    told |= {"group_name": "g", "timeout_s": short_s}
    worker.init_transfer_engine(worker.parse_init_info(told))
    time.sleep(4 * short_s)
    store.set(FIRST_COMMUNICATOR, NAME)
    assert worker.joined["g"].opening.result(timeout=60)
    assert opened == [short_s]


def test_the_last_of_several_open_groups_restores_the_environment(
    seen: list[str],
) -> None:
    has_come, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with unpinned():
            has_come.set()
            assert may_leave.wait(30)

    with unpinned():
        others = in_background(other)
        assert has_come.wait(30)
    assert seen == ["taken away"]
    may_leave.set()
    others.result(timeout=30)
    assert seen == ["taken away", "brought back"]
