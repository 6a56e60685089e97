"""Subsets of models that share, pad or add: tied heads, vocabularies, biases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.mixtures import EMBEDDING, MLP, NORMS, mixed, part, said

pytestmark = pytest.mark.engine

BIASES = ("*.bias",)
QKV = ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight")


@pytest.mark.parametrize(
    ("shape", "patterns"),
    [
        ({"family": "qwen3", "tied": True}, EMBEDDING),
        pytest.param({"family": "qwen3", "tied": True}, NORMS, marks=pytest.mark.slow),
        pytest.param(
            {"family": "llama", "tied": True, "vocab": 300},
            EMBEDDING,
            marks=pytest.mark.slow,
        ),
        ({"family": "llama", "tied": True, "vocab": 300}, NORMS),
        pytest.param({"family": "qwen2"}, QKV, marks=pytest.mark.slow),
        ({"family": "qwen2"}, BIASES),
        pytest.param({"family": "qwen3", "layers": 1}, MLP, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["family"] if isinstance(value, dict) else value[0],
)
def test_tensors_outside_of_the_subset_stay_as_they_were_served(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    shape: dict[str, Any],
    patterns: tuple[str, ...],
) -> None:
    # Every machine packs its weights in float32; in bf16 many keep them as they are.
    options = {"dtype": "bfloat16" if patterns is MLP else "float32"}
    old, new = checkpoint(0, **shape), checkpoint(1, **shape)
    fresh = said(start(mixed(old, new, patterns, tmp_path / "mixed"), **options))
    llm = start(old, **options)
    before = said(llm)
    changes = part(new, patterns, tmp_path / "part")
    llm.update_weights_from_disk(changes, subset=list(patterns))
    assert said(llm) == fresh != before
    llm.rollback_weights()
    assert said(llm) == before
    # And onto a set that holds neither: everything else is of `new`, and behind.
    llm.update_weights_from_disk(str(new))
    renewed = said(llm)
    others = mixed(new, old, patterns, tmp_path / "others")
    digest = llm.update_weights_from_disk(str(others))["digest"]
    expected = said(llm)
    llm.rollback_weights()
    changes = part(old, patterns, tmp_path / "part")
    again = llm.update_weights_from_disk(changes, subset=list(patterns))
    assert (said(llm), again["digest"]) == (expected, digest)
    # And onto one that differs in nothing else.
    changes = part(new, patterns, tmp_path / "part")
    llm.update_weights_from_disk(changes, subset=list(patterns))
    assert said(llm) == renewed
