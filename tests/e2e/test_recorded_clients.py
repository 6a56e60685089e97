"""What other frameworks' own clients asked of a server, asked again.

The records were made by the scripts in tests/support/client_records, with the clients
unmodified; these tests need none of them. TRL's bytes come over gloo, where it sends by
NCCL. Of ART there is no record: its requests are written here by hand.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.client_records.gloo_endpoint import open_endpoint, send_packed
from tests.support.engines.sent_tensors import entry, tensors
from tests.support.ports import free_port
from tests.support.serving import Server
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.engine

RECORDS = Path(__file__).parents[1] / "support" / "client_records"
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
            body["init_info"]["master_port"] = free_port()
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


@pytest.fixture
def of_file(
    server: Server, record_property: Callable[[str, object], None]
) -> Callable[[Path], None]:
    """`of_file(folder)`: the served digest is that of an update from the folder."""

    def check(folder: Path) -> None:
        found = server.client.get("/weight_info").json()["digest"]
        assert found is not None
        server.post("/update_weights_from_disk", {"path": str(folder)})
        assert server.client.get("/weight_info").json()["digest"] == found
        record_property("digest", "equal")

    return check


def test_requests_recorded_from_trl_are_answered_and_update_the_weights(
    server: Server,
    replay: Replay,
    checkpoint: Callable[..., Path],
    of_file: Callable[[Path], None],
) -> None:
    record = json.loads((RECORDS / "trl.json").read_text())
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
    of_file(checkpoint(0))


def greedy(server: Server) -> Any:
    body = {"model": "tiny", "prompt": [(7 * i) % 250 for i in range(20)]}
    body |= {"temperature": 0, "return_token_ids": True}
    return server.post("/v1/completions", body)["choices"][0]["token_ids"]


def test_requests_recorded_from_asynchronous_trl_are_answered_and_update_the_weights(
    server: Server,
    replay: Replay,
    checkpoint: Callable[..., Path],
    of_file: Callable[[Path], None],
) -> None:
    record = json.loads((RECORDS / "trl_async.json").read_text())
    assert record["client"].startswith("trl 1.")
    server.post("/update_weights_from_disk", {"path": str(checkpoint(0))})
    epoch = server.client.get("/weight_info").json()["epoch"]
    said = [greedy(server)]
    for asked in record["requests"]:
        reply = replay.ask(asked)
        if asked["path"].startswith("/server_info"):
            assert reply["vllm_config"]["model_config"]["dtype"] == "torch.bfloat16"
        if asked["path"] == "/resume":
            said.append(greedy(server))
    before, after, back = said
    assert before == back != after
    bodies = [asked.get("json", {}) for asked in record["requests"]]
    assert bodies.count({"is_checkpoint_format": True}) == 2
    assert server.client.get("/weight_info").json()["epoch"] == epoch + 2
    of_file(checkpoint(0))


def test_an_update_from_art_is_rejected_for_its_older_format_and_changes_nothing(
    server: Server,
) -> None:
    """ART 0.5.18 says in `update_info` what vLLM 0.28 and later take in `init_info`.

    The requests are written here by hand, and were not recorded.
    """
    before = greedy(server), server.client.get("/weight_info").json()["epoch"]
    assert server.client.post("/pause", params={"mode": "wait"}).status_code == 200
    body: dict[str, Any] = {"is_checkpoint_format": True}
    assert server.client.post("/start_weight_update", json=body).status_code == 200
    info = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}
    info |= {"packed": True, "packed_buffer_size_bytes": 1 << 30}
    body = {"update_info": info | {"packed_num_buffers": 2}}
    reply = server.client.post("/update_weights", json=body)
    assert reply.status_code == 400
    assert "packed_buffer_size_bytes cannot be 1073741824" in reply.json()["message"]
    assert "init_info" in reply.json()["message"]
    assert server.client.post("/resume").status_code == 200
    assert server.client.get("/weight_update").json()["active"] is None
    after = greedy(server), server.client.get("/weight_info").json()["epoch"]
    assert before == after


def test_requests_recorded_from_verl_for_sglang_are_answered_and_update_the_weights(
    server: Server, checkpoint: Callable[..., Path], of_file: Callable[[Path], None]
) -> None:
    record = json.loads((RECORDS / "verl.json").read_text())
    assert record["client"].startswith("verl 0.")
    new = list(tensors(checkpoint(2)).items())
    pieces = iter((new[:12], new[12:]))
    epoch = server.client.get("/weight_info").json()["epoch"]
    for asked in record["requests"]:
        body = asked["json"]
        if "serialized_named_tensors" in body:  # of which only the number is kept
            body["serialized_named_tensors"] = [entry(dict(next(pieces)))]
        reply = server.client.request(asked["method"], asked["path"], json=body or None)
        assert reply.status_code == asked["status"], (asked, reply.text)
    assert next(pieces, None) is None
    assert server.client.get("/weight_info").json()["epoch"] == epoch + 1
    rows = server.post("/get_weights_by_name", {"name": new[0][0], "truncate_size": 2})
    assert rows == new[0][1][:2].float().tolist()
    of_file(checkpoint(2))
