"""Adopted calls that bring buckets: verl, ms-swift and checkpoint-engine.

One buffer is filled again and again, so nothing may keep a tensor of it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import labels_across, served, tensors_of
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import (
    Streams,
    add,
    answers,
    call,
    ended_soon,
    prompt,
    publish,
)
from tests.support.frameworks import buckets
from tests.support.frameworks.core import beside_steps, extended_core
from tests.support.trainers.bucket_sender import (
    Tensors,
    sending,
    with_errors,
    with_marks,
)
from vllm.inflight.errors import InflightError, WeightsMismatch

pytestmark = pytest.mark.engine

ROOM = "tests.support.frameworks.buckets"
IPC = "update_weights_from_ipc"


def verl(core: EngineCore, tensors: Tensors) -> Any:
    with sending(with_marks(tensors)) as address:
        buckets.ADDRESS.append(address)
        return core.collective_rpc(IPC, kwargs={"use_shm": True})


def swift(core: EngineCore, tensors: Tensors) -> Any:
    with sending(with_marks(tensors)) as address:
        told = {"use_shm": True, "zmq_handle": address}
        return core.collective_rpc(IPC, kwargs=told)


def checkpoint_engine(core: EngineCore, tensors: Tensors) -> Any:
    with sending(with_errors(tensors)) as address:
        return core.collective_rpc(IPC, args=({"GPU-0": address},))


SENDS: dict[str, Callable[[EngineCore, Tensors], Any]] = {
    "Verl": verl,
    "Swift": swift,
    "CheckpointEngine": checkpoint_engine,
}
Send = Callable[[Tensors], Any]


@pytest.fixture(scope="module", params=SENDS)
def named(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path], named: str) -> Iterator[EngineCore]:
    with extended_core(folders["old"], f"{ROOM}.{named}") as core:
        yield core


@pytest.fixture
def send(core: EngineCore, named: str) -> Send:
    return lambda tensors: SENDS[named](core, tensors)


def test_buckets_become_one_version_beside_decoding(
    core: EngineCore, send: Send, folders: dict[str, Path]
) -> None:
    digest = publish(core, folders["new"], "new")["digest"]
    expected = answers(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    assert answers(core, "before") != expected[0]
    add(core, "runs", prompt(3), max_tokens=900)
    streams = Streams(core).step(8)
    replies = beside_steps(streams, lambda: send(tensors_of(folders["new"])))
    assert replies == [None]
    num = ended_soon(streams, "runs")
    label, _, committed = served(core)
    assert (label, committed) == (f"update-{call(core, 'info')['epoch']}", digest)
    labels_across(streams, "old", label, num)
    assert answers(core, "after") == expected[0] and parameters(core) == expected[1]


def test_a_version_that_lacks_tensors_is_rejected_by_name(
    core: EngineCore, send: Send, folders: dict[str, Path]
) -> None:
    before, said = served(core), answers(core, "before")
    tensors = tensors_of(folders["new"])
    del tensors["model.norm.weight"]
    with pytest.raises(WeightsMismatch) as raised:
        send(tensors)
    assert raised.value.tensors == ["model.norm.weight"]
    assert served(core) == before and answers(core, "after") == said


def test_a_tensor_that_the_model_does_not_take_is_named(
    core: EngineCore, send: Send, folders: dict[str, Path]
) -> None:
    before = served(core)
    tensors = tensors_of(folders["new"]) | {"model.no.weight": torch.zeros(4)}
    with pytest.raises(InflightError, match=r"model\.no\.weight"):
        send(tensors)
    assert served(core) == before


@pytest.mark.parametrize("named", ["Verl"], indirect=True)
def test_an_adapter_is_no_update_and_gets_a_label_and_kv_of_its_own(
    core: EngineCore,
) -> None:
    """Its KV is not that of the adapter before, which may have had the same name."""
    before, ended = served(core), call(core, "status")["outcomes"]
    adapter = {"peft_config": {"r": 8}, "base_sync_done": True, "use_shm": True}
    assert core.collective_rpc(IPC, kwargs=adapter) == [None]
    epoch = before[1] + 1
    assert served(core) == (f"untracked-{epoch}", epoch, None)
    assert call(core, "status")["outcomes"] == ended
