"""A trainer that knows torch.distributed alone, over gloo, into a real engine core."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.engines.core_door import Door, said
from tests.support.engines.torch_trainer import TorchTrainer, facts, training
from tests.support.waiting import until
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.engine

RECEIVE = "/update_weights_from_distributed"


def join(door: Door, trainer: TorchTrainer) -> None:
    assert door.post("/init_weights_update_group", **trainer.group)["success"]
    assert trainer.heard() == "joined"


@pytest.fixture
def trainer(door: Door) -> Iterator[TorchTrainer]:
    with training() as running:
        join(door, running)
        yield running
        door.post("/destroy_weights_update_group", group_name=running.name)


def test_weights_that_a_trainer_broadcasts_are_served(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    for label in ("d1", "d2"):
        told = facts(folders["new"])
        trainer.begin(folders["new"], told["names"])
        reply = door.post(RECEIVE, **told, weight_version=label, flush_cache=False)
        assert trainer.heard() == "sent"
        assert (reply["success"], reply["weight_version"]) == (True, label)
        assert said(door.core) == expected


@pytest.mark.parametrize("flattened", [False, True])
def test_buckets_of_a_version_are_served_when_the_last_one_is_there(
    door: Door,
    trainer: TorchTrainer,
    folders: dict[str, Path],
    expected: Any,
    flattened: bool,
) -> None:
    before = said(door.core)
    names = facts(folders["new"])["names"]
    door.post("/pause_generation", mode="retract")
    for part in (names[:9], names[9:20], names[20:]):
        assert door.label == "old"
        trainer.begin(folders["new"], part, flattened=flattened)
        door.post(
            RECEIVE,
            **facts(folders["new"], part),
            weight_version="bucketed",
            load_format="flattened_bucket" if flattened else None,
        )
        assert trainer.heard() == "sent"
    door.post("/continue_generation")
    assert (said(door.core), door.label) == (expected, "bucketed")
    assert before != expected


def test_pipeline_stages_of_a_trainer_may_each_have_a_group(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    names = facts(folders["new"])["names"]
    with training("stage-1") as second:
        join(door, second)
        for running, part in ((trainer, names[:12]), (second, names[12:])):
            running.begin(folders["new"], part)
            told = facts(folders["new"], part)
            door.post(RECEIVE, **told, group_name=running.name)
        assert said(door.core) == expected
        door.post("/destroy_weights_update_group", group_name="stage-1")


def test_a_group_stays_usable_after_the_model_rejects_an_update(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    before = said(door.core)
    told = facts(folders["new"])
    trainer.begin(folders["new"], told["names"])
    wrong = told | {"names": ["no.such.tensor", *told["names"][1:]]}
    status, message = door.refused(RECEIVE, **wrong)
    assert (status, "no.such.tensor" in message) == (422, True)
    assert trainer.heard() == "sent"
    assert said(door.core) == before
    trainer.begin(folders["new"], told["names"])
    door.post(RECEIVE, **told)
    assert said(door.core) == expected


def test_a_trainers_death_leaves_the_live_weights_and_the_next_trainer_joins(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    before = said(door.core)
    told = facts(folders["new"])
    with training() as first:
        join(door, first)
        first.begin(folders["new"], told["names"][:5])
        door.post(RECEIVE, **facts(folders["new"], told["names"][:5]))
        first.process.kill()
        first.process.join()
        rest = facts(folders["new"], told["names"][5:])
        status, message = door.refused(RECEIVE, **rest)
        assert (status, "group has ended" in message) == (500, True), message
        assert "init_weight_transfer_engine" not in message
    assert said(door.core) == before
    with training() as second:
        join(door, second)
        second.begin(folders["new"], told["names"])
        door.post(RECEIVE, **told)
        assert said(door.core) == expected


def test_broadcasts_whose_announcement_was_rejected_are_never_read_as_later_ones(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    before = said(door.core)
    told = facts(folders["old"])
    call(door.core, "start", transport="local")
    trainer.begin(folders["old"], told["names"])
    status, message = door.refused(RECEIVE, **told, weight_version="d1")
    assert (status, f"have left group {trainer.name!r}" in message) == (409, True)
    call(door.core, "abort")
    trainer.begin(folders["new"], told["names"])
    status, message = door.refused(RECEIVE, **told, weight_version="d2")
    assert (status, "has ended" in message) == (500, True), message
    assert "init_weight_transfer_engine" not in message
    assert (said(door.core), door.label) == (before, "old")
    with training() as second:
        join(door, second)
        second.begin(folders["new"], told["names"])
        door.post(RECEIVE, **told)
        assert said(door.core) == expected


def test_a_missed_announcement_of_an_earlier_group_does_not_affect_the_new_group(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path], expected: Any
) -> None:
    missed = {"group_name": trainer.name, "announcement": "of the one before"}
    call(door.core, "miss", **missed, age_s=3600.0)
    told = facts(folders["new"])
    trainer.begin(folders["new"], told["names"])
    door.post(RECEIVE, **told)
    assert said(door.core) == expected


def test_tokens_flow_while_a_version_is_broadcast(
    door: Door, trainer: TorchTrainer, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(1))
    streams = Streams(door.core).step(10)
    told = facts(folders["new"])
    trainer.begin(folders["new"], told["names"])
    door.post(RECEIVE, **told, weight_version="new")
    streams.run()
    assert streams.stamps["r"] == ["old"] * 10 + ["new"] * 30


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "nccl"}, "open the group with 'gloo'"),
        ({"backend": "mpi"}, "backend must be one of gloo, nccl"),
        ({"world_size": 1}, "rank 1 of the group, whose world_size is 1"),
        ({"world_size": "2"}, "world_size must be a whole number"),
        ({"rank_offset": 0}, "rank 0 of the group"),
        ({"master_port": 0}, "init_method must be tcp://host:port"),
        ({"timeout_s": -1}, "timeout_s must be above 0"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_an_invalid_group_is_rejected_by_name(
    door: Door, change: dict[str, Any], named: str
) -> None:
    body = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
    }
    status, message = door.refused("/init_weights_update_group", **(body | change))
    assert (status, named in message) == (400, True), message


def test_a_group_that_was_never_opened_is_rejected(
    door: Door, folders: dict[str, Path]
) -> None:
    status, message = door.refused(RECEIVE, **facts(folders["new"]), group_name="none")
    assert (status, "no group 'none'" in message) == (500, True)
    status, _ = door.refused(
        "/init_weights_update_group",
        **{"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1},
        **{"world_size": 2, "backend": "gloo", "timeout_s": 0.5},
    )
    assert status == 500


def test_no_update_and_no_group_begins_while_a_group_waits_for_its_trainer(
    door: Door, folders: dict[str, Path]
) -> None:
    group = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1}
    group |= {"world_size": 2, "backend": "gloo", "timeout_s": 60}
    before = set(threading.enumerate())
    joining = in_background(lambda: door.refused("/init_weights_update_group", **group))

    def joins() -> bool:
        others = set(threading.enumerate()) - before
        return any(thread.name == "inflight-stage" for thread in others)

    until(joins)
    for path, body in {
        "/update_weights_from_disk": {"model_path": str(folders["new"])},
        "/init_weights_update_group": group,
    }.items():
        status, message = door.refused(path, **body)
        assert (status, "destroy_weights_update_group" in message) == (409, True)
    door.post("/destroy_weights_update_group")
    _, message = joining.result(timeout=60)
    assert "shut down" in message or "cancelled" in message
    door.post("/update_weights_from_disk", model_path=str(folders["new"]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"names": []}, "'names' is empty"),
        ({"dtypes": ["bfloat17"]}, "there is no dtype 'bfloat17'"),
        ({"shapes": []}, "'shapes' has 0 entries"),
        ({"load_format": "delta"}, "load_format 'delta'"),
        ({"dtypes": None}, "the body needs the field 'dtypes'"),
    ],
)
def test_an_invalid_announcement_is_rejected_by_name(
    door: Door, change: dict[str, Any], named: str
) -> None:
    body = {"names": ["a"], "dtypes": ["torch.float32"], "shapes": [[2]]} | change
    status, message = door.refused(RECEIVE, **body)
    assert (status, named in message) == (400, True), message
