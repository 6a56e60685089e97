"""Families of models on a GPU: eager and with CUDA graphs, and models that see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.mixtures import mixed, part
from tests.engine.probe import checksums, commits_and_rollbacks, greedy
from tests.engine.script import OPTIONS
from tests.engine.test_media import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    fresh,
    new,
    old,
    test_a_picture_seen_before_is_seen_with_the_new_tower,
)
from tests.families import FAMILIES, gpu_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ELSEWHERE = ("llama", "qwen3", "qwen3_moe", "mixtral", "mixtral_unrouted")
"""Proved by test_engine.py, test_two_ranks.py and test_experts.py."""
UNTRIED = ("bert", "bloom")
"""The first is refused, the second is for other tests."""
COMPUTED = ("jamba", "nemotron_h")
"""Loaders that take exponentials: of what is loaded, and of the parameter."""


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ELSEWHERE + UNTRIED]
)
def test_a_family_equals_a_fresh_engine_after_every_flip_and_rollback(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    eager: bool,
) -> None:
    options = {"enforce_eager": eager} | gpu_options(family)
    if family == "mistral" and not eager:
        # FlashAttention's schedule for full graphs is wrong under one window of all
        # layers: vLLM contradicts itself (docs/models.md).
        options["compilation_config"] = {
            **OPTIONS["compilation_config"],
            "cudagraph_mode": "PIECEWISE",
        }
    equals_a_fresh_engine(partial(start, **options), checkpoint, tmp_path, family, 10)


def equals_a_fresh_engine(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    root: Path,
    family: str,
    rounds: int,
) -> None:
    """After each of `rounds` of commits and rollbacks, and after a subset of it."""
    odd = FAMILIES[family].odd
    before, after = (checkpoint(seed, family=family) for seed in (0, 1))
    llm = start(after)
    expected, whole = greedy(llm), checksums(llm)
    mixture = mixed(before, after, odd, root / "mixed")
    expected_mixture = greedy(start(mixture))
    llm = start(before)
    commits_and_rollbacks(llm, before, after, expected, rounds=rounds)
    llm.update_weights_from_disk(str(after), "after")
    assert checksums(llm) == whole
    llm.rollback_weights()
    some = part(after, odd, root / "part")
    llm.update_weights_from_disk(some, "odd", subset=odd)
    assert greedy(llm) == expected_mixture


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("family", COMPUTED)
def test_what_a_loader_computes_is_what_a_fresh_engine_computes(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    family: str,
    staging: str,
) -> None:
    before, after = (checkpoint(seed, family=family) for seed in (0, 1))
    options = {"additional_config": {"inflight": {"staging": staging}}}
    expected = checksums(start(after, enforce_eager=True))
    llm = start(before, enforce_eager=True, **options)
    for _ in range(3):  # recorded, proved, replayed
        llm.update_weights_from_disk(str(after), "after")
        assert checksums(llm) == expected
        llm.update_weights_from_disk(str(before), "before")
