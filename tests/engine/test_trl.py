"""What TRL's own client asked of a server, asked again: init, update, changed output.

The record was made by tests/clients/record_trl.py, with TRL unmodified; this test needs
none of it. The bytes come over gloo, where TRL sends them over NCCL.
"""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.clients.gloo_endpoint import open_endpoint, send_packed
from tests.serving import Server
from vllm.inflight.wire.watch import in_background

pytestmark = pytest.mark.engine

RECORD = Path(__file__).parents[1] / "clients" / "trl.json"
BACKEND = ("--weight-transfer-config", '{"backend": "inflight_gloo"}')


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path]) -> Iterator[Server]:
    with Server(checkpoint(0), *BACKEND) as running:
        yield running


class Replay:
    """Asks what was recorded, and does meanwhile what TRL's trainer does."""

    def __init__(self, server: Server, versions: list[dict[str, Any]]) -> None:
        self.server = server
        self.versions = versions
        self.endpoint: Any = None
        self.number = 0
        """Of the update; TRL's script sends the new weights, then the old ones."""

    def ask(self, record: dict[str, Any]) -> Any:
        beside = None
        body = record.get("json")
        if record["path"] == "/init_weight_transfer_engine":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                body["init_info"]["master_port"] = probe.getsockname()[1]
            beside = in_background(lambda: open_endpoint(body["init_info"]))
        if record["path"] == "/update_weights":
            tensors = self.versions[self.number]
            pairs = [(n, tensors[n]) for n in body["update_info"]["names"]]
            beside = in_background(lambda: send_packed(iter(pairs), self.endpoint))
        reply = self.server.client.request(record["method"], record["path"], json=body)
        assert reply.status_code == record["status"], (record, reply.text)
        result = None if beside is None else beside.result(timeout=60)
        self.endpoint = result or self.endpoint
        self.number += record["path"] == "/finish_weight_update"
        return reply.json() if reply.content else None


@pytest.fixture
def replay(server: Server, checkpoint: Callable[..., Path]) -> Iterator[Replay]:
    files = [checkpoint(seed) / "model.safetensors" for seed in (1, 0)]
    running = Replay(server, [load_file(file) for file in files])
    yield running
    running.endpoint.sender.group.close()


def test_what_trl_asked_is_answered_and_the_weights_follow(
    server: Server, replay: Replay
) -> None:
    record = json.loads(RECORD.read_text())
    assert record["client"].startswith("trl 1.")
    said = []
    for asked in record["requests"]:
        reply = replay.ask(asked)
        if asked["path"] == "/v1/completions":
            said.append([choice["token_ids"] for choice in reply["choices"]])
        if asked["path"].startswith("/server_info"):
            assert reply["vllm_config"]["weight_transfer_config"] is not None
        if asked["path"] == "/get_world_size":
            assert reply["world_size"] == 1
    before, after, back = said
    assert before == back != after
    # One update of all tensors, then one with a call per tensor.
    assert replay.number == 2
    assert server.client.get("/weight_info").json()["epoch"] == 2
