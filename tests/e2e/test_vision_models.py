"""Models that see: after every commit and rollback, what a fresh engine says of text
and of pictures.

Where torchvision is not installed, the tests of those that want it are skipped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_families import differing
from tests.support.engines.census import census
from tests.support.engines.mixtures import part, said
from tests.support.engines.pictures import commits_rollbacks_and_a_tower, described
from tests.support.models.seeing import SEEING, require_torchvision
from tests.support.models.tiny_vision import make_seeing
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.trainer import Publisher

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_equals_a_fresh_engine_after_commits_rollbacks_and_a_tower(
    start: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    require_torchvision(name)
    llm, new = commits_rollbacks_and_a_tower(start, tmp_path, name)
    served = census(llm)
    fresh = start(new)
    said(fresh), described(fresh, name)  # they remember positions that they have seen
    assert differing(served, census(fresh)) == set()


@pytest.mark.parametrize("name", ["llava", "gemma3_mm", "qwen3_vl_moe"])
def test_a_model_that_sees_is_published_from_memory_as_its_checkpoint(
    start: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """Its names are others in memory, and of the last the experts are transposed."""
    require_torchvision(name)
    old, new = (make_seeing(tmp_path / str(seed), seed, name) for seed in (0, 1))
    fresh = start(new)
    expected = said(fresh), described(fresh, name), census(fresh)
    llm = start(old, weight_transfer_config=WeightTransferConfig(backend="local"))
    kind = getattr(transformers, SEEING[name].architecture)
    model = kind.from_pretrained(new, dtype=torch.bfloat16)
    with Publisher(llm, model) as to:
        to.publish("new")
    assert (said(llm), described(llm, name)) == expected[:2]
    assert differing(census(llm), expected[2]) == set()


def test_a_tower_that_an_engine_leaves_out_may_come_with_the_rest(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    blind = {"limit_mm_per_prompt": {"image": 0}}
    tower = SEEING["idefics3"].tower
    old, new = (make_seeing(tmp_path / str(seed), seed, "idefics3") for seed in (0, 1))
    fresh = said(start(new, **blind))
    llm = start(old, **blind)
    before = said(llm)
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert said(llm) == fresh
        llm.rollback_weights()
        assert said(llm) == before
    with pytest.raises(WeightsMismatch, match="no parameter is filled by"):
        some = part(new, tower, tmp_path / "part")
        llm.update_weights_from_disk(some, "tower", subset=tower)
    assert said(llm) == before
