"""Two pipeline stages of two tensor-parallel ranks: all four flip together, or none.

In float32, so that the reference on the CPU tells versions apart from noise. The tests
of two stages of one rank run here as well. A trainer lends its tensors: over NCCL it
would need a fifth GPU.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_pipeline_parallel import NOISE
from tests.e2e.test_tearing import mismatches, stream_under
from tests.gpu.test_pipeline_parallel import (  # noqa: F401 (tests and a fixture)
    llm,
    test_a_version_that_one_stage_rejects_is_served_by_no_stage,
    test_every_step_of_many_commits_under_load_is_of_one_version,
    test_stages_equal_a_fresh_engine_after_every_flip_and_rollback,
)
from tests.support.engines.far_trainer import FarTrainer, sends_and_rollbacks
from tests.support.engines.probe import begin_from_files, checksums, greedy, spread
from tests.support.engines.reference import Reference
from tests.support.gpu.exact import exact_products  # noqa: F401 (a fixture)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)
from vllm.inflight.errors import WeightsMismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    # Inductor would have float32 be less than that.
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.usefixtures("exact_products"),
]

NUM_RANKS = 4
NUM_SENDS = 30
BACKEND = "inflight_ipc"


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def staged(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],  # noqa: F811
) -> Callable[[Path], Any]:
    from vllm.config.weight_transfer import WeightTransferConfig

    return partial(
        start,
        pipeline_parallel_size=2,
        enforce_eager=request.param,
        dtype="float32",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )


@pytest.fixture(scope="module")
def made_of_b(
    staged: Callable[[Path], Any], versions: dict[str, Path]
) -> tuple[list[list[int]], list[dict[str, str]]]:
    """What a fresh engine says, and what each of its ranks serves."""
    fresh = staged(versions["b"])
    return greedy(fresh), checksums(fresh)


@pytest.fixture(scope="module")
def expected_b(made_of_b: Any) -> list[list[int]]:
    tokens: list[list[int]] = made_of_b[0]
    return tokens


def test_every_rank_serves_what_a_fresh_engine_does_and_rolls_it_back(
    llm: Any,  # noqa: F811
    made_of_b: Any,
    versions: dict[str, Path],
) -> None:
    llm.update_weights_from_disk(str(versions["a"]), "a")
    before = greedy(llm), checksums(llm)
    assert len(before[1]) == NUM_RANKS
    for _ in range(2):
        llm.update_weights_from_disk(str(versions["b"]), "b")
        assert (greedy(llm), checksums(llm)) == made_of_b
        llm.rollback_weights()
        assert (greedy(llm), checksums(llm)) == before


def test_every_rank_takes_versions_from_a_trainer_that_lends_its_tensors(
    llm: Any,  # noqa: F811
    made_of_b: Any,
    versions: dict[str, Path],
) -> None:
    llm.update_weights_from_disk(str(versions["a"]), "a")
    before = greedy(llm)
    with FarTrainer(llm, BACKEND, versions["a"]) as far:
        sent = ((versions["b"], made_of_b[0]), (versions["a"], before))
        sends_and_rollbacks(far, llm, sent)
        far.send(versions["b"])
    assert (greedy(llm), checksums(llm)) == made_of_b


def test_every_step_around_versions_from_a_trainer_is_of_one_version(
    llm: Any,  # noqa: F811
    versions: dict[str, Path],
    reference: Reference,
) -> None:
    llm.update_weights_from_disk(str(versions["a"]), "a")
    known: dict[str, str] = {}
    with FarTrainer(llm, BACKEND, versions["a"]) as far:

        def send(label: str) -> None:
            far.send(versions[label])
            known[llm.get_weight_version()] = label

        outputs = stream_under(send, llm, list(versions), NUM_SENDS)
    assert len(known) == NUM_SENDS
    assert sum(len(o.outputs[0].weight_versions) > 1 for o in outputs) > 5
    # The reference runs on the CPU, and is what takes the time.
    assert mismatches(spread(outputs, 32), reference, "a", NOISE, known) == []


@pytest.mark.parametrize("fault", ["NaN", "another version"])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_version_that_one_rank_rejects_is_served_by_no_rank(
    llm: Any,  # noqa: F811
    versions: dict[str, Path],
    tmp_path: Path,
    rank: int,
    fault: str,
) -> None:
    llm.update_weights_from_disk(str(versions["a"]), "a")
    before = greedy(llm), checksums(llm)
    infos = [{"path": str(versions["b"])} for _ in range(NUM_RANKS)]
    why = "the ranks received different weights"
    if fault == "NaN":
        # A stage has one of the two layers, and each of its ranks has a part of this.
        name = f"model.layers.{rank // 2}.mlp.down_proj.weight"
        tensors = load_file(versions["b"] / "model.safetensors")
        tensors[name].fill_(float("nan"))
        save_file(tensors, tmp_path / "model.safetensors")
        infos[rank]["path"], why = str(tmp_path), name
    else:
        infos[rank]["path"] = str(versions["c"])
    begin_from_files(llm)
    with pytest.raises(WeightsMismatch, match=why):
        llm.update_weights({"update_info": infos})
        llm.finish_weight_update("broken")
    assert llm.weight_update_status()["active"] is None
    assert (greedy(llm), checksums(llm)) == before
    assert llm.get_weight_version() == "a"
