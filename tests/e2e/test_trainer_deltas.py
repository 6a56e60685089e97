"""Deltas from a trainer's process, with upstream's trainer interface, over gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.far_ranks import FarRanks
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import greedy
from vllm.inflight.errors import TransferFault

pytestmark = pytest.mark.engine

NUM_VERSIONS = 6

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], old: Path) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start(
        old, weight_transfer_config=WeightTransferConfig(backend="inflight_gloo")
    )


@pytest.fixture
def joined(llm: Any, old: Path) -> Callable[..., FarTrainer]:
    """A trainer that sends deltas, in a process of its own."""

    def made(delta: str = "auto", **options: Any) -> FarTrainer:
        options = {"delta": delta, "bucket_bytes": 1 << 16} | options
        return FarTrainer(llm, "inflight_gloo", old, **options)

    return made


def served(llm: Any) -> tuple[str, list[list[int]]]:
    return llm.weight_info()["digest"], greedy(llm)


def size(folder: Path) -> int:
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def test_a_chain_of_deltas_equals_whole_versions(
    llm: Any, joined: Callable[..., FarTrainer], chain: list[Path]
) -> None:
    found, wholes = [], []
    with joined() as far:
        for number, folder in enumerate(chain):
            sent = far.send(folder)
            assert sent is not None and sent.is_delta == (number > 0)
            assert not number or sent.num_bytes < size(folder) / 4
            found.append(served(llm))
    for folder in chain:
        llm.update_weights_from_disk(str(folder))
        wholes.append(served(llm))
    assert found == wholes


def test_after_another_version_the_whole_one_is_sent(
    llm: Any, joined: Callable[..., FarTrainer], chain: list[Path]
) -> None:
    with joined() as far:
        far.send(chain[0])
        llm.update_weights_from_disk(str(chain[4]))
        sent = far.send(chain[1])
        assert sent is not None and not sent.is_delta
        found = served(llm)
        again = far.send(chain[2])
        assert again is not None and again.is_delta
        llm.rollback_weights()
        assert served(llm) == found
    llm.update_weights_from_disk(str(chain[1]))
    assert served(llm) == found


def test_an_engine_that_has_missed_updates_gets_what_they_have_changed(
    llm: Any, joined: Callable[..., FarTrainer], chain: list[Path]
) -> None:
    found = []
    with joined(delta_chain=2) as far:
        for folder in chain[:3]:
            last = far.send(folder)
        for number in (3, 4):  # each starts from version 1 again
            llm.rollback_weights()
            sent = far.send(chain[number])
            found.append(served(llm))
            assert sent is not None and sent.is_delta
            # What two updates have changed, and then three; the values are whole ones.
            most = 2 * (number - 1) * last.num_bytes
            assert last.num_bytes < sent.num_bytes < most < size(chain[4]) / 4
        # The trainer keeps two deltas, and now the engine is three of them behind.
        llm.rollback_weights()
        sent = far.send(chain[5])
        found.append(served(llm))
        assert sent is not None and not sent.is_delta
        # No delta leads to a version that was sent whole.
        llm.rollback_weights()
        sent = far.send(chain[4])
        found.append(served(llm))
        assert sent is not None and not sent.is_delta
    wholes = []
    for number in (3, 4, 5, 4):
        llm.update_weights_from_disk(str(chain[number]))
        wholes.append(served(llm))
    assert found == wholes


def test_a_trainer_lost_in_the_middle_of_a_delta_changes_nothing(
    llm: Any, joined: Callable[..., FarTrainer], chain: list[Path]
) -> None:
    with joined() as far:
        far.send(chain[0])
        far.send(chain[1])
        before = served(llm)
        sending = far.fall_silent(chain[2])
        active = llm.weight_update_status()["active"]
        assert active["phase"] == "staging"
        far.kill()
        with pytest.raises(TransferFault):
            sending.result(timeout=60)
    assert served(llm) == before
    with joined() as far:
        whole = far.send(chain[2])
        assert whole is not None and not whole.is_delta
        found = served(llm)
        sent = far.send(chain[3])
        assert sent is not None and sent.is_delta
    llm.update_weights_from_disk(str(chain[2]))
    assert served(llm) == found


def test_ranks_of_a_trainer_send_what_has_changed_in_their_shards(
    llm: Any, old: Path, chain: list[Path], tmp_path: Path
) -> None:
    found, wholes = [], []
    with FarRanks(llm, old, tmp_path / "store", 2) as far:
        for number, folder in enumerate(chain):
            if number == 4:
                llm.rollback_weights()  # the base is an older one then
            sent = far.send(folder)
            assert sent.is_delta == (number > 0)
            assert not sent.is_delta or sent.num_bytes < size(folder) / 4
            # Rank 1 has half of all, and brings its changes alone.
            assert sent.gathered_bytes < size(folder) / 8
            found.append(served(llm))
    for folder in chain:
        llm.update_weights_from_disk(str(folder))
        wholes.append(served(llm))
    assert found == wholes
