"""On a GPU: a classifier that vLLM makes of a causal model, staged in each place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_classifiers import EMBEDDING, HEAD, METHODS, options, scores
from tests.support.engines.mixtures import part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_classifier_made_of_a_causal_model_equals_a_fresh_engine(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    staging: str,
    method: str,
    tied: bool,
) -> None:
    old, new = (checkpoint(seed, tied=tied) for seed in (0, 1))
    source = (EMBEDDING,) if tied else HEAD
    fresh = scores(start(new, **options(method)))
    inflight = {"additional_config": {"inflight": {"staging": staging}}}
    llm = start(old, **inflight, **options(method))
    before = scores(llm)
    assert before != fresh
    # The third is received in place, where it can be.
    for _ in range(3):
        llm.update_weights_from_disk(str(new), "new")
        assert scores(llm) == fresh
        llm.update_weights_from_disk(str(old), "old")
        assert scores(llm) == before
    some = part(new, source, tmp_path)
    llm.update_weights_from_disk(some, "some", subset=list(source))
    assert scores(llm) != before
    llm.update_weights_from_disk(str(new), "new")
    assert scores(llm) == fresh
