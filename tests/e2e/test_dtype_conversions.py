"""Live weights are checked, not the sent tensors: casts, and loaders that compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.probe import greedy
from vllm.inflight.errors import Cause, WeightsMismatch

pytestmark = pytest.mark.engine

FILE = "model.safetensors"
PROJECTION = "model.layers.1.self_attn.v_proj.weight"
LARGEST = {torch.bfloat16: 3.3895e38, torch.float16: 65519.0}
"""The largest that rounds to a finite number, about."""
TOO_LARGE = {torch.bfloat16: 3.4e38, torch.float16: 65520.0}


def sent(
    folder: Path, name: str, value: float, at: Path, dtype: torch.dtype = torch.float32
) -> str:
    """A checkpoint in `dtype`, one element of `name` being `value`."""
    at.mkdir(exist_ok=True)
    tensors = {n: t.to(dtype) for n, t in load_file(folder / FILE).items()}
    tensors[name].view(-1)[3] = value
    save_file(tensors, at / FILE)
    return str(at)


@pytest.mark.parametrize("dtype", TOO_LARGE, ids=str)
def test_a_tensor_that_is_infinite_in_the_served_dtype_is_rejected(
    start: Callable[..., Any], old: Path, new: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    llm = start(old, dtype=str(dtype).removeprefix("torch."))
    before = greedy(llm)
    for name in (PROJECTION, "model.norm.weight", "model.embed_tokens.weight"):
        for value in (TOO_LARGE[dtype], -TOO_LARGE[dtype]):
            path = sent(new, name, value, tmp_path / "bad")
            with pytest.raises(WeightsMismatch, match=f"{name}: 1 of its") as refusal:
                llm.update_weights_from_disk(path, "bad")
            assert (refusal.value.causes, refusal.value.tensors) == (
                {Cause.NOT_FINITE: 1},
                [name],
            )
            served_as = str(dtype).removeprefix("torch.")
            assert f"NaN or Inf in {served_as}, in which they are served" in str(
                refusal.value
            )
            assert greedy(llm) == before
    # The largest that is a number there is served, as is what somebody asks for.
    path = sent(new, PROJECTION, LARGEST[dtype], tmp_path / "large")
    llm.update_weights_from_disk(path, "large")
    path = sent(new, PROJECTION, TOO_LARGE[dtype], tmp_path / "bad")
    llm.update_weights_from_disk(path, "asked for", allow_nonfinite=True)
    assert llm.get_weight_version() == "asked for"


def test_a_number_that_is_infinite_in_fp16_alone_is_rejected_as_bf16_too(
    start: Callable[..., Any], old: Path, new: Path, tmp_path: Path
) -> None:
    llm = start(old, dtype="float16")
    path = sent(new, PROJECTION, 65536.0, tmp_path, torch.bfloat16)
    with pytest.raises(WeightsMismatch, match="in float16, in which they are served"):
        llm.update_weights_from_disk(path, "bad")


def test_finite_tensors_that_a_loader_makes_infinite_are_rejected(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Mamba's decay is an exponential of what its checkpoint has."""
    from tests.support.models.families import cpu_options

    family = "granite_moe_hybrid"
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    llm = start(old, **cpu_options(family))
    names = [name for name in load_file(new / FILE) if name.endswith("A_log")]
    before = greedy(llm)
    path = sent(new, names[-1], 200.0, tmp_path, torch.bfloat16)
    with pytest.raises(WeightsMismatch, match="the model's loader makes") as refusal:
        llm.update_weights_from_disk(path, "bad")
    assert refusal.value.tensors == [names[-1]]
    assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) != before
