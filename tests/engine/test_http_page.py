"""Every call of docs/http.md is answered with the fields that the page shows."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.torch_trainer import training
from tests.serving import Server
from vllm.inflight.api.routes import ROUTES

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
EXAMPLE = re.compile(r"```bash\n(curl.*?)```\n\n```json\n(.*?)```", re.DOTALL)
BACKEND = ("--weight-transfer-config", '{"backend": "local"}')


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """`/models` of the page."""
    models = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("qwen", "qwen-step-100", "qwen-step-200")):
        (models / name).symlink_to(checkpoint(seed))
    return models


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Server]:
    with Server(folders / "qwen", *BACKEND) as running:
        yield running


def shape(value: Any) -> Any:
    """Keys and types of a reply; of a list, those of its first entry."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


@pytest.fixture
def trainers(folders: Path) -> Iterator[dict[str, str]]:
    """Those that the page's groups are opened by: port of the page → their own."""
    with training("weight_update_group") as first, training("actor") as second:
        for trainer in (first, second):
            trainer.begin(folders / "qwen-step-200", ["model.norm.weight"])
        yield {"51216": str(first.port), "51217": str(second.port)}


def test_every_example_gets_the_reply_on_the_page(
    server: Server, folders: Path, trainers: dict[str, str]
):
    examples = EXAMPLE.findall(PAGE.read_text())
    assert len(examples) >= len(ROUTES)
    for commands, expected in examples:
        told = commands.replace("localhost:8000", server.url)
        for port, own in trainers.items():
            told = told.replace(port, own)
        told = told.replace("/models/", f"{folders}/")
        done = subprocess.run(
            ["bash", "-ec", told.replace("curl ", "curl -sS -w '\\n' ")],
            capture_output=True,
            text=True,
            check=True,
        )
        reply = json.loads(done.stdout.splitlines()[-1])
        assert shape(reply) == shape(json.loads(expected)), commands


def test_metrics_tell_of_updates_beside_upstreams(
    server: Server, folders: Path
) -> None:
    def read() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    path = str(folders / "qwen-step-200")
    before = read()
    server.post("/update_weights_from_disk", {"path": path})
    server.post("/rollback_weights")
    server.post("/pause_generation", {"mode": "retract"})
    server.post("/continue_generation")
    after = read()
    committed = 'vllm:inflight_updates_total{engine="0",outcome="committed"}'
    assert after[committed] == before.get(committed, 0) + 1
    assert after['vllm:inflight_rollbacks_total{engine="0"}'] >= 1
    assert after['vllm:inflight_pause_seconds_total{engine="0",mode="retract"}'] > 0
    gaps = 'vllm:inflight_commit_gap_milliseconds_count{engine="0"}'
    assert after[gaps] == before[gaps] + 2
    assert after['vllm:inflight_staged_bytes_total{engine="0"}'] > 0
    assert any(name.startswith("vllm:num_requests_running") for name in after)
