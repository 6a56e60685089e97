"""Families of models with delta staging: what a fresh engine says, or a name at start.

A family whose loader computes, or whose layers are served in another form than they
are loaded in, has no place for every element. It is refused when the engine starts.
"""

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_delta_staging import (  # noqa: F401 (one is a fixture)
    delta_engine,
    live_of,
    shadow_of,
    without_packing,
)
from tests.support.deltas import stepped
from tests.support.engines import oracle
from tests.support.engines.probe import greedy
from tests.support.engines.unpacked import CAN_UNPACK_EXPERTS
from tests.support.models.families import (
    FAMILIES,
    UNPROVED,
    WANT_TORCHVISION,
    cpu_options,
    gpu_options,
)
from tests.support.models.families_seen import DELTA, record
from vllm.inflight.errors import ConfigError
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

QUICK = ("gpt2", "phi3", "mixtral", "deepseek_v3", "falcon_h1")
"""Turned matrices, matrices fused in the checkpoint, experts, latent attention, and a
refused one."""

TAKEN = (
    *("lfm2", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"),
    *("gemma4", "phi3", "gpt2", "gpt_neox", "olmo3", "granite", "cohere2"),
    *("glm4", "exaone4", "hunyuan", "seed_oss", "smollm3", "ministral3"),
    *("ernie4_5", "gemma", "nemotron"),
)
"""Families that are not refused: dense ones, whose loaders copy."""

WITH_EXPERTS = (
    *("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("glm4_moe_lite", "ernie4_5_moe", "qwen2_moe", "olmoe", "hunyuan_moe"),
)
"""The same, where experts are not packed; some have latent attention."""

REFUSED = (
    "are packed for the CPU build",
    "what fills",  # a loader that computes
    "conv1d is packed",  # of Mamba, on a CPU that multiplies bf16
)
"""What the refusal of a family says."""


def converted(llm: Any) -> set[str]:
    """Tensors that are served in another dtype, as routers are in float32.

    A delta of the checkpoint's bits cannot change them.
    """
    entries = shadow_of(llm).plan.items()
    return {n for n, e in entries if not all(copied.is_exact for copied in e.copies)}


def in_short(refusal: str) -> str:
    """The reason of a refusal, without the names of layers."""
    if REFUSED[0] in refusal:
        return "the CPU build packs its experts"
    if REFUSED[2] in refusal:
        return "the CPU build packs its convolutions"
    found = re.search(r"what fills (.*?)( and \d+ more)?$", refusal)
    assert found is not None
    names = dict.fromkeys(".".join(n.split(".")[-2:]) for n in found[1].split(", "))
    return "its loader computes " + ", ".join(f"`{name}`" for name in names)


def record_here(family: str, result: str, **facts: Any) -> None:
    if not torch.cuda.is_available():  # a GPU has tests of its own
        record(family, DELTA, "eager", result=result, **facts)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in FAMILIES
        if name not in UNPROVED
    ],
)
def test_a_family_equals_a_fresh_engine_or_is_refused_by_name(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    family: str,
) -> None:
    if family in WANT_TORCHVISION and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    seen = partial(record_here, family)
    options = (gpu_options if torch.cuda.is_available() else cpu_options)(family)
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    inflight = {"staging": "delta", "delta_gib": 0.05}
    try:
        llm = delta_engine(start, old, inflight=inflight, **options)
    except ConfigError as refusal:
        assert any(reason in str(refusal) for reason in REFUSED), refusal
        assert family not in TAKEN
        assert family not in WITH_EXPERTS or not CAN_UNPACK_EXPERTS
        seen("refused", reason=in_short(str(refusal)))
        return
    dtypes = {str(param.dtype) for param in live_of(llm).values()}
    told = llm.weight_info()["staging"]["dtype"]
    assert told == ("bfloat16" if dtypes == {"torch.bfloat16"} else None)
    first = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    oracle.check(llm, new)
    said = greedy(llm)
    llm.rollback_weights()
    oracle.check(llm, old)
    assert greedy(llm) == first
    weights = {
        name: tensor
        for file in old.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    with Publisher(llm, lambda: weights) as to:
        to.publish("whole")
        kept = {name: weights[name] for name in converted(llm)}
        weights = stepped(weights, 1) | kept
        assert to.publish("delta").is_delta
        digest = llm.weight_info()["digest"]
        told = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == said
    with Publisher(llm, lambda: weights, delta="off") as to:
        to.publish("whole")
    assert (llm.weight_info()["digest"], greedy(llm)) == (digest, told)
    seen("equal", converted=len(kept))
    assert llm.verify_weights()["result"] == "equal"
    assert greedy(start(new, **options)) == said
