"""Sleep of a server: upstream's routes and ours, the engine in a process of its own."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Server

pytestmark = pytest.mark.engine

TEXT = {"model": "tiny", "prompt": list(range(30, 60)), "temperature": 0}


@pytest.fixture(scope="module")
def running(old: Path) -> Iterator[Server]:
    # What `keep` computes anew after a sleep is in bfloat16 not always, to the last
    # bit, what was computed token by token.
    flags = ("--dtype", "float32")
    with Server(old, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture
def server(running: Server, old: Path) -> Iterator[Server]:
    running.client.post("/wake_up")
    update(running, old, "old")
    yield running


def update(server: Server, path: Path, label: str) -> tuple[int, Any]:
    body = {"path": str(path), "weight_version": label}
    reply = server.client.post("/update_weights_from_disk", json=body)
    return reply.status_code, reply.json()


def says(server: Server, num_tokens: int = 20) -> dict[str, Any]:
    body = TEXT | {"max_tokens": num_tokens, "ignore_eos": True}
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert isinstance(choice, dict)
    return choice


def test_a_round_of_a_hybrid_engine(server: Server, new: Path) -> None:
    before = says(server)["text"]
    assert server.client.post("/sleep?level=1").status_code == 200
    status, refused = update(server, new, "new")
    assert (status, refused["error"]["code"]) == (409, "engine_asleep")
    for method, path in (
        ("POST", "/rollback_weights"),
        ("POST", "/weights_checker"),
        ("POST", "/continue_generation"),
        ("POST", "/start_weight_update"),
    ):
        body = {"action": "checksum"} if path == "/weights_checker" else {}
        reply = server.client.request(method, path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            409,
            "engine_asleep",
        ), path
    assert server.client.get("/weight_info").json()["weights"] == "asleep"
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}
    woken = server.client.post("/wake_up?tags=weights").json()
    assert woken["status"] == "sleeping"
    assert update(server, new, "new")[0] == 200
    woken = server.client.post("/wake_up?tags=kv_cache").json()
    assert woken["status"] == "awake"
    after = says(server)
    assert after["text"] != before
    assert [span["version"] for span in after["weight_versions"]] == ["new"]


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_a_request_that_runs_when_sleep_comes_is_answered(
    server: Server, mode: str
) -> None:
    whole = says(server, 300)["text"]
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(says(server, 300)))
    thread.start()
    threading.Event().wait(0.3)
    assert server.client.post(f"/sleep?level=1&mode={mode}").status_code == 200
    assert server.client.post("/wake_up").json()["status"] == "awake"
    thread.join(timeout=60)
    (answer,) = answers
    if mode == "abort" and answer["finish_reason"] == "abort":
        assert whole.startswith(answer["text"])
    else:
        assert answer["text"] == whole
