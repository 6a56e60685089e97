"""Sources: what is in a trainer's memory is served as its checkpoint is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_families import differing, told
from tests.support.models.families import cpu_options
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

LOCAL = WeightTransferConfig(backend="local")


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        pytest.param("lfm2_moe", marks=pytest.mark.slow),
        pytest.param("ernie4_5_moe", marks=pytest.mark.slow),
    ],
)
def test_a_model_in_memory_is_served_as_its_checkpoint_is(
    start: Callable[..., Any], checkpoint: Callable[..., Path], family: str
) -> None:
    """Their names in memory are others, and their experts are fused there."""
    options = cpu_options(family)
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    fresh, everything = told(start(new, **options))
    llm = start(old, weight_transfer_config=LOCAL, **options)
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16)
    with Publisher(llm, model) as to:
        outcome = to.publish("new")
        assert outcome.digest == llm.weight_info()["digest"]
    served, parameters = told(llm)
    assert served == fresh
    assert differing(parameters, everything) == set()
