"""Adopted calls of ms-swift's rollout server: parts of a version, and its end.

The call `process_weights_after_loading` brings no tensor and ends a version.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import served, tensors_of
from tests.support.engines.bare_core import answers, call, publish
from tests.support.frameworks.core import extended_core
from tests.support.trainers.bucket_sender import Tensors
from tests.support.trainers.store_group import HOST, StoreTrainer, store_trainer
from vllm.inflight.errors import InflightError, WeightsMismatch

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.frameworks.buckets.Swift"
END = "process_weights_after_loading"


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    with extended_core(folders["old"], EXTENSION) as core:
        yield core


@pytest.fixture
def group(core: EngineCore) -> Iterator[StoreTrainer]:
    with store_trainer() as trainer:
        core.collective_rpc("init_communicator", args=(HOST, trainer.port, 2))
        yield trainer


def one_by_one(core: EngineCore, group: StoreTrainer, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        group.broadcast(tensor)
        args = name, str(tensor.dtype), list(tensor.shape)
        assert core.collective_rpc("update_named_param", args=args) == [None]


def flattened(core: EngineCore, group: StoreTrainer, tensors: Tensors) -> None:
    pairs = list(tensors.items())
    for some in (pairs[:9], pairs[9:]):
        start, told = 0, []
        for name, tensor in some:
            end = start + tensor.nbytes
            facts = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            told.append({"name": name, "start_idx": start, "end_idx": end} | facts)
            start = end
        raw = [t.contiguous().view(-1).view(torch.uint8) for _, t in some]
        group.broadcast(torch.cat(raw))
        core.collective_rpc("update_flattened_params", args=(told,))


Way = Callable[[EngineCore, StoreTrainer, Tensors], None]


@pytest.mark.parametrize("way", [one_by_one, flattened])
def test_processing_the_weights_ends_the_version(
    core: EngineCore, group: StoreTrainer, folders: dict[str, Path], way: Way
) -> None:
    digest = publish(core, folders["new"], "new")["digest"]
    expected = answers(core, "expected")
    publish(core, folders["old"], "old")
    way(core, group, tensors_of(folders["new"]))
    assert served(core)[0] == "old"
    assert core.collective_rpc(END) == [None]
    assert served(core)[2] == digest
    assert answers(core, "after") == expected


def test_the_end_of_a_version_that_lacks_tensors_is_rejected_by_name(
    core: EngineCore, group: StoreTrainer, folders: dict[str, Path]
) -> None:
    tensors = tensors_of(folders["new"])
    one_by_one(core, group, tensors)
    core.collective_rpc(END)
    publish(core, folders["old"], "old")
    before, said = served(core), answers(core, "before")
    del tensors["model.norm.weight"]
    one_by_one(core, group, tensors)
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight"):
        core.collective_rpc(END)
    assert served(core) == before and answers(core, "after") == said


def test_the_end_of_a_version_that_has_failed_says_so_again(
    core: EngineCore, group: StoreTrainer, folders: dict[str, Path]
) -> None:
    before, said = served(core), answers(core, "before")
    tensors = tensors_of(folders["new"])
    one_by_one(core, group, {"lm_head.weight": tensors["lm_head.weight"]})
    group.broadcast(torch.zeros(3))
    args = "model.norm.weight", "torch.float32", [4]
    with pytest.raises(InflightError, match=r"update_named_param .* AssertionError"):
        core.collective_rpc("update_named_param", args=args)
    # On the live weights, it would process what has been processed.
    with pytest.raises(InflightError, match=r"update_named_param .* AssertionError"):
        core.collective_rpc(END)
    assert served(core) == before and answers(core, "after") == said


def test_an_adapter_is_no_version(core: EngineCore) -> None:
    before = call(core, "info")
    adapter = {"peft_config": {"r": 8}, "base_sync_done": True}
    with pytest.raises(AssertionError):  # its own, since no address is given
        core.collective_rpc("update_weights_from_ipc", kwargs=adapter)
    assert call(core, "info") == before
