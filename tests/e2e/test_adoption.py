"""Adoption: a framework's own worker call becomes an update, on a real engine core.

The extension of these tests makes the calls of OpenRLHF, one for each parameter.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import (
    Streams,
    add,
    answers,
    call,
    ended_soon,
    prompt,
    publish,
    stage,
)
from tests.support.engines.mixtures import mixed
from tests.support.engines.script import run_script
from tests.support.frameworks.core import beside_steps, extended_core
from tests.support.frameworks.openrlhf import MEETINGS
from tests.support.trainers.store_group import HOST, StoreTrainer, store_trainer
from tests.support.waiting import until
from vllm.inflight.errors import (
    EngineAsleep,
    InflightError,
    Malformed,
    UpdateBusy,
    WeightsMismatch,
)
from vllm.inflight.worker.staging import thread

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


def labels_across(streams: Streams, old: str, new: str, num: int) -> None:
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
    expected = answers(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    before = answers(core, "before")
    assert before != expected[0]
    add(core, "runs", prompt(3), max_tokens=900)
    streams = Streams(core).step(8)
    beside_steps(streams, lambda: actor.send(tensors_of(folders["new"])))
    num = ended_soon(streams, "runs")
    info = call(core, "info")
    label = f"update-{info['epoch']}"
    assert (info["weight_version"], info["digest"]) == (label, digest)
    assert info["previous"]["weight_version"] == "old"
    labels_across(streams, "old", label, num)
    # The same prompt: what it finds in the prefix cache is of the weights before.
    assert answers(core, "after") == expected[0] and parameters(core) == expected[1]
    call(core, "rollback")
    assert answers(core, "rolled back") == before


def test_a_second_version_follows_the_first(
    actor: Actor, folders: dict[str, Path]
) -> None:
    said = answers(actor.core, "old")
    actor.send(tensors_of(folders["new"]))
    assert answers(actor.core, "new") != said
    actor.send(tensors_of(folders["old"]))
    assert answers(actor.core, "old again") == said


def test_tensors_that_are_lent_for_the_time_of_a_call_become_a_version(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    """OpenRLHF's other call; the memory of a tensor is used again after each call."""
    digest = publish(core, folders["new"], "new")["digest"]
    expected = answers(core, "expected")
    publish(core, folders["old"], "old")
    memory = torch.empty(1 << 17, dtype=torch.uint8)
    tensors = tensors_of(folders["new"])
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        lent = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        handles = {"the GPU": (lent.copy_, (tensor,))}
        args = name, tensor.dtype, tensor.shape, handles, number == len(tensors)
        assert core.collective_rpc("update_weight_cuda_ipc", args=args) == [None]
    assert served(core)[2] == digest and answers(core, "after") == expected


def test_a_call_that_fails_in_the_middle_leaves_what_is_served(
    actor: Actor, folders: dict[str, Path]
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    before, said = served(core), answers(core, "before")
    names = list(tensors)
    actor.send({name: tensors[name] for name in names[:9]}, mark=False)
    assert served(core) == before
    with pytest.raises(InflightError, match=r"update_weight .* mismatch dtype"):
        core.collective_rpc("update_weight", args=(names[9], torch.int8, (1,), False))
    assert served(core) == before
    assert call(core, "status")["active"] is None
    assert answers(core, "after") == said
    # Whoever goes on after the failure has only a part, with the mark of a whole.
    with pytest.raises(WeightsMismatch, match="missing"):
        actor.send({name: tensors[name] for name in names[10:]})
    assert served(core) == before
    assert answers(core, "still") == said
    actor.send(tensors)
    assert answers(core, "at last") != said


# --------------------------------------------------------- versions that are parts
def as_first_version(core: EngineCore) -> None:
    """Let the engine forget what the framework has sent before."""
    core.model_executor.driver_worker.worker.vllm_inflight.stager.sent_by.clear()
    core.vllm_inflight.adoption._failed.clear()


def without(tensors: dict[str, torch.Tensor], *left_out: str) -> dict[str, Any]:
    return {name: of for name, of in tensors.items() if name not in left_out}


def test_a_marked_version_may_leave_out_what_its_framework_never_sends(
    actor: Actor, folders: dict[str, Path], tmp_path: Path
) -> None:
    core, head = actor.core, "lm_head.weight"
    as_first_version(core)
    mixture = mixed(folders["new"], folders["old"], (head,), tmp_path / "mixture")
    digest = publish(core, mixture, "mixture")["digest"]
    expected = answers(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    part = without(tensors_of(folders["new"]), head)
    actor.send(part)
    assert served(core)[2] == digest
    assert (answers(core, "part"), parameters(core)) == expected
    publish(core, folders["old"], "old")
    before = served(core)
    with pytest.raises(WeightsMismatch, match=r"norm\.weight"):
        actor.send(without(part, "model.norm.weight"))  # one less than the last time
    assert served(core) == before
    actor.send(part)
    assert served(core)[2] == digest


def test_the_first_version_with_gaps_is_warned_of_until_a_second_one_agrees(
    actor: Actor, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, str]] = []

    def log(level: int, text: str, *facts: object) -> None:
        told.append((level, text % facts))

    monkeypatch.setattr(thread.logger, "log", log)
    as_first_version(actor.core)
    part = without(tensors_of(folders["new"]), "lm_head.weight")
    for _ in range(2):
        actor.send(part)
    (first, second) = told
    assert (first[0], second[0]) == (logging.WARNING, logging.INFO)
    assert "keep their live values: lm_head.weight" in first[1]
    assert "first version of this engine" in first[1]
    assert "first version of this engine" not in second[1]


@pytest.mark.parametrize("is_late", ["after a call", "in a layer", "after all layers"])
def test_the_rest_of_a_version_is_no_first_version_unless_it_comes_twice(
    actor: Actor, folders: dict[str, Path], is_late: str
) -> None:
    """As an engine gets it that is restarted while a trainer sends."""
    core, tensors = actor.core, tensors_of(folders["new"])
    layers = [n for n in tensors if ".layers." in n]
    missed = {
        "after a call": ["model.embed_tokens.weight"],
        "in a layer": layers[: len(layers) // 2],
        "after all layers": layers,
    }[is_late]
    rest = without(tensors, *missed)
    as_first_version(core)
    core.model_executor.driver_worker.worker.vllm_inflight.stager.doubted.clear()
    before, said = served(core), answers(core, "before")
    with pytest.raises(WeightsMismatch, match=r"layers\.0|embed_tokens"):
        actor.send(rest)
    assert served(core) == before and answers(core, "after") == said
    # Another set is another rest, and no confirmation.
    with pytest.raises(WeightsMismatch, match=r"layers\.0|embed_tokens"):
        actor.send(without(rest, "model.norm.weight"))
    with pytest.raises(WeightsMismatch, match=r"layers\.0|embed_tokens"):
        actor.send(rest)
    assert served(core) == before
    actor.send(rest)
    assert served(core)[1] == before[1] + 1


@pytest.mark.parametrize("tells_names", [True, False])
def test_a_version_after_one_that_was_rejected_at_its_end_is_no_rest_of_it(
    actor: Actor,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    tells_names: bool,
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    if not tells_names:
        adoption = core.vllm_inflight.adoption
        rows = [replace(row, names=lambda _: []) for row in adoption.rows]
        monkeypatch.setattr(adoption, "rows", rows)
    as_first_version(core)
    before = served(core)
    with pytest.raises(WeightsMismatch, match=r"layers\.0"):
        actor.send(without(tensors, *[n for n in tensors if ".layers.0." in n]))
    # Another version, which begins with another tensor and has all layers.
    names = [name for name in tensors if name != "lm_head.weight"]
    actor.send({name: tensors[name] for name in reversed(names)})
    assert served(core)[1] == before[1] + 1


def test_a_last_call_that_is_repeated_after_the_commit_is_rejected_by_name(
    actor: Actor, folders: dict[str, Path]
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    actor.send(tensors)
    before, said = served(core), answers(core, "before")
    name = list(tensors)[-1]
    with pytest.raises(WeightsMismatch, match="missing"):
        actor.send({name: tensors[name]})
    assert served(core) == before and answers(core, "after") == said


@pytest.mark.parametrize("is_other", [False, True])
def test_a_call_that_is_repeated_in_the_middle_is_rejected_by_name(
    actor: Actor, folders: dict[str, Path], is_other: bool
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    before = served(core)
    name = "lm_head.weight"
    again = tensors_of(folders["old"])[name] if is_other else tensors[name]
    actor.send({name: again}, mark=False)
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight"):
        actor.send(tensors)
    assert served(core) == before
    actor.send(tensors)
    assert served(core)[1] == before[1] + 1


# ------------------------------------------------------------------ implied ends
ENDS: dict[str, Callable[[EngineCore], Any]] = {
    "resume": lambda core: call(core, "resume"),
    "wake_up": lambda core: core.wake_up(),
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "a cache reset": lambda core: call(core, "flush"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_without_the_mark_drops_what_has_come(
    actor: Actor, folders: dict[str, Path], end: str
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    before, said = served(core), answers(core, "before")
    names = list(tensors)
    actor.send({name: tensors[name] for name in names[:20]}, mark=False)
    ENDS[end](core)
    last = call(core, "status")["outcomes"][0]
    assert (last["phase"], end in last["error"]["message"]) == ("aborted", True)
    assert served(core) == before and answers(core, "after") == said
    with pytest.raises(WeightsMismatch, match="missing"):
        actor.send({name: tensors[name] for name in names[20:]})
    assert served(core) == before
    actor.send(tensors)
    assert served(core)[1] == before[1] + 1


def test_a_version_that_its_trainer_gives_up_is_aborted_at_its_deadline(
    actor: Actor, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    before = served(core)
    short = replace(core.vllm_inflight.updates._config, update_deadline_s=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(core.vllm_inflight.updates, "_config", short)
        actor.send({"lm_head.weight": tensors["lm_head.weight"]}, mark=False)
        until(lambda: call(core, "status")["active"] is None)
    assert served(core) == before
    actor.send(tensors)
    assert served(core)[1] == before[1] + 1


# -------------------------------------------------------------- what is not adopted
def test_an_update_of_another_client_is_not_mixed_with_a_frameworks(
    actor: Actor, folders: dict[str, Path]
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    stage(core, folders["new"])
    with pytest.raises(UpdateBusy, match="is staged"):
        actor.send({"lm_head.weight": tensors["lm_head.weight"]}, mark=False)
    call(core, "commit", weight_version="theirs")
    actor.trainer.broadcast(tensors["lm_head.weight"])
    assert served(core)[0] == "theirs"


def test_a_chunk_of_another_client_has_no_place_in_a_frameworks_version(
    actor: Actor, folders: dict[str, Path]
) -> None:
    core, tensors = actor.core, tensors_of(folders["new"])
    before = served(core)
    actor.send({"lm_head.weight": tensors["lm_head.weight"]}, mark=False)
    with pytest.raises(Malformed, match="belongs to a worker extension"):
        core.collective_rpc("update_weights", args=({"path": "somewhere"},))
    assert served(core) == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_call_that_writes_into_sleeping_weights_is_rejected(
    actor: Actor, folders: dict[str, Path], level: int
) -> None:
    core = actor.core
    core.vllm_config.model_config.enable_sleep_mode = True
    core.sleep(level)
    try:
        args = "lm_head.weight", torch.bfloat16, (1,), False
        with pytest.raises(EngineAsleep, match="update_weight of OpenRLHF"):
            core.collective_rpc("update_weight", args=args)
    finally:
        core.wake_up()
        publish(core, folders["old"], "old")
        core.vllm_config.model_config.enable_sleep_mode = False


@pytest.mark.parametrize(
    "arguments",
    [
        {"args": ("a", "b", "c", True, "one too many")},
        {"kwargs": {"name": "a", "unknown": 1}},
        {"args": ("a",), "kwargs": {"name": "a"}},
    ],
)
def test_a_call_of_another_shape_is_the_extensions_own(
    actor: Actor, arguments: dict[str, Any]
) -> None:
    before = call(actor.core, "status")["outcomes"]
    with pytest.raises(TypeError, match="update_weight"):
        actor.core.collective_rpc("update_weight", **arguments)
    assert call(actor.core, "status")["outcomes"] == before


# ------------------------------------------------- two ranks in processes of their own
def test_two_ranks_commit_together_what_their_extension_has_received(
    folders: dict[str, Path],
) -> None:
    check_two_ranks(folders)


def check_two_ranks(folders: dict[str, Path]) -> None:
    seen = run_script("two_ranks", *folders.values(), room="tests.support.frameworks")
    assert "update_weight" in seen["error"] and "mismatch dtype" in seen["error"]
    assert seen["meetings"].keys() == MEETINGS.keys()
    for way, error in seen["meetings"].items():
        told = f"calls the collective {MEETINGS[way][0]} of a group of ranks that"
        assert told in str(error), way
    assert "missing" in seen["error of the rest"]
    assert seen["after the error"] == seen["before"] != seen["expected"]
    assert seen["replies"] == [None, None]
    assert seen["is digest"] and seen["label"] == "update-1"
    assert [label for label, _ in seen["stream"]] == ["default", "update-1"]
    assert seen["after"] == seen["expected"]
