"""Two ranks of a trainer publish to a real server what has changed in their shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.publishing_ranks import PublishingRanks
from tests.support.serving import Server
from vllm.inflight.errors import VersionConflict

pytestmark = pytest.mark.engine

KEY = "secret"
LOCAL = '{"backend": "local"}'
NUM_VERSIONS = 4


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    with Server(old, "--weight-transfer-config", LOCAL, key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def ranks(
    server: Server, old: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PublishingRanks]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    with PublishingRanks(server.url, KEY, old, store) as running:
        yield running


def served(server: Server) -> tuple[str, list[int]]:
    body = {"model": "tiny", "prompt": list(range(40, 72)), "return_token_ids": True}
    body |= {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    choice = server.post("/v1/completions", body)["choices"][0]
    return server.client.get("/weight_info").json()["digest"], choice["token_ids"]


@pytest.fixture(scope="module")
def wholes(server: Server, chain: list[Path]) -> list[tuple[str, list[int]]]:
    """What is served after each checkpoint was read whole."""
    return [from_disk(server, folder) for folder in chain]


def from_disk(server: Server, folder: Path) -> tuple[str, list[int]]:
    server.post("/update_weights_from_disk", {"model_path": str(folder)})
    return served(server)


def size(folder: Path) -> int:
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("wire", ["shm", "disk", "http"])
def test_ranks_publish_what_has_changed_in_their_shards(
    server: Server,
    ranks: PublishingRanks,
    chain: list[Path],
    wholes: list[tuple[str, list[int]]],
    tmp_path: Path,
    wire: str,
) -> None:
    whole = size(chain[0])
    options: dict[str, Any] = {"wire": wire}
    options |= {"directory": tmp_path} if wire == "disk" else {}
    options |= {} if wire == "shm" else {"delta_compression": 3}
    ranks.connect(**options)
    for number, folder in enumerate(chain):
        outcome, gathered = ranks.publish(folder, version=f"v{number}", step=number)
        assert outcome.is_delta == (number > 0)
        assert (outcome.num_bytes < whole / 4) == outcome.is_delta
        # Rank 1 has half of all, and brings its changes alone.
        assert 0 < gathered < whole / 8 or not number
        assert served(server) == wholes[number]
        info = server.client.get("/weight_info").json()
        assert (info["weight_version"], info["step"]) == (f"v{number}", number)
        assert outcome.digest == info["digest"]
    # It names a tensor at least, though nothing has changed.
    outcome, gathered = ranks.publish(chain[-1])
    assert outcome.is_delta and not gathered
    # Another version is served meanwhile: the whole one goes in the same call.
    from_disk(server, chain[0])
    outcome, _ = ranks.publish(chain[1])
    assert not outcome.is_delta and served(server) == wholes[1]
    # What was refused starts the next delta from the same version.
    with pytest.raises(VersionConflict):
        ranks.publish(chain[2], base_version="another")
    assert served(server) == wholes[1]
    outcome, _ = ranks.publish(chain[3])
    assert outcome.is_delta and served(server) == wholes[3]
    assert list(tmp_path.iterdir()) == []


def test_ranks_in_float32_publish_what_has_changed_of_what_is_served(
    server: Server,
    ranks: PublishingRanks,
    chain: list[Path],
    wholes: list[tuple[str, list[int]]],
) -> None:
    ranks.connect(dtype=torch.bfloat16)
    for number, folder in enumerate(chain):
        outcome, gathered = ranks.publish(folder)
        assert outcome.is_delta == (number > 0)
        assert (outcome.num_bytes < size(folder) / 4) == outcome.is_delta
        assert 0 < gathered < size(folder) / 8 or not number
        assert served(server) == wholes[number]


def test_a_skip_and_a_subset_are_those_of_all_ranks(
    server: Server,
    ranks: PublishingRanks,
    chain: list[Path],
    wholes: list[tuple[str, list[int]]],
) -> None:
    ranks.connect(on_busy="skip")
    ranks.publish(chain[0])
    update_id = server.post("/start_weight_update", {})["update_id"]
    outcome, _ = ranks.publish(chain[1])
    assert outcome.skipped and served(server) == wholes[0]
    server.post("/abort_weight_update", {"update_id": update_id})
    outcome, _ = ranks.publish(chain[1])
    assert outcome.is_delta and served(server) == wholes[1]
    ranks.connect()
    ranks.publish(chain[1])
    outcome, _ = ranks.publish(chain[2], subset=["*"])
    assert not outcome.is_delta and served(server) == wholes[2]
    outcome, _ = ranks.publish(chain[3])
    assert not outcome.is_delta and served(server) == wholes[3]
    outcome, _ = ranks.publish(chain[2])
    assert outcome.is_delta and served(server) == wholes[2]
