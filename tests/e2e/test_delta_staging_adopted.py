"""Adopted calls with delta staging: dense tensors come in, and a log goes out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_adopted_by_hand import facts, halves
from tests.e2e.test_adoption import tensors_of
from tests.e2e.test_delta_staging import (  # noqa: F401 (a fixture)
    delta_engine,
    without_packing,
)
from tests.support.engines.probe import greedy
from tests.support.frameworks.by_hand import SENT, AReaL, PrimeRLFiles
from tests.support.frameworks.own import Extension as Own
from vllm.inflight.errors import Conflict, WeightsMismatch

pytestmark = pytest.mark.engine


class Extension(PrimeRLFiles, AReaL):
    """The calls of two frameworks."""

    def receive_weight_update(self: Any, request_json: str) -> None:
        """PipelineRL's call; it writes past the loader after it has loaded."""
        Own.tests_push_and_write(self, request_json, "a part of data", False)


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: list[list[int]], old: Path) -> Any:
    name = f"{__name__}.{Extension.__name__}"
    return delta_engine(start, old, worker_extension_cls=name)


@pytest.fixture
def on_old(llm: Any, old: Path) -> Any:
    llm.update_weights_from_disk(str(old), "old")
    return llm


def of_folder(llm: Any, folder: Path) -> None:
    """prime-rl's call."""
    llm.collective_rpc("update_weights_from_path", args=(str(folder),))


def buckets(llm: Any, folder: Path) -> None:
    """AReaL's calls, which end when every parameter has come."""
    for some in halves(tensors_of(folder)):
        SENT.extend(some.items())
        llm.collective_rpc("areal_set_weight_meta", args=(*facts(some), "update"))
        assert llm.collective_rpc("areal_update_weight_xccl")[0][0]


@pytest.mark.parametrize("send", [of_folder, buckets])
def test_a_frameworks_version_is_that_of_its_files_and_can_be_rolled_back(
    on_old: Any, fresh: list[list[int]], new: Path, send: Callable[..., None]
) -> None:
    llm, before = on_old, greedy(on_old)
    digest = llm.update_weights_from_disk(str(new), "files")["digest"]
    llm.rollback_weights()
    send(llm, new)
    assert llm.weight_info()["digest"] == digest
    assert greedy(llm) == fresh != before
    llm.rollback_weights()
    assert greedy(llm) == before


def test_a_version_that_lacks_a_tensor_changes_nothing(
    on_old: Any, new: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    before, said = on_old.weight_info(), greedy(on_old)
    tensors = tensors_of(new)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight"):
        of_folder(on_old, tmp_path)
    after = on_old.weight_info()
    assert (after["epoch"], after["digest"]) == (before["epoch"], before["digest"])
    assert greedy(on_old) == said


def test_a_write_past_the_loader_is_rejected_and_changes_nothing(
    on_old: Any, new: Path
) -> None:
    """The shadow model has no memory of its own here, so the write would be lost."""
    before, said = on_old.weight_info(), greedy(on_old)
    with pytest.raises(Conflict, match=r"model\.norm\.weight"):
        on_old.collective_rpc("receive_weight_update", args=(str(new),))
    after = on_old.weight_info()
    assert (after["epoch"], after["digest"]) == (before["epoch"], before["digest"])
    assert greedy(on_old) == said
