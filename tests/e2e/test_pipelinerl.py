"""PipelineRL's request, worker calls and method, with a trainer over gloo.

The trainer opens its group with torch. What PipelineRL's own package does is played in
test_frameworks.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.engines.core_door import Door, said
from tests.support.engines.probe import greedy
from tests.support.engines.script import run_script
from tests.support.engines.torch_trainer import HOST, TorchTrainer, facts, training
from tests.support.engines.user_extension import CALLED
from vllm.inflight.errors import Conflict, InflightError

pytestmark = pytest.mark.engine


class ParameterInfo(BaseModel):
    name: str
    shape: list[int]
    dtype: str


class WeightUpdateRequest(BaseModel):
    """As PipelineRL's trainer sends it."""

    kind: str = "weight_update_request"
    version: int
    parameters_info: list[ParameterInfo]
    timestamp: float = 1.0


def request(folder: Path, version: int) -> WeightUpdateRequest:
    told = facts(folder)
    infos = [
        ParameterInfo(name=name, shape=shape, dtype=f"torch.{dtype}")
        for name, dtype, shape in zip(*told.values(), strict=True)
    ]
    return WeightUpdateRequest(version=version, parameters_info=infos)


@pytest.fixture
def trainer() -> Iterator[TorchTrainer]:
    with training("actor") as running:
        yield running


def joining(trainer: TorchTrainer) -> tuple[Any, ...]:
    """Arguments of the worker call."""
    return (0, 1, f"tcp://{HOST}:{trainer.port}", 2)


# ------------------------------------------------------------ a core of its own
def test_a_request_over_http_is_received_and_served(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    names = ("actor_idx", "actor_ngpus", "init_method", "world_size")
    group = dict(zip(names, joining(trainer), strict=True))
    assert door.post("/init_actor_update_group", **group) == {"status": "ok"}
    asked = request(folders["new"], 7)
    trainer.begin(folders["new"], facts(folders["new"])["names"])
    reply = door.post("/receive_weight_update", **asked.model_dump())
    assert trainer.heard() == "joined" and trainer.heard() == "sent"
    assert (reply["status"], reply["weight_version"]) == ("ok", "7")
    assert said(door.core) == expected


def test_worker_calls_of_a_core_become_the_transaction(
    core: EngineCore, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    core.collective_rpc("init_actor_update_group", args=joining(trainer))
    for version in (1, 2):
        asked = request(folders["new"], version).model_dump_json()
        trainer.begin(folders["new"], facts(folders["new"])["names"])
        assert core.collective_rpc("receive_weight_update", args=(asked,)) == [None]
        assert Door(core).label == str(version)
        assert said(core) == expected
    core.collective_rpc("destroy_actor_update_group")


def test_a_request_that_announces_too_little_changes_nothing(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path]
) -> None:
    before = said(door.core)
    door.core.collective_rpc("init_actor_update_group", args=joining(trainer))
    asked = request(folders["new"], 3).model_dump()
    asked["parameters_info"] = asked["parameters_info"][1:]
    trainer.begin(folders["new"], facts(folders["new"])["names"][1:])
    status, message = door.refused("/receive_weight_update", **asked)
    assert (status, "lm_head.weight" in message) == (422, True)
    assert (said(door.core), door.label) == (before, "old")


@pytest.mark.parametrize("by_http", [True, False])
def test_broadcasts_of_a_rejected_request_are_never_read_as_the_next_ones(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], by_http: bool
) -> None:
    before = said(door.core)
    door.core.collective_rpc("init_actor_update_group", args=joining(trainer))
    names = facts(folders["old"])["names"]

    def refused(version: int) -> str:
        asked = request(folders["new"], version).model_dump()
        if by_http:
            return door.refused("/receive_weight_update", **asked)[1]
        with pytest.raises(InflightError) as raised:
            door.core.collective_rpc("receive_weight_update", args=(asked,))
        return str(raised.value)

    call(door.core, "start", transport="local")
    trainer.begin(folders["old"], names)
    assert "is staging" in refused(1)
    call(door.core, "abort")
    trainer.begin(folders["new"], names)
    assert "group 'actor' has ended" in refused(2)
    assert (said(door.core), door.label) == (before, "old")


@pytest.mark.parametrize("by_http", [True, False])
def test_a_rejected_commit_affects_neither_the_group_nor_the_next_version(
    door: Door,
    trainer: TorchTrainer,
    folders: dict[str, Path],
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
    by_http: bool,
) -> None:
    core = door.core
    core.collective_rpc("init_actor_update_group", args=joining(trainer))
    served = core.vllm_inflight.live_version

    def once(*update: Any) -> None:
        monkeypatch.undo()
        raise Conflict("not now")

    monkeypatch.setattr(served, "advance", once)
    names = facts(folders["new"])["names"]
    asked = request(folders["new"], 1).model_dump()
    trainer.begin(folders["new"], names)
    if by_http:
        assert "not now" in door.refused("/receive_weight_update", **asked)[1]
    else:
        with pytest.raises(InflightError, match="not now"):
            core.collective_rpc("receive_weight_update", args=(asked,))
    assert call(core, "status")["active"] is None
    asked["version"] = 2
    trainer.begin(folders["new"], names)
    core.collective_rpc("receive_weight_update", args=(asked,))
    assert (said(core), door.label) == (expected, "2")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": None}, "version must be a number or a string"),
        ({"parameters_info": None}, "'parameters_info'"),
        ({"parameters_info": [{"name": "a"}]}, "'name', 'shape' and 'dtype'"),
        (
            {"parameters_info": [{"name": "a", "shape": [], "dtype": "x", "shard": 1}]},
            "a: 'shard' is not supported",
        ),
    ],
)
def test_an_invalid_request_is_rejected_by_name(
    door: Door, folders: dict[str, Path], change: dict[str, Any], named: str
) -> None:
    body = request(folders["new"], 1).model_dump() | change
    status, message = door.refused("/receive_weight_update", **body)
    assert (status, named in message) == (400, True), message


# ------------------------------------------------------------- of an engine's own
def test_pause_and_update_of_an_llm_serves_the_broadcast_weights(
    start: Callable[..., Any],
    fresh: list[list[int]],
    trainer: TorchTrainer,
    old: Path,
    new: Path,
) -> None:
    llm = start(old)
    llm.collective_rpc("init_actor_update_group", args=joining(trainer))
    trainer.begin(new, facts(new)["names"])
    reply = llm.pause_and_update(request(new, 10))
    assert reply["weight_version"] == "10"
    assert greedy(llm) == fresh


@pytest.mark.parametrize(
    "more",
    [
        {"worker_extension_cls": "tests.support.engines.user_extension.Extension"},
        pytest.param(
            {"worker_cls": "tests.support.engines.user_worker.Worker"},
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="a CPU's worker"
            ),
        ),
    ],
    ids=["an extension", "a worker"],
)
def test_worker_methods_of_the_users_own_extension_are_called_unchanged(
    start: Callable[..., Any], old: Path, new: Path, more: dict[str, Any]
) -> None:
    llm = start(old, **more)
    CALLED.clear()
    assert llm.collective_rpc("tests_double", args=(21,)) == [42]
    # Whatever the arguments are: PipelineRL's own package has them, too.
    asked = request(new, 9).model_dump_json()
    for method, args in (
        ("init_actor_update_group", ()),
        ("init_actor_update_group", (0, 1, "tcp://127.0.0.1:1", 2)),
        ("receive_weight_update", ("{}",)),
        ("receive_weight_update", (asked,)),
        ("close_communicator", ()),
    ):
        assert llm.collective_rpc(method, args=args) == ["the user's"]
    assert CALLED == ["init", "init", "receive", "receive", "close"]
    nothing = {"active": None, "outcomes": [], "rollback": None, "pause_detail": None}
    assert llm.weight_update_status() == nothing


# -------------------------------------------------------- in PipelineRL's server
def test_pipelinerls_own_server_steps_serve_the_broadcast_weights(
    checkpoint: Callable[..., Path],
) -> None:
    old, new = checkpoint(0), checkpoint(1)
    seen = run_script("pipelinerl_server", old, new)
    assert seen["before"] != seen["expected"]
    assert seen["after receive_weight_update"] == seen["expected"]
    assert seen["after pause_and_update"] == seen["before"]
    assert seen["versions of a stream"] == ["default", "1", "2"]
    assert seen["length of that stream"] == 900
