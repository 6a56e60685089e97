"""Families of models with delta staging: what a fresh engine says.

What a loader computes has no place for every element. It is loaded into scratch memory,
and compared. A family whose layers are served in another form than they are loaded in
is refused when the engine starts; `refusal` has each of these.
"""

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
    worker_of,
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

QUICK = ("gpt2", "phi3", "mixtral", "deepseek_v3", "falcon_h1", "llama4")
"""Turned matrices, matrices fused in the checkpoint, experts, latent attention, an
exponential, and rows that a loader permutes."""

PACKED = "are packed for the CPU build"


def refusal(family: str) -> str | None:
    """Why delta staging refuses a family on this machine; None if it takes it."""
    if family == "gpt_oss" and not torch.cuda.is_available():
        return PACKED  # no kernel of the tests multiplies with these experts
    has_experts = "experts" in FAMILIES[family].particular
    return PACKED if has_experts and not CAN_UNPACK_EXPERTS else None


COMPUTED = {
    "mamba2": ".A_log",
    "falcon_h1": ".A_log",
    "granite_moe_hybrid": ".A_log",
    "nemotron_h": ".A_log",
    "llama4": "_proj.weight",  # queries and keys, and values in the same parameter
}
"""Families whose loaders compute, and how the names of these tensors end."""


def converted(llm: Any) -> set[str]:
    """Tensors that are served in another dtype, as routers are in float32.

    A delta of the checkpoint's bits cannot change them.
    """
    entries = shadow_of(llm).plan.items()
    return {n for n, e in entries if not all(copied.is_exact for copied in e.copies)}


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
def test_a_family_equals_a_fresh_engine(
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
    if (reason := refusal(family)) is not None:
        with pytest.raises(ConfigError, match=reason):
            delta_engine(start, old, inflight=inflight, **options)
        seen("refused", reason="the CPU build packs its experts")
        return
    llm = delta_engine(start, old, inflight=inflight, **options)
    computed = shadow_of(llm).computed
    assert bool(computed) == (family in COMPUTED), sorted(computed)
    assert all(name.endswith(COMPUTED[family]) for name in computed)
    dtypes = {str(param.dtype) for param in live_of(llm).values()}
    told = llm.weight_info()["staging"]["dtype"]
    is_one = dtypes == {"torch.bfloat16"} and not computed
    assert told == ("bfloat16" if is_one else None)
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
        known = worker_of(llm).vllm_inflight.stager.served.tensors
        too_large = computed.keys() - known.keys()
        assert bool(too_large) == (family == "llama4")
        kept = {name: weights[name] for name in converted(llm) | too_large}
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
