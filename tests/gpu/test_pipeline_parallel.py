"""Pipeline parallelism on GPUs: both stages flip together, eager and with CUDA graphs.

In float32, so that the reference on the CPU tells versions apart from noise.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_pipeline_parallel import NOISE
from tests.e2e.test_tearing import mismatches, stream_under_commits
from tests.support.engines.probe import commits_and_rollbacks, greedy, spread
from tests.support.engines.reference import Reference
from tests.support.gpu.exact import exact_products  # noqa: F401 (a fixture)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    STAGES,
    start,
)
from vllm.inflight.errors import WeightsMismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    # Inductor would have float32 be less than that.
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.usefixtures("exact_products"),
]

NUM_COMMITS = 60


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def staged(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],  # noqa: F811
) -> Callable[[Path], Any]:
    return partial(start, **STAGES, enforce_eager=request.param, dtype="float32")


@pytest.fixture(scope="module")
def expected_b(
    staged: Callable[[Path], Any], versions: dict[str, Path]
) -> list[list[int]]:
    return greedy(staged(versions["b"]))


@pytest.fixture(scope="module")
def llm(
    staged: Callable[[Path], Any], expected_b: Any, versions: dict[str, Path]
) -> Any:
    return staged(versions["a"])


def test_stages_equal_a_fresh_engine_after_every_flip_and_rollback(
    llm: Any, expected_b: list[list[int]], versions: dict[str, Path]
) -> None:
    commits_and_rollbacks(llm, versions["a"], versions["b"], expected_b)


def test_every_step_of_many_commits_under_load_is_of_one_version(
    llm: Any, versions: dict[str, Path], reference: Reference
) -> None:
    llm.update_weights_from_disk(str(versions["a"]), "a")
    outputs = stream_under_commits(llm, versions, NUM_COMMITS)
    assert sum(len(o.outputs[0].weight_versions) > 1 for o in outputs) > 10
    # The reference runs on the CPU, and is what takes the time.
    assert mismatches(spread(outputs, 32), reference, "a", NOISE) == []


def test_a_version_that_one_stage_rejects_is_served_by_no_stage(
    llm: Any, versions: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    llm.update_weights_from_disk(str(versions["a"]), "a")
    before = greedy(llm)
    for number in range(2):
        tensors = load_file(versions["b"] / "model.safetensors")
        name = f"model.layers.{number}.mlp.down_proj.weight"
        tensors[name].view(-1)[7] = float("nan")
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(WeightsMismatch, match=rf"layers\.{number}\.mlp\.down_proj"):
            llm.update_weights_from_disk(str(tmp_path), "broken")
        assert greedy(llm) == before
        assert llm.get_weight_version() == "a"
