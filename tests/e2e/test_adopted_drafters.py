"""Adopted calls on engines that draft: they replace the model, and not its drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_adopted_by_hand import facts, halves
from tests.e2e.test_adoption import tensors_of
from tests.support.engines.drafted import drafted
from tests.support.frameworks.by_hand import SENT, AReaL, PrimeRLFiles
from tests.support.models.tiny_drafters import drafting, make_drafter
from vllm.inflight.errors import EngineFault

pytestmark = pytest.mark.engine

SHAPE = {"family": "llama"}


class Extension(PrimeRLFiles, AReaL):
    """The calls of two frameworks, and one that asks for the drafter."""

    def receive_weight_update(self: Any, request_json: str) -> None:
        self.model_runner.drafter.model.load_weights([])


def beside(**options: Any) -> dict[str, Any]:
    name = f"{__name__}.{Extension.__name__}"
    return {"dtype": "float32", "worker_extension_cls": name, **options}


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def options(
    request: pytest.FixtureRequest, old: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(request.param) / "drafter"
    drafter = make_drafter(folder, 5, old, request.param)
    return beside(speculative_config=drafting(request.param, drafter))


@pytest.fixture(scope="module")
def said(
    start: Callable[..., Any], options: dict[str, Any], folders: dict[str, Path]
) -> dict[str, Any]:
    """What engines say, and draft, that start on the old and on the new weights."""
    return {name: drafted(start(path, **options)) for name, path in folders.items()}


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Any], options: dict[str, Any], said: Any, old: Path
) -> Any:
    return start(old, **options)


@pytest.fixture
def llm(engine: Any, old: Path) -> Any:
    engine.update_weights_from_disk(str(old), "old")
    return engine


def buckets(llm: Any, folder: Path) -> None:
    """AReaL's calls, which end when every parameter has come."""
    for some in halves(tensors_of(folder)):
        SENT.extend(some.items())
        call = llm.collective_rpc
        call("areal_set_weight_meta", args=(*facts(some), "update"))
        assert call("areal_update_weight_xccl")[0][0]


def of_folder(llm: Any, folder: Path) -> None:
    """prime-rl's call."""
    llm.collective_rpc("update_weights_from_path", args=(str(folder),))


@pytest.mark.parametrize("send", [of_folder, buckets])
def test_a_frameworks_version_replaces_the_model_and_keeps_the_drafter(
    llm: Any, said: dict[str, Any], new: Path, send: Callable[..., None]
) -> None:
    """The drafts are those of a fresh engine with the new model and the old drafter."""
    assert said["old"] != said["new"]
    assert drafted(llm) == said["old"]
    epoch = llm.weight_info()["epoch"]
    send(llm, new)
    info = llm.weight_info()
    name = new.name if send is of_folder else f"update-{epoch + 1}"
    assert (info["weight_version"], info["epoch"]) == (name, epoch + 1)
    assert info["digest"] is not None
    assert drafted(llm) == said["new"]
    llm.rollback_weights()
    assert drafted(llm) == said["old"]


def test_a_method_that_writes_the_drafter_is_rejected_by_name(
    llm: Any, said: dict[str, Any]
) -> None:
    before = llm.weight_info()
    with pytest.raises(EngineFault, match="replaces the model alone, and sees no dra"):
        llm.collective_rpc("receive_weight_update", args=("{}",))
    after = llm.weight_info()
    assert (after["weight_version"], after["epoch"]) == ("old", before["epoch"])
    assert drafted(llm) == said["old"]
