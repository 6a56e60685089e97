"""Models that embed: a decoder without its head, and an encoder without KV."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.probe import prompts
from vllm.inflight.errors import WeightsMismatch

pytestmark = pytest.mark.engine

POOLING = {"runner": "pooling", "max_model_len": 512}


def embedded(llm: Any) -> list[list[float]]:
    """What becomes of six prompts."""
    outputs = llm.embed(prompts(6), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def test_embeddings_equal_a_fresh_engines_after_every_commit_and_rollback(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    old, new = (checkpoint(seed, family="qwen2") for seed in (0, 1))
    fresh = embedded(start(new, **POOLING))
    llm = start(old, **POOLING)
    before = embedded(llm)
    assert before != fresh
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert embedded(llm) == fresh
        llm.rollback_weights()
        assert embedded(llm) == before


def test_an_encoder_embeds_and_refuses_what_its_loader_collects_first(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    old, new = (checkpoint(seed, family="bert") for seed in (0, 1))
    llm = start(old, **POOLING)
    before = embedded(llm)
    with pytest.raises(WeightsMismatch, match="no parameter is filled by"):
        llm.update_weights_from_disk(str(new), "new")
    assert embedded(llm) == before
