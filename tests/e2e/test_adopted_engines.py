"""An adopted call on two data-parallel engines, each of which commits by itself."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

FLAGS = (
    *("--data-parallel-size", "2", "--worker-extension-cls"),
    "tests.support.frameworks.by_hand.PrimeRLOfEngine",
)
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_SERVER_DEV_MODE": "1"}
ALARM = "the engines serve different weights"


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    with Server(old, *FLAGS, env=ENV) as running:
        yield running


@pytest.fixture
def folders_of_engines(new: Path, tmp_path: Path) -> Path:
    """A folder with the new weights for each engine."""
    for engine in "01":
        shutil.copytree(new, tmp_path / engine)
    return tmp_path


def update(server: Server, root: Path) -> int:
    call = {"method": "update_weights_from_path", "args": [str(root / "*")]}
    return server.client.post("/collective_rpc", json=call).status_code


def of_engines(server: Server) -> list[dict[str, Any]]:
    return server.client.get("/weight_info").json()["engines"]


def test_engines_commit_the_same_weights_and_a_difference_is_an_alarm(
    server: Server, folders_of_engines: Path
) -> None:
    root = folders_of_engines
    assert update(server, root) == 200
    first, second = of_engines(server)
    assert first["digest"] == second["digest"] is not None
    assert ALARM not in server.log()
    file = root / "1" / "model.safetensors"
    tensors = load_file(file)
    save_file({n: 2 * t for n, t in load_file(file).items()}, root / "0" / file.name)
    del tensors["model.norm.weight"]
    save_file(tensors, file)  # the second engine rejects its version
    assert update(server, root) == 500
    until(lambda: ALARM in server.log())
    first, other = of_engines(server)
    assert other["digest"] == second["digest"] != first["digest"]
