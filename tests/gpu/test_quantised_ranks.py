"""Quantised models on two GPUs: what of them equals a fresh engine.

What is let through there is in the table `PROVED_ON_RANKS`. Here every pair is, and
each case prints those it met; one that passes can be entered there.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.probe import (
    NUM_PROMPTS,
    commits_and_rollbacks,
    flips_under_load,
    greedy,
    send,
)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    STAGES,
    start,
)
from tests.support.models.quantised import quantise
from vllm.inflight.errors import EngineFault, StagingUnavailable, WeightsMismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = {"hidden": 1024, "layers": 4}
WEIGHT = "model.layers.3.mlp.down_proj.weight"
PACKED = "model.layers.3.mlp.down_proj.weight_packed"

Folder = Callable[[int, str | None], Path]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Folder:
    def make(seed: int, kind: str | None) -> Path:
        plain = checkpoint(seed, **SHAPE)
        return plain if kind is None else quantise(plain, Path(f"{plain}-{kind}"), kind)

    return make


@pytest.fixture(scope="module")
def two(start: Callable[..., Any]) -> Callable[..., Any]:  # noqa: F811
    """`two(folder, **options)`: an engine on two GPUs that admits every layer."""
    from vllm.config.weight_transfer import WeightTransferConfig

    return partial(
        start,
        weight_transfer_config=WeightTransferConfig(backend="other"),
        worker_extension_cls="tests.support.gpu.admitting_worker.Extension",
    )


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("kind", "quantization", "weight"),
    [
        (None, "fp8_per_block", WEIGHT),
        ("fp8-channel", None, WEIGHT),
        ("fp8-block", None, WEIGHT),
        ("int8", None, WEIGHT),
        ("int4", None, PACKED),
        ("int4-wide", None, PACKED),
    ],
    ids=lambda value: str(value),
)
def test_quantised_ranks_equal_a_fresh_engine_and_reject_a_wrong_tensor_of_one_rank(
    two: Callable[..., Any],
    folder: Folder,
    kind: str | None,
    quantization: str | None,
    weight: str,
    is_eager: bool,
) -> None:
    old, new = folder(0, kind), folder(1, kind)
    options = {"enforce_eager": is_eager, "quantization": quantization}
    fresh = greedy(two(new, **options))
    llm = two(old, **options, additional_config={"inflight": {"staging": "device"}})
    commits_and_rollbacks(llm, old, new, fresh)
    before = greedy(llm)
    for rank in (0, 1):
        for fault, error in (
            ({"skip": [weight]}, WeightsMismatch),
            ({"fail_after": 9}, EngineFault),
        ):
            llm.start_weight_update()
            with pytest.raises(error):
                send(llm, new, fail_rank=rank, **fault)
                llm.finish_weight_update("new")
            assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    print("\n".join(llm.collective_rpc("tests_met")))


def test_two_ranks_flip_quantised_weights_under_load(
    two: Callable[..., Any], folder: Folder
) -> None:
    old, new = folder(0, "fp8-channel"), folder(1, "fp8-channel")
    fresh = greedy(two(new, enforce_eager=False))
    llm = two(old, enforce_eager=False)
    flips_under_load(llm, (new, old), 20)
    llm.reset_prefix_cache()  # FP8 is not the same to the bit in pieces
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-block", "int8", "int4-wide"])
def test_quantised_stages_equal_a_fresh_engine_and_reject_a_missing_tensor_of_one_stage(
    two: Callable[..., Any], folder: Folder, kind: str
) -> None:
    old, new = folder(0, kind), folder(1, kind)
    options = {**STAGES, "enforce_eager": False}
    fresh = greedy(two(new, **options))
    llm = two(old, **options)
    commits_and_rollbacks(llm, old, new, fresh)
    before = greedy(llm)
    last = PACKED if kind == "int4-wide" else WEIGHT
    for missing in (last, last.replace(".3.", ".0.")):
        llm.start_weight_update()
        with pytest.raises(WeightsMismatch):
            send(llm, new, skip=[missing])
            llm.finish_weight_update("new")
        assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel"])
def test_schemes_whose_ranks_agree_on_a_scale_are_rejected(
    two: Callable[..., Any], folder: Folder, quantization: str
) -> None:
    llm = two(folder(0, None), enforce_eager=True, quantization=quantization)
    with pytest.raises(StagingUnavailable, match="agree on their scales"):
        llm.update_weights_from_disk(str(folder(1, None)))
    assert len(greedy(llm)) == NUM_PROMPTS
