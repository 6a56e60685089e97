"""Tied heads that a checkpoint has all the same: vLLM looks whether they differ."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.deltas import delta_between, stepped
from tests.support.engines.mixtures import mixed, part
from tests.support.engines.probe import greedy
from tests.support.engines.unpacked import unpacked
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MLP = ["model.layers.1.mlp.*"]


def with_head(folder: Path, tied: Path, *, is_copy: bool) -> Path:
    """The tied checkpoint with a head: the embedding's copy, or one of its own."""
    folder.mkdir()
    for file in tied.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tied / "model.safetensors")
    head = tensors[EMBEDDING].clone()
    tensors[HEAD] = head if is_copy else torch.roll(head, 1, dims=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def tied(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    """Two versions without a head."""
    return checkpoint(0, tied=True), checkpoint(1, tied=True)


@pytest.mark.parametrize("is_copy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_checkpoints_with_a_tied_head_equal_a_fresh_engine(
    start: Callable[..., Any],
    tied: tuple[Path, Path],
    tmp_path: Path,
    is_copy: bool,
) -> None:
    old, new = (
        with_head(tmp_path / name, folder, is_copy=is_copy)
        for name, folder in zip(("old", "new"), tied, strict=True)
    )
    fresh = greedy(start(new))
    fresh_mixture = greedy(start(mixed(old, new, MLP, tmp_path / "mixed")))
    llm = start(old)
    before = greedy(llm)
    assert before not in (fresh, fresh_mixture)
    for _ in range(2):
        llm.update_weights_from_disk(part(new, MLP, tmp_path / "part"), subset=MLP)
        assert greedy(llm) == fresh_mixture
        llm.rollback_weights()
        assert greedy(llm) == before
        llm.update_weights_from_disk(str(new), "new")
        assert greedy(llm) == fresh
        llm.rollback_weights()
        assert greedy(llm) == before


def test_a_head_that_was_a_copy_of_the_embedding_may_be_left_out(
    start: Callable[..., Any], tied: tuple[Path, Path], tmp_path: Path
) -> None:
    fresh = greedy(start(tied[1]))
    llm = start(with_head(tmp_path / "old", tied[0], is_copy=True))
    llm.update_weights_from_disk(str(tied[1]), "new")
    assert greedy(llm) == fresh


@pytest.mark.parametrize(
    "has_head", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_a_tied_head_that_is_not_the_embedding_is_rejected(
    start: Callable[..., Any], tied: tuple[Path, Path], tmp_path: Path, has_head: bool
) -> None:
    old, _ = tied
    if has_head:
        old = with_head(tmp_path / "old", old, is_copy=True)
    other = with_head(tmp_path / "other", tied[1], is_copy=False)
    llm = start(old)
    before = greedy(llm)
    with pytest.raises(WeightsMismatch, match=f"{HEAD}.*embedding"):
        llm.update_weights_from_disk(str(other), "other")
    both = ["lm_head.*", *MLP]
    with pytest.raises(WeightsMismatch, match=f"{HEAD}.*embedding"):
        llm.update_weights_from_disk(part(other, both, tmp_path / "part"), subset=both)
    assert greedy(llm) == before
    llm.update_weights_from_disk(str(tied[1]), "new")
    assert greedy(llm) != before


@pytest.mark.parametrize("staging", ["auto", "delta"])
@pytest.mark.parametrize("had_head", [False, True], ids=["without", "with"])
def test_deltas_change_a_tied_head_with_its_embedding(
    start: Callable[..., Any],
    tied: tuple[Path, Path],
    tmp_path: Path,
    staging: str,
    had_head: bool,
) -> None:
    """A trainer that gathers its state dict has the head as a tensor of its own."""
    folder = with_head(tmp_path / "old", tied[0], is_copy=True) if had_head else tied[0]
    weights = load_file(folder / "model.safetensors")

    def step(seed: int) -> None:
        weights.update(stepped(weights, seed))
        weights[HEAD] = weights[EMBEDDING].clone()

    # A GPU packs nothing.
    is_packed = staging == "delta" and not torch.cuda.is_available()
    with unpacked() if is_packed else nullcontext():
        llm = start(
            folder,
            additional_config={"inflight": {"staging": staging, "delta_gib": 0.02}},
            weight_transfer_config=WeightTransferConfig(backend="local"),
        )
        with Publisher(llm, weights) as to:
            step(0)
            assert not to.publish("whole").is_delta
            told = []
            for seed in (1, 2, 3):
                step(seed)
                assert to.publish(f"delta-{seed}").is_delta
                told.append((llm.weight_info()["digest"], greedy(llm)))
            to.rollback()
            assert (llm.weight_info()["digest"], greedy(llm)) == told[-2]
            to.rollback()
            assert llm.verify_weights()["result"] == "equal"
            kept = weights[EMBEDDING].clone()
            weights[EMBEDDING].view(torch.int16)[7] += 1
            with pytest.raises(WeightsMismatch, match=f"{HEAD}.*embedding"):
                to.publish("another embedding alone")
            weights[EMBEDDING].copy_(kept)
            assert (llm.weight_info()["digest"], greedy(llm)) == told[-1]
            step(4)
            to.publish("again")
            step(5)
            assert to.publish("a delta again").is_delta
        said = llm.weight_info()["digest"], greedy(llm)
        with Publisher(llm, weights, delta="off") as to:
            to.publish("whole")
        assert (llm.weight_info()["digest"], greedy(llm)) == said


def test_a_head_that_a_subset_has_left_behind_stands_against_no_delta(
    start: Callable[..., Any], tied: tuple[Path, Path], tmp_path: Path
) -> None:
    """The subset brought the embedding alone, and the head is not served."""
    old, new = (
        with_head(tmp_path / name, folder, is_copy=True)
        for name, folder in zip(("old", "new"), tied, strict=True)
    )
    is_packed = not torch.cuda.is_available()
    with unpacked() if is_packed else nullcontext():
        llm = start(
            old,
            additional_config={"inflight": {"staging": "delta", "delta_gib": 0.02}},
            weight_transfer_config=WeightTransferConfig(backend="local"),
        )
    llm.update_weights_from_disk(str(old), "old")
    folder = part(new, [EMBEDDING], tmp_path / "part")
    llm.update_weights_from_disk(folder, subset=[EMBEDDING])
    name = "model.norm.weight"
    norm = {name: load_file(old / "model.safetensors")[name]}
    changed = {name: norm[name] + 1}
    before = greedy(llm)
    manifest, pairs = delta_between(norm, changed, llm.weight_info()["digest"])
    save_file(pairs, file := tmp_path / "delta.safetensors")
    update_id = llm.start_weight_update(manifest=manifest)["update_id"]
    llm.update_weights({"path": str(file)}, update_id=update_id)
    llm.finish_weight_update(update_id=update_id)
    assert greedy(llm) != before
    assert llm.verify_weights()["result"] == "equal"
