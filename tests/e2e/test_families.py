"""Families of models: after every commit and rollback, what a fresh engine says."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import oracle
from tests.support.engines.census import census
from tests.support.engines.mixtures import mixed, part, said, scrubbed
from tests.support.engines.probe import greedy
from tests.support.models.families import (
    FAMILIES,
    UNPROVED,
    WANT_TORCHVISION,
    cpu_options,
)
from tests.support.models.families_seen import record

pytestmark = pytest.mark.engine

QUICK = ("gemma4", "deepseek_v3", "falcon_h1", "gpt_oss", "granite_moe_hybrid")
"""One for each way in which a family can differ. The others take minutes."""
ELSEWHERE = ("llama", "qwen3", "qwen3_moe", "mixtral", "mixtral_unrouted")
"""Proved by test_models.py and test_experts.py."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in FAMILIES
        if name not in ELSEWHERE + UNPROVED
    ],
)
def test_a_family_equals_a_fresh_engine_after_commits_rollbacks_and_a_subset(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
) -> None:
    if family in WANT_TORCHVISION and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    odd = FAMILIES[family].odd
    options = cpu_options(family)
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    fresh, everything = told(start(new, **options))
    mixture = mixed(old, new, odd, tmp_path / "mixed")
    fresh_mixture = said(start(mixture, **options))
    llm = start(old, **options)
    before = said(llm)
    # Small tensors are not without effect, or this would show nothing of them.
    assert before[0] not in (fresh[0], fresh_mixture[0])
    some = part(new, odd, tmp_path / "part")
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert greedy(llm) == fresh[0]
        oracle.check(llm, new)
        llm.rollback_weights()
        assert said(llm) == before
        oracle.check(llm, old)
        llm.update_weights_from_disk(some, "odd", subset=odd)
        assert said(llm) == fresh_mixture
        oracle.check(llm, mixture)
        scrubbed(llm)
        llm.rollback_weights()
    llm.update_weights_from_disk(str(new), "new")
    said_last, last = told(llm)
    assert said_last == fresh
    assert differing(last, everything) == set()
    record(family, "cpu", "eager", result="equal", hidden=128)


def told(llm: Any) -> tuple[tuple[list[list[int]], dict[str, str]], dict[str, Any]]:
    """Tokens and digests, and a census."""
    return said(llm), census(llm)


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Paths at which two models are not the same."""
    return {path for path in one.keys() | other if one.get(path) != other.get(path)}
