"""PipelineRL's group of several actors: each worker receives as the rank that it is.

The trainer is rank 0, and the actors follow one by one, each with all of its workers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.bare_core import call
from tests.support.engines.core_door import Door, said
from tests.support.engines.pipelinerl_actor import asked
from tests.support.engines.script import run_script
from tests.support.engines.torch_trainer import HOST, TorchTrainer, facts, training
from tests.support.serving import Server
from vllm.inflight.engine.compat.pipelinerl import group
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.engine

NAMES = ("actor_idx", "actor_ngpus", "init_method", "world_size")
FLAGS = "--dtype", "float32", "--gpu-memory-utilization", "0.3"
JOIN, RECEIVE = "/init_actor_update_group", "/receive_weight_update"


@pytest.fixture(scope="module")
def backend() -> str:
    """Of the trainer's group. NCCL needs a GPU for each of three members."""
    return "nccl" if torch.cuda.device_count() > 2 else "gloo"


def numbers(trainer: TorchTrainer, actor_idx: int) -> tuple[int, int, str, int]:
    """Of an actor with one GPU, as PipelineRL hands them on."""
    return actor_idx, 1, f"tcp://{HOST}:{trainer.port}", trainer.world_size


def join(door: Door, trainer: TorchTrainer, actor_idx: int) -> None:
    """Join as an actor of one GPU."""
    its = numbers(trainer, actor_idx)
    if torch.cuda.is_available() and trainer.backend == "gloo":
        # The route leaves the choice to the device, which would choose NCCL.
        call(door.core, "join_group", init_info=group(*its) | {"backend": "gloo"})
    else:
        body = dict(zip(NAMES, its, strict=True))
        assert door.post(JOIN, **body) == {"status": "ok"}


def test_the_second_actor_receives_beside_the_first(
    door: Door, folders: dict[str, Path], expected: Any, backend: str
) -> None:
    before = said(door.core)
    with training("actor", 3, backend) as trainer, trainer.beside(1) as first:
        join(door, trainer, 1)
        for version, label in enumerate(("new", "old", "new")):
            folder = folders[label]
            first.send(folder / "model.safetensors")
            trainer.begin(folder, facts(folder)["names"])
            reply = door.post(RECEIVE, **asked(folder, version))
            assert reply["weight_version"] == str(version)
            assert first.recv() == [], "the first actor got other tensors"
            assert said(door.core) == (expected if label == "new" else before)


@pytest.mark.skipif(
    torch.cuda.device_count() in (1, 2), reason="NCCL needs a GPU for each of three"
)
def test_two_engines_are_the_actors_of_one_group(
    door: Door, folders: dict[str, Path], expected: Any, backend: str
) -> None:
    """A server is the first one. Both join, and both receive, at the same time."""
    env = {"CUDA_VISIBLE_DEVICES": "1"} if backend == "nccl" else {}
    with (
        Server(folders["old"], *FLAGS, env=env) as server,
        training("actor", 3, backend) as trainer,
    ):
        body = dict(zip(NAMES, numbers(trainer, 0), strict=True))
        joining = in_background(lambda: server.post(JOIN, body))
        join(door, trainer, 1)
        assert joining.result(timeout=60) == {"status": "ok"}
        trainer.begin(folders["new"], facts(folders["new"])["names"])
        update = asked(folders["new"], 1)
        receiving = in_background(lambda: server.post(RECEIVE, update))
        reply = door.post(RECEIVE, **update)
        assert receiving.result(timeout=60)["digest"] == reply["digest"]
        assert said(door.core) == expected
        (first,) = server.post("/weights_checker")["ranks"]
        (second,) = door.post("/weights_checker")["ranks"]
        assert first["per_gpu_checksum"] == second["per_gpu_checksum"]
        label = server.client.get("/weight_info").json()["weight_version"]
        assert label == door.label == "1"


def test_the_ranks_of_an_actor_with_two_gpus_follow_those_of_the_first(
    old: Path, new: Path
) -> None:
    seen = run_script("pipelinerl_actor", old, new, 1, "gloo")
    assert seen["differing"] == [], "a rank serves other weights than a fresh load"
    assert seen["others"] == [[]] * 6
    assert seen["version 0"] == seen["version 2"] == seen["expected"] != seen["before"]
    assert seen["version 1"] == seen["before"]
    assert seen["label"] == "2"
