"""An update may have tensors of the start checkpoint that its loader ignores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.engines.mixtures import mixed, part
from tests.support.engines.probe import greedy
from tests.support.models.families import cpu_options, gpu_options
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

FAMILY = "qwen3_moe"
BIAS = "model.layers.1.self_attn.o_proj.bias"
"""The model has none, and its loader takes it for one that a quantiser left."""
ATTENTION = ["model.layers.1.self_attn.*"]


@pytest.fixture
def folders(checkpoint: Callable[..., Path], tmp_path: Path) -> dict[str, Path]:
    """Two versions, and the same two with the bias."""
    found = {
        name: checkpoint(seed, family=FAMILY)
        for seed, name in enumerate(("old", "new"))
    }
    for name, folder in list(found.items()):
        added = mixed(folder, folder, [], tmp_path / f"{name}-biased")
        tensors = load_file(added / "model.safetensors")
        tensors[BIAS] = torch.ones(tensors["model.norm.weight"].shape[0])
        save_file(tensors, added / "model.safetensors", metadata={"format": "pt"})
        found[f"{name}-biased"] = added
    return found


def test_a_tensor_that_the_start_checkpoint_also_had_unused_is_ignored(
    start: Callable[..., Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    old, new = folders["old-biased"], folders["new-biased"]
    fresh = greedy(start(new))
    fresh_mixture = greedy(start(mixed(old, new, ATTENTION, tmp_path / "mixed")))
    llm = start(old)
    before = greedy(llm)
    assert before not in (fresh, fresh_mixture)
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert greedy(llm) == fresh
        llm.rollback_weights()
        some = part(new, ATTENTION, tmp_path / "part")
        llm.update_weights_from_disk(some, "some", subset=ATTENTION)
        assert greedy(llm) == fresh_mixture
        llm.rollback_weights()
    with pytest.raises(WeightsMismatch, match=BIAS):  # nothing would be replaced
        llm.update_weights_from_disk(
            part(new, [BIAS], tmp_path / "alone"), "alone", subset=[BIAS]
        )
    assert greedy(llm) == before


@pytest.mark.parametrize("family", [FAMILY, "deepseek_v2"])
def test_a_delta_may_change_such_a_tensor(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
) -> None:
    """The loader of the second family does not say which names it takes."""
    plain = checkpoint(0, family=family)
    folder = mixed(plain, plain, [], tmp_path / "biased")
    weights = load_file(folder / "model.safetensors")
    width = weights["model.norm.weight"].shape[0]
    weights[BIAS] = torch.ones(width, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    llm = start(
        folder,
        weight_transfer_config=WeightTransferConfig(backend="local"),
        **(gpu_options if torch.cuda.is_available() else cpu_options)(family),
    )
    with Publisher(llm, lambda: weights) as to:
        to.publish("whole")
        worker = llm.llm_engine.model_executor.driver_worker.worker
        # Where ranks have experts of their own, versions are accepted by this alone.
        assert worker.vllm_inflight.stager.shadow.plan.passes_over(BIAS)
        weights = weights | {BIAS: weights[BIAS] * 2}
        assert to.publish("delta").is_delta


def test_an_unused_tensor_that_the_start_checkpoint_lacks_is_rejected_by_name(
    start: Callable[..., Any], folders: dict[str, Path]
) -> None:
    llm = start(folders["old"])
    with pytest.raises(WeightsMismatch, match=BIAS):
        llm.update_weights_from_disk(str(folders["new-biased"]), "new")
    llm.update_weights_from_disk(str(folders["new"]), "new")
