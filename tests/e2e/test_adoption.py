"""Adoption: a framework's own worker call becomes an update, on a real engine core.

The extension of these tests makes the calls of OpenRLHF, one for each parameter.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_sleep import says
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import Streams, add, call, prompt, publish
from tests.support.frameworks.core import beside_steps, extended_core
from tests.support.trainers.store_group import HOST, StoreTrainer, store_trainer
from vllm.inflight.errors import InflightError, WeightsMismatch

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.frameworks.openrlhf.Extension"


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    with extended_core(folders["old"], EXTENSION) as core:
        yield core


class Actor:
    """OpenRLHF's trainer, and the engine that it updates."""

    def __init__(self, core: EngineCore, trainer: StoreTrainer) -> None:
        self.core, self.trainer = core, trainer
        core.collective_rpc(
            "init_process_group", args=(HOST, trainer.port, 1, 2, "openrlhf")
        )

    def send(self, tensors: dict[str, torch.Tensor], *, mark: bool = True) -> None:
        """One call per tensor, the last of them with `empty_cache`."""
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            self.trainer.broadcast(tensor)
            is_last = mark and number == len(tensors)
            args = name, tensor.dtype, tensor.shape, is_last
            assert self.core.collective_rpc("update_weight", args=args) == [None]


@pytest.fixture
def actor(core: EngineCore) -> Iterator[Actor]:
    with store_trainer() as trainer:
        yield Actor(core, trainer)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def served(core: EngineCore) -> tuple[str, int, str | None]:
    info = call(core, "info")
    return info["weight_version"], info["epoch"], info["digest"]


def labels_across(streams: Streams, old: str, new: str, num: int = 900) -> None:
    """The stream of `runs` has both versions, and went on before the commit."""
    labels = streams.stamps["runs"]
    num_old = labels.count(old)
    assert 8 < num_old < num
    assert labels == [old] * num_old + [new] * (num - num_old)


def test_a_call_per_tensor_becomes_one_version_beside_decoding(
    actor: Actor, folders: dict[str, Path]
) -> None:
    core = actor.core
    digest = publish(core, folders["new"], "new")["digest"]
    expected = says(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    before = says(core, "before")
    assert before != expected[0]
    add(core, "runs", prompt(3), max_tokens=900)
    streams = Streams(core).step(8)
    beside_steps(streams, lambda: actor.send(tensors_of(folders["new"])))
    streams.run(1000)
    info = call(core, "info")
    label = f"update-{info['epoch']}"
    assert (info["weight_version"], info["digest"]) == (label, digest)
    assert info["previous"]["weight_version"] == "old"
    labels_across(streams, "old", label)
    # The same prompt: what it finds in the prefix cache is of the weights before.
    assert says(core, "after") == expected[0] and parameters(core) == expected[1]
    call(core, "rollback")
    assert says(core, "rolled back") == before


def test_a_second_version_follows_the_first(
    actor: Actor, folders: dict[str, Path]
) -> None:
    said = says(actor.core, "old")
    actor.send(tensors_of(folders["new"]))
    assert says(actor.core, "new") != said
    actor.send(tensors_of(folders["old"]))
    assert says(actor.core, "old again") == said


def test_a_call_that_fails_in_the_middle_leaves_what_is_served(
    actor: Actor, folders: dict[str, Path]
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    before, said = served(core), says(core, "before")
    names = list(tensors)
    actor.send({name: tensors[name] for name in names[:9]}, mark=False)
    assert served(core) == before
    with pytest.raises(InflightError, match=r"update_weight .* mismatch dtype"):
        core.collective_rpc("update_weight", args=(names[9], torch.int8, (1,), False))
    assert served(core) == before
    assert call(core, "status")["active"] is None
    assert says(core, "after") == said
    # Whoever goes on after the failure has only a part, with the mark of a whole.
    with pytest.raises(WeightsMismatch, match="missing"):
        actor.send({name: tensors[name] for name in names[10:]})
    assert served(core) == before
    assert says(core, "still") == said
    actor.send(tensors)
    assert says(core, "at last") != said
