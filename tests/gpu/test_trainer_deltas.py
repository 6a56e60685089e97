"""Deltas from a trainer's process, over NCCL and CUDA IPC: found on its GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.far_ranks import FarRanks
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_VERSIONS = 5
KEPT = [
    pytest.param("inflight_ipc", {}, id="ipc"),
    *(
        pytest.param(
            "inflight_nccl",
            {"delta_memory": memory},
            id=f"nccl, {memory}",
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="needs a GPU for the trainer"
            ),
        )
        for memory in ("device", "host")
    ),
]


@pytest.mark.parametrize("staging", ["device", "delta"])
@pytest.mark.parametrize(("backend", "options"), KEPT)
def test_a_chain_of_deltas_equals_whole_versions(
    start: Callable[..., Any],
    old: Path,
    chain: list[Path],
    backend: str,
    options: dict[str, str],
    staging: str,
) -> None:
    """With delta staging, an engine on the trainer's GPU reads whole tensors where the
    trainer lends them."""
    from vllm.config.weight_transfer import WeightTransferConfig

    llm = start(
        old,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        # A log for versions of which every element differs.
        additional_config={"inflight": {"staging": staging, "delta_gib": 0.05}},
    )

    def served() -> tuple[str, list[list[int]]]:
        return llm.weight_info()["digest"], greedy(llm)

    found, wholes = [], []
    with FarTrainer(llm, backend, old, delta="always", **options) as far:
        for number, folder in enumerate(chain):
            sent = far.send(folder)
            assert sent is not None and sent.is_delta == (number > 0)
            found.append(served())
        same = far.send(chain[-1])
        assert same is not None and same.is_delta
        assert served() == found[-1]
        far.send(chain[3])
        llm.rollback_weights()  # so it misses that update
        sent = far.send(chain[2])
        assert sent is not None and sent.is_delta
        assert served() == found[2]
        llm.update_weights_from_disk(str(chain[0]))
        sent = far.send(chain[1])
        assert sent is not None and not sent.is_delta
        assert served() == found[1]
    for folder in chain:
        llm.update_weights_from_disk(str(folder))
        wholes.append(served())
    assert found == wholes


def needs(num_gpus: int) -> Any:
    """A mark for what needs so many GPUs."""
    return pytest.mark.skipif(
        torch.cuda.device_count() < num_gpus, reason=f"needs {num_gpus} GPUs"
    )


@pytest.mark.parametrize(
    ("backend", "size", "group"),
    [
        pytest.param("inflight_ipc", 1, "nccl", id="ipc, one rank"),
        pytest.param("inflight_nccl", 1, "nccl", id="nccl, one rank", marks=needs(2)),
        pytest.param("inflight_nccl", 2, "nccl", id="nccl, two ranks", marks=needs(3)),
        pytest.param(
            "inflight_nccl",
            2,
            "cpu:gloo,cuda:nccl",
            id="nccl, two ranks that talk over gloo",
            marks=needs(3),
        ),
        pytest.param("inflight_ipc", 2, "nccl", id="ipc, two ranks", marks=needs(2)),
    ],
)
def test_ranks_of_a_trainer_send_what_has_changed_in_their_shards(
    start: Callable[..., Any],
    old: Path,
    chain: list[Path],
    tmp_path: Path,
    backend: str,
    size: int,
    group: str,
) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    llm = start(old, weight_transfer_config=WeightTransferConfig(backend=backend))
    with FarRanks(llm, old, tmp_path / "store", size, backend, group) as far:
        check_shards(llm, far, old, chain, size)


def check_shards(
    llm: Any, far: FarRanks, old: Path, chain: list[Path], size: int
) -> None:
    """Fail unless deltas that `size` ranks found are served as whole versions are."""

    def served() -> tuple[str, list[list[int]]]:
        return llm.weight_info()["digest"], greedy(llm)

    found, wholes = [], []
    whole = sum(
        tensor.nbytes for tensor in load_file(old / "model.safetensors").values()
    )
    for number, folder in enumerate(chain):
        if number == 3:
            llm.rollback_weights()  # the base is an older one then
        sent = far.send(folder)
        assert sent.is_delta == (number > 0)
        assert (sent.num_bytes < whole / 4) == sent.is_delta
        # Each rank but the first brings its changes alone.
        assert (sent.gathered_bytes > 0) == (size > 1 and number > 0)
        assert sent.gathered_bytes < whole / 8
        found.append(served())
    same = far.send(chain[-1])
    assert same.is_delta and served() == found[-1]
    for folder in chain:
        llm.update_weights_from_disk(str(folder))
        wholes.append(served())
    assert found == wholes
