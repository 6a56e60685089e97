"""Two tensor-parallel ranks take deltas from a trainer on a third GPU, in each staging.

In float32, so that the reference on the CPU tells versions apart from noise. Triton's
attention would round to TF32. That rounding alone, made on the CPU, moves
log-probabilities of this model by up to 0.028 in 960 tokens. It moves those of the
smaller model that `NOISE` was measured with by up to 0.017. On GPUs a token was off by
0.033. So here kernels are compiled without that rounding.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_tearing import mismatches, stream_under
from tests.gpu.test_tearing import NOISE
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import checksums, greedy, spread
from tests.support.engines.reference import Reference
from tests.support.gpu.exact import exact_products  # noqa: F401 (a fixture)
from tests.support.gpu.ranked import start  # noqa: F401 (a fixture)
from vllm.inflight.errors import WeightsMismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 3, reason="needs three GPUs, one for the trainer"
    ),
    # Inductor would have float32 be less than that.
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.usefixtures("exact_products"),
]

SHAPE = {"hidden": 256, "layers": 3}
BACKENDS = ("inflight_nccl", "inflight_ipc")
STAGINGS: dict[str, dict[str, Any]] = {
    "device": {"staging": "device"},
    "delta": {"staging": "delta", "delta_gib": 0.05},
}
NUM_VERSIONS = 5
NUM_SENDS = 40
FLIPPED = 50
"""Of so many elements of a matrix one changes its sign from version to version."""


@pytest.fixture(scope="module")
def folders(old: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Versions that differ in a few elements, and in every token."""
    weights = {n: t.float() for n, t in load_file(old / "model.safetensors").items()}
    made = {}
    for number, label in enumerate("abcde"[:NUM_VERSIONS]):
        made[label] = tmp_path_factory.mktemp(label)
        for file in old.iterdir():
            if file.suffix != ".safetensors":
                (made[label] / file.name).write_bytes(file.read_bytes())
        file = made[label] / "model.safetensors"
        save_file(weights, file, metadata={"format": "pt"})
        weights = {name: tensor.clone() for name, tensor in weights.items()}
        weights["model.norm.weight"].neg_()
        for tensor in weights.values():
            if tensor.dim() == 2:
                tensor.view(-1)[number::FLIPPED].neg_()
    return made


@pytest.fixture(scope="module")
def reference_of_all(folders: dict[str, Path]) -> Reference:
    return Reference(folders, torch.float32)


@pytest.fixture(
    scope="module", params=[(b, s) for s in STAGINGS for b in BACKENDS], ids="-".join
)
def fed(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],  # noqa: F811
    made_of_whole: dict[str, Any],
    folders: dict[str, Path],
) -> tuple[Any, str]:
    """An engine, and the backend that it is fed by."""
    from vllm.config.weight_transfer import WeightTransferConfig

    backend, staging = request.param
    llm = start(
        folders["a"],
        dtype="float32",
        enforce_eager=False,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        additional_config={"inflight": STAGINGS[staging]},
    )
    return llm, backend


@pytest.fixture(scope="module")
def made_of_whole(
    start: Callable[..., Any],  # noqa: F811
    folders: dict[str, Path],
) -> dict[str, Any]:
    """Tokens and each rank's checksums of every version, of an engine that loads it."""
    llm, found = start(folders["a"], dtype="float32", enforce_eager=False), {}
    for label, folder in folders.items():
        llm.update_weights_from_disk(str(folder), label)
        found[label] = greedy(llm), checksums(llm)
    return found


def test_a_chain_of_deltas_and_rollbacks_equals_whole_versions_on_every_rank(
    made_of_whole: dict[str, Any],
    fed: tuple[Any, str],
    folders: dict[str, Path],
) -> None:
    llm, backend = fed
    llm.update_weights_from_disk(str(folders["a"]), "a")
    with FarTrainer(
        llm, backend, folders["a"], num_workers=2, delta="always", bucket_bytes=1 << 18
    ) as far:
        for number, label in enumerate(folders):
            sent = far.send(folders[label])
            assert sent is not None and sent.is_delta == (number > 0)
            assert (greedy(llm), checksums(llm)) == made_of_whole[label]
        *_, before, last = folders
        llm.rollback_weights()
        assert (greedy(llm), checksums(llm)) == made_of_whole[before]
        sent = far.send(folders[last])  # from an older base than the trainer's
        assert sent is not None and sent.is_delta
        assert (greedy(llm), checksums(llm)) == made_of_whole[last]


def test_every_step_around_deltas_under_load_is_of_one_version(
    fed: tuple[Any, str],
    folders: dict[str, Path],
    reference_of_all: Reference,
) -> None:
    llm, backend = fed
    llm.update_weights_from_disk(str(folders["a"]), "a")
    known: dict[str, str] = {}
    kinds: list[bool] = []
    with FarTrainer(
        llm, backend, folders["a"], num_workers=2, delta="always", bucket_bytes=1 << 18
    ) as far:

        def send(label: str) -> None:
            sent = far.send(folders[label])
            assert sent is not None
            kinds.append(sent.is_delta)
            known[llm.get_weight_version()] = label

        outputs = stream_under(send, llm, ["a", "b"], NUM_SENDS)
    assert kinds == [False] + [True] * (NUM_SENDS - 1)
    assert sum(len(o.outputs[0].weight_versions) > 1 for o in outputs) > 5
    # The reference runs on the CPU, and is what takes the time.
    wrong = mismatches(spread(outputs, 32), reference_of_all, "a", NOISE, known)
    assert wrong == [], "\n".join(wrong[:20])


def test_a_delta_that_one_rank_rejects_is_served_by_no_rank(
    made_of_whole: dict[str, Any],
    fed: tuple[Any, str],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    llm, backend = fed
    llm.update_weights_from_disk(str(folders["a"]), "a")
    tensors = load_file(folders["b"] / "model.safetensors")
    # The last columns of a row-parallel matrix are the last rank's alone.
    tensors["model.layers.1.mlp.down_proj.weight"][0, -1] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with FarTrainer(
        llm, backend, folders["a"], num_workers=2, delta="always", bucket_bytes=1 << 18
    ) as far:
        far.send(folders["a"])
        with pytest.raises(WeightsMismatch, match="down_proj"):
            far.send(tmp_path)
    assert llm.weight_update_status()["active"] is None
    assert (greedy(llm), checksums(llm)) == made_of_whole["a"]
