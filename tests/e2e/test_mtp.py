"""MTP layers: a drafter whose tensors are among the model's, replaced with it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_drafters import shares
from tests.e2e.test_pause_features import GREEDY as LONG
from tests.e2e.test_pause_features import lived
from tests.support.engines.drafted import Drafted, drafted
from tests.support.engines.mixtures import declared, part
from tests.support.engines.probe import begin_from_files
from tests.support.engines.sync_client import gloo_trainer
from tests.support.models.checkpoint_source import CheckpointSource
from tests.support.models.tiny_drafters import MTP_KINDS, MtpKind, make_mtp, mtp_options
from vllm.inflight import ops
from vllm.inflight.errors import Conflict, WeightsMismatch

pytestmark = pytest.mark.engine

Labels = tuple[str, str]
"""Of the weights of a model, and of its MTP layers."""


@pytest.fixture(
    scope="module",
    params=[
        ("mimo", False),
        pytest.param(("mimo", True), marks=pytest.mark.slow),
        pytest.param(("glm", False), marks=pytest.mark.slow),
        pytest.param(("deepseek", False), marks=pytest.mark.slow),
        pytest.param(("glm-lite", False), marks=pytest.mark.slow),
        pytest.param(("ernie", False), marks=pytest.mark.slow),
    ],
    ids=["mimo", "mimo-tied", "glm", "deepseek", "glm-lite", "ernie"],
)
def model(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """Its kind, and whether its head is tied to its embedding."""
    given: tuple[str, bool] = request.param
    return given


@pytest.fixture(scope="module")
def kind(model: tuple[str, bool]) -> MtpKind:
    return MTP_KINDS[model[0]]


@pytest.fixture(scope="module")
def options(kind: MtpKind) -> dict[str, Any]:
    return {"dtype": "float32", **mtp_options(kind.family)}


@pytest.fixture(scope="module")
def checkpoints(
    model: tuple[str, bool], kind: MtpKind, tmp_path_factory: pytest.TempPathFactory
) -> dict[Labels, Path]:
    root = tmp_path_factory.mktemp(model[0])
    labels = ("old", "new")
    return {
        pair: make_mtp(
            root / "-".join(pair),
            kind,
            labels.index(pair[0]),
            5 + labels.index(pair[1]),
            tied=model[1],
        )
        for pair in itertools.product(labels, labels)
    }


@pytest.fixture(scope="module")
def said(
    start: Callable[..., Any], options: Any, checkpoints: dict[Labels, Path]
) -> dict[Labels, Drafted]:
    """What engines say that start on them."""
    return {
        labels: drafted(start(folder, **options))
        for labels, folder in checkpoints.items()
    }


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Any],
    options: Any,
    said: dict[Labels, Drafted],
    checkpoints: dict[Labels, Path],
) -> Any:
    return start(
        checkpoints["old", "old"],
        weight_transfer_config=WeightTransferConfig(backend="inflight_gloo"),
        **options,
    )


@pytest.fixture
def old(checkpoints: dict[Labels, Path]) -> str:
    return str(checkpoints["old", "old"])


@pytest.fixture
def new(checkpoints: dict[Labels, Path]) -> str:
    return str(checkpoints["new", "new"])


@pytest.fixture
def llm(engine: Any, old: str) -> Iterator[Any]:
    engine.update_weights_from_disk(old, "old")
    yield engine
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()


@pytest.fixture
def tensors(new: str) -> dict[str, torch.Tensor]:
    return load_file(Path(new) / "model.safetensors")


@pytest.fixture
def parts(new: str, kind: MtpKind, tmp_path: Path) -> dict[str, str]:
    """The new tensors of the model and of its MTP layer, in folders of their own."""
    return {
        "model": part(Path(new), kind.model, tmp_path / "model"),
        "mtp": part(Path(new), [f"{kind.layer}*"], tmp_path / "mtp"),
    }


def test_model_and_mtp_layers_change_together_and_back(
    llm: Any, said: dict[Labels, Drafted], old: str, new: str
) -> None:
    """Drafts too are those of a fresh engine: no layer is of another version."""
    assert len({str(drafts) for _, drafts in said.values()}) == 4
    assert shares(llm) > 0, "the embedding, and the head"
    for _ in range(2):
        llm.update_weights_from_disk(new, "new")
        assert drafted(llm) == said["new", "new"]
        llm.rollback_weights()
        assert drafted(llm) == said["old", "old"]
        llm.update_weights_from_disk(new, "again")
        assert drafted(llm) == said["new", "new"]
        llm.update_weights_from_disk(old, "old")
        assert drafted(llm) == said["old", "old"]


def test_a_subset_is_of_either_or_of_both(
    llm: Any,
    said: dict[Labels, Drafted],
    parts: dict[str, str],
    old: str,
    kind: MtpKind,
) -> None:
    layer = f"{kind.layer}*"
    llm.update_weights_from_disk(parts["mtp"], "mtp", subset=[layer])
    assert drafted(llm) == said["old", "new"]
    llm.rollback_weights()
    assert drafted(llm) == said["old", "old"]
    names = list(declared(Path(old), kind.model))
    llm.update_weights_from_disk(parts["model"], "model", subset=names)
    assert drafted(llm) == said["new", "old"]
    llm.update_weights_from_disk(parts["mtp"], "both", subset=[layer])
    assert drafted(llm) == said["new", "new"]
    llm.rollback_weights()
    assert drafted(llm) == said["new", "old"]
    llm.update_weights_from_disk(old, "all", subset=[*names, layer])
    assert drafted(llm) == said["old", "old"]


def test_requests_live_through_a_commit(llm: Any, new: str) -> None:
    def update() -> None:
        llm.update_weights_from_disk(new, "new")

    for choice in lived(llm, SamplingParams(**LONG), update):
        spans = [(s.version, s.start, s.end) for s in choice.weight_versions]
        (_, _, middle), _ = spans
        assert spans == [("old", 0, middle), ("new", middle, 60)]


def test_tensors_sent_once_update_model_and_mtp_layers(
    llm: Any, said: dict[Labels, Drafted], new: str, kind: MtpKind
) -> None:
    source = CheckpointSource(Path(new))
    trainer = gloo_trainer(llm, source)
    try:
        trainer.send_weights()
        assert drafted(llm) == said["new", "new"]
        llm.rollback_weights()
        assert drafted(llm) == said["old", "old"]
        del source.tensors[kind.layer + kind.joint]
        with pytest.raises(WeightsMismatch, match=f"missing: {kind.layer}{kind.joint}"):
            trainer.send_weights()
        assert drafted(llm) == said["old", "old"]
    finally:
        trainer.shutdown()
        llm.shutdown_weight_transfer_engine()


@pytest.mark.parametrize(
    "end", [None, "", "mlp.", "self_attn.k"], ids=["norm", "all", "mlp", "k"]
)
def test_a_source_without_mtp_tensors_is_rejected_by_the_names_of_these_tensors(
    llm: Any,
    said: dict[Labels, Drafted],
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    kind: MtpKind,
    end: str | None,
) -> None:
    gone = kind.layer + (kind.norms[1] if end is None else kind.block + end)
    kept = {n: tensor for n, tensor in tensors.items() if not n.startswith(gone)}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=f"missing: {kind.layer}") as refused:
        llm.update_weights_from_disk(str(tmp_path), "half")
    copies = {kind.layer + name for name in kind.copies}
    assert set(refused.value.tensors) == tensors.keys() - kept.keys() - copies
    assert drafted(llm) == said["old", "old"]


@pytest.mark.parametrize(
    ("name", "shape"), [("self_attn.q_proj.weight", (3, 3)), ("odd.weight", (4,))]
)
def test_tensors_that_a_layer_cannot_load_are_rejected_by_name(
    llm: Any,
    said: dict[Labels, Drafted],
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    kind: MtpKind,
    name: str,
    shape: tuple[int, ...],
) -> None:
    odd = kind.layer + kind.block + name
    tensors[odd] = torch.ones(shape).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=odd):
        llm.update_weights_from_disk(str(tmp_path), "odd")
    assert drafted(llm) == said["old", "old"]


def test_an_update_of_the_drafter_alone_is_rejected(
    llm: Any, said: dict[Labels, Drafted], new: str
) -> None:
    for path in (new, None):
        with pytest.raises(Conflict, match="MTP layers of the model"):
            llm.update_weights_from_disk(path, "no", draft_path=new)
    with pytest.raises(Conflict, match="MTP layers of the model"):
        llm.start_draft_weight_update()
    begin_from_files(llm)
    with pytest.raises(WeightsMismatch, match=r"unknown: draft\."):
        llm.update_weights({"update_info": {"path": new, "draft": True}})
    assert drafted(llm) == said["old", "old"]


def test_the_digest_of_a_model_with_mtp_layers_is_that_of_its_checkpoint(
    llm: Any,
    new: str,
    parts: dict[str, str],
    tensors: dict[str, torch.Tensor],
    kind: MtpKind,
) -> None:
    digests = ops.digest(list(tensors.values()))
    announced = ops.manifest_digest(
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, digest)
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    )
    assert llm.update_weights_from_disk(new, "new")["digest"] == announced
    llm.rollback_weights()
    first = llm.update_weights_from_disk(parts["mtp"], "mtp", subset=[f"{kind.layer}*"])
    assert first["digest"] not in (None, announced)


def test_a_whole_update_is_all_that_a_restart_reads(
    start: Callable[..., Any],
    options: Any,
    checkpoints: dict[Labels, Path],
    said: dict[Labels, Drafted],
    old: str,
    new: str,
    tmp_path: Path,
) -> None:
    note = {"inflight": {"journal": str(tmp_path / "served.json")}}
    options = options | {"additional_config": note}
    llm = start(Path(old), **options)
    begin_from_files(llm)
    llm.update_weights({"update_info": {"path": str(checkpoints["new", "old"])}})
    llm.finish_weight_update("not from disk")
    llm.update_weights_from_disk(new, "new")
    llm = start(Path(old), **options)
    assert llm.restore_weights()["weight_version"] == "new"
    assert drafted(llm) == said["new", "new"]
