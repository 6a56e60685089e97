"""Tied heads that a checkpoint has all the same: vLLM looks whether they differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.mixtures import mixed, part
from tests.support.engines.probe import greedy
from vllm.inflight.errors import WeightsMismatch

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
