"""Adopted calls on engines whose model drafts with MTP layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.test_adopted_drafters import beside, buckets, of_folder
from tests.support.engines.drafted import Drafted, drafted
from tests.support.engines.mixtures import part
from tests.support.engines.unpacked import unpacked
from tests.support.models.tiny_drafters import (
    MTP,
    MTP_KINDS,
    MtpKind,
    make_mtp,
    mtp_options,
)
from vllm.inflight.engine.compat import adoption
from vllm.inflight.errors import WeightsMismatch

pytestmark = pytest.mark.engine

QUICK = ("mimo", "glm")
"""Layers of their own, and one behind the last with copies of embedding and head."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in MTP_KINDS
    ],
)
def kind(request: pytest.FixtureRequest) -> MtpKind:
    return MTP_KINDS[request.param]


@pytest.fixture(scope="module")
def options(kind: MtpKind) -> dict[str, Any]:
    return beside(**mtp_options(kind.family))


@pytest.fixture(scope="module")
def checkpoints(
    kind: MtpKind, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The old weights, the new ones, and new ones with the old MTP layers."""
    root, seeds = tmp_path_factory.mktemp("mtp"), {"old": (0, 5), "new": (1, 6)}
    seeds["model"] = (1, 5)
    return {name: make_mtp(root / name, kind, *of) for name, of in seeds.items()}


@pytest.fixture(scope="module")
def said(
    start: Callable[..., Any], options: dict[str, Any], checkpoints: dict[str, Path]
) -> dict[str, Drafted]:
    """What engines say, and draft, that start on them."""
    return {n: drafted(start(path, **options)) for n, path in checkpoints.items()}


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Any],
    options: dict[str, Any],
    said: Any,
    checkpoints: dict[str, Path],
) -> Any:
    return start(checkpoints["old"], **options)


@pytest.fixture
def llm(engine: Any, checkpoints: dict[str, Path]) -> Any:
    engine.update_weights_from_disk(str(checkpoints["old"]), "old")
    return engine


def version_of(llm: Any) -> tuple[str, int, str]:
    info = llm.weight_info()
    return info["weight_version"], info["epoch"], info["digest"]


def test_a_frameworks_version_replaces_the_model_and_its_mtp_layers(
    llm: Any, said: dict[str, Drafted], checkpoints: dict[str, Path]
) -> None:
    assert len({str(drafts) for _, drafts in said.values()}) == 3
    digest = llm.update_weights_from_disk(str(checkpoints["new"]), "new")["digest"]
    llm.rollback_weights()
    of_folder(llm, checkpoints["new"])
    info = llm.weight_info()
    assert (info["weight_version"], info["digest"]) == ("new", digest)
    assert drafted(llm) == said["new"]
    llm.rollback_weights()
    assert drafted(llm) == said["old"]


def test_mtp_layers_keep_their_weights_if_a_framework_sends_none_of_them(
    llm: Any,
    said: dict[str, Drafted],
    checkpoints: dict[str, Path],
    kind: MtpKind,
    tmp_path: Path,
) -> None:
    """The digest is of all tensors that were sent, now or before."""
    own = part(checkpoints["new"], kind.model, tmp_path / "model alone")
    whole = llm.update_weights_from_disk(str(checkpoints["model"]), "whole")
    llm.rollback_weights()
    of_folder(llm, Path(own))
    info = llm.weight_info()
    assert info["weight_version"] == "model alone"
    # An MTP layer's own copies of embedding and head are those that came last.
    assert (info["digest"] == whole["digest"]) is not bool(kind.copies)
    assert drafted(llm) == said["model"]
    llm.rollback_weights()
    assert drafted(llm) == said["old"]


def test_a_version_with_some_tensors_of_an_mtp_layer_is_rejected(
    llm: Any,
    said: dict[str, Drafted],
    checkpoints: dict[str, Path],
    kind: MtpKind,
    tmp_path: Path,
) -> None:
    tensors = load_file(checkpoints["new"] / "model.safetensors")
    del tensors[kind.layer + kind.joint]
    save_file(tensors, tmp_path / "model.safetensors")
    before = version_of(llm)
    with pytest.raises(WeightsMismatch, match=f"missing: {kind.layer}{kind.joint}"):
        of_folder(llm, tmp_path)
    assert version_of(llm) == before
    assert drafted(llm) == said["old"]


def test_a_version_without_a_tensor_of_the_model_is_rejected(
    llm: Any,
    said: dict[str, Drafted],
    checkpoints: dict[str, Path],
    kind: MtpKind,
    tmp_path: Path,
) -> None:
    own = Path(part(checkpoints["new"], kind.model, tmp_path / "model alone"))
    tensors = load_file(own / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"missing: .*model\.norm\.weight"):
        of_folder(llm, own)
    assert drafted(llm) == said["old"]


def test_calls_that_end_when_all_has_come_are_not_adopted(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells whether tensors of MTP layers still come."""
    old, new = (make_mtp(tmp_path / f"{n}", MTP_KINDS["mimo"], n, 5) for n in (0, 1))
    options = beside(speculative_config=MTP)
    with unpacked():
        fresh = drafted(start(new, **options))
        llm = start(old, **options)
    told: list[str] = []

    def warn(text: str, *facts: object) -> None:
        told.append(text % facts)

    monkeypatch.setattr(adoption.logger, "warning", warn)
    buckets(llm, new)
    assert ["drafts with MTP layers" in text for text in told] == [True]
    info = llm.weight_info()
    assert info["weight_version"].startswith("untracked-")
    assert (info["digest"], info["previous"]) == (None, None)
    assert drafted(llm)[0] == fresh[0]
