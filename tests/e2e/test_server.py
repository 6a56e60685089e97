"""A real server: control calls answer, and tokens flow, whatever is being staged."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines import gentle
from tests.support.event_stream import events
from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def running(old: Path) -> Iterator[Server]:
    flags = (
        *("--weight-transfer-config", '{"backend": "other"}'),
        *("--worker-extension-cls", "tests.support.engines.transport.Extension"),
        *("--logits-processors", gentle.NAME),
    )
    with Server(old, *flags, key=KEY) as server:
        yield server


@pytest.fixture
def server(running: Server, old: Path) -> Iterator[Server]:
    """The server on the old weights, with no update under way."""
    reply = running.post(
        "/update_weights_from_disk", {"path": str(old), "weight_version": "old"}
    )
    assert reply["weight_version"] == "old", reply
    yield running
    if running.client.get("/weight_update").json()["active"] is not None:
        running.post("/abort_weight_update")


def generate(server: Server, **params: Any) -> Any:
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True} | params
    body = {"token_ids": list(range(3, 40)), "sampling_params": sampling}
    return server.post("/inference/v1/generate", body)["choices"][0]


def stream(server: Server, num_tokens: int) -> Iterator[Any]:
    """The chunks of one long completion, as they arrive."""
    body = {
        "token_ids": list(range(3, 40)),
        "sampling_params": {
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        "stream": True,
    }
    with server.client.stream("POST", "/inference/v1/generate", json=body) as reply:
        yield from events(reply)


@contextmanager
def staging(server: Server, path: Path, ends: Path) -> Iterator[threading.Thread]:
    """An update whose transfer, in a thread, ends with the `with`: once `ends` is."""
    server.post("/start_weight_update", {"update_id": f"slow-{time.time_ns()}"})
    info = {"update_info": {"path": str(path), "waits_for": str(ends)}}
    send = partial(server.post, "/update_weights", info, timeout=180)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield thread
    finally:
        ends.touch()
        thread.join()


def test_control_calls_and_tokens_do_not_wait_for_a_slow_transfer(
    server: Server, new: Path, tmp_path: Path
) -> None:
    def active() -> Any:
        return server.client.get("/weight_update").json()["active"]

    with staging(server, new, tmp_path / "ends") as transfer:
        until(lambda: active()["ranks"] and active()["ranks"][0].get("bytes"))
        assert server.client.get("/is_paused").json()["is_paused"] is False
        assert server.client.get("/weight_info").json()["weight_version"] == "old"
        chunks = list(stream(server, 100))
        assert active()["phase"] == "staging"
        assert transfer.is_alive()  # while all of that was answered
    assert sum(len(c["choices"][0]["token_ids"] or ()) for c in chunks) == 100
    assert server.post("/finish_weight_update")["epoch"] > 0


def test_requests_sent_while_versions_come_in_all_finish(
    server: Server, old: Path, new: Path
) -> None:
    finished = threading.Event()

    def client(_: int) -> list[Any]:
        mine = []
        while not finished.is_set():
            mine.append(generate(server, max_tokens=40))
        return mine

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, index) for index in range(6)]
        for index in range(12):
            path = (new, old)[index % 2]
            body = {"path": str(path), "weight_version": f"v{index}"}
            assert server.post("/update_weights_from_disk", body)["success"]
        finished.set()
        choices = [choice for each in clients for choice in each.result()]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert {len(choice["token_ids"]) for choice in choices} == {40}
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)


def test_a_commit_that_waits_lets_running_requests_end_on_the_old_weights(
    server: Server, new: Path
) -> None:
    body = {"path": str(new), "weight_version": "waited", "mode": "wait"}
    chunks = stream(server, 900)
    next(chunks)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(server.post, "/update_weights_from_disk", body)
        *_, last = chunks
        assert update.result()["weight_version"] == "waited"
    spans = last["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["old"]
    assert generate(server)["weight_versions"][0]["version"] == "waited"
    assert server.client.get("/is_paused").json()["is_paused"] is False


def test_requests_queued_during_a_waiting_commit_run_after_the_commit(
    server: Server, new: Path
) -> None:
    body = {"path": str(new), "weight_version": "waited", "mode": "wait"}
    with ThreadPoolExecutor(33) as pool:
        choices = [pool.submit(generate, server, max_tokens=200) for _ in range(32)]
        time.sleep(0.2)
        update = pool.submit(server.post, "/update_weights_from_disk", body)
        assert {len(c.result()["token_ids"]) for c in choices} == {200}
        assert update.result()["weight_version"] == "waited"


def test_a_commit_that_waits_can_be_asked_for_again_and_given_up(
    server: Server, new: Path
) -> None:
    server.post("/start_weight_update", {"update_id": "waiting"})
    server.post("/update_weights", {"update_info": {"path": str(new)}})
    # Begun when the weights are there: on a busy machine it might be over before.
    chunks = stream(server, 600)
    next(chunks)
    finish = {"update_id": "waiting", "mode": "wait"}
    with ThreadPoolExecutor(2) as pool:
        replies = [
            pool.submit(server.client.post, "/finish_weight_update", json=finish)
            for _ in range(2)
        ]
        path = "/weight_update/waiting"
        until(lambda: server.client.get(path).json()["phase"] == "staged")
        aborted = server.post("/abort_weight_update", {"update_id": "waiting"})
        *_, last = chunks
        codes = {reply.result().status_code for reply in replies}
    assert aborted["phase"] == "aborted"
    assert codes == {409}
    assert len(last["choices"][0]["weight_versions"]) == 1
    assert server.client.get("/weight_info").json()["weight_version"] == "old"


def test_a_pause_whose_controller_is_gone_ends_with_its_lease(server: Server) -> None:
    def pause(lease_s: float) -> Any:
        body = {"mode": "in_place", "lease_s": lease_s, "owner": "trainer"}
        return server.post("/pause_generation", body)

    pause(1.0)
    reply = pause(600)
    assert (reply["owner"], reply["paused"]) == ("trainer", True)
    assert 1 < reply["lease_s"] <= 600
    for path in ("/pause_generation", "/continue_generation"):
        refused = server.client.post(path, json={"owner": "somebody"})
        assert refused.status_code == 423
        assert "trainer" in refused.json()["error"]["message"]
    time.sleep(1.2)  # longer than it was held for first
    renewed = server.client.get("/is_paused").json()
    assert renewed["is_paused"] is True
    pause(0.5)
    # Nobody renews it any more: the request that waits is answered all the same.
    assert len(generate(server, max_tokens=5)["token_ids"]) == 5
    state = server.client.get("/is_paused").json()
    assert state["is_paused"] is False
    assert state["leases_expired"] - renewed["leases_expired"] == 1


def test_a_pause_without_a_lease_is_ended_by_its_owner_or_by_no_name(
    server: Server,
) -> None:
    for ends in ({"owner": "a"}, {}):
        server.post("/pause_generation", {"mode": "in_place", "owner": "a"})
        assert server.post("/continue_generation", ends)["paused"] is False


@pytest.mark.parametrize(
    "bad", [{"lease_s": -1}, {"lease_s": "long"}, {"lease_s": True}, {"owner": ""}]
)
def test_a_lease_that_cannot_be_is_malformed(
    server: Server, bad: dict[str, Any]
) -> None:
    reply = server.client.post("/pause_generation", json={"mode": "in_place"} | bad)
    assert reply.status_code == 400
    assert next(iter(bad)) in reply.json()["error"]["message"]
    assert server.client.get("/is_paused").json()["is_paused"] is False


def test_a_pause_that_aborts_returns_what_there_is(server: Server) -> None:
    chunks = stream(server, 600)
    next(chunks)
    reply = server.post("/pause_generation", {"mode": "abort"})
    *_, last = chunks
    assert reply["num_aborted"] == 1
    assert last["choices"][0]["finish_reason"] == "abort"
    paused = server.client.get("/is_paused").json()
    assert (paused["is_paused"], paused["mode"]) == (True, "abort")
    assert server.post("/continue_generation")["paused"] is False
    assert len(generate(server)["token_ids"]) == 16


def test_upstreams_pause_and_resume_keep_their_names_and_replies(
    server: Server,
) -> None:
    reply = server.client.post("/pause?mode=keep&clear_cache=false").json()
    assert (reply["status"], reply["mode"]) == ("paused", "in_place")
    assert server.client.post("/resume").json()["status"] == "resumed"
    assert server.client.get("/get_world_size").json() == {"world_size": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 403),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
    ],
)
@pytest.mark.parametrize(
    "route", ["/weight_info", "/is_paused", "/weight_update", "/get_world_size"]
)
def test_control_routes_need_their_key(
    running: Server, route: str, headers: dict[str, str], status: int
) -> None:
    assert (
        httpx.get(running.url + route, headers=headers, timeout=60).status_code
        == status
    )


def test_every_rejection_has_its_status_and_its_code(server: Server, new: Path) -> None:
    def refused(path: str, body: Any) -> tuple[int, str]:
        reply = server.client.post(path, json=body)
        return reply.status_code, reply.json()["error"]["code"]

    assert refused("/update_weights", {}) == (400, "malformed")
    assert refused("/finish_weight_update", {"update_id": "x"}) == (
        404,
        "unknown_update",
    )
    assert refused("/finish_weight_update", {}) == (409, "wrong_phase")
    assert refused("/rollback_weights", {"to_version": "x"})[0] == 409
    assert refused("/update_weights_from_disk", {"path": "/nowhere"}) == (
        400,
        "malformed",
    )
    assert refused("/start_weight_update", {"colour": "red"}) == (400, "malformed")
    server.post("/start_weight_update", {"deadline_s": 0.3})
    slow = {"update_info": {"path": str(new), "sleep_s": 0.1}}
    assert refused("/update_weights", slow) == (504, "deadline_exceeded")
    server.post("/start_weight_update")
    part = {"update_info": {"path": str(new), "skip": ["model.norm.weight"]}}
    assert server.client.post("/update_weights", json=part).status_code == 200
    reply = server.client.post("/finish_weight_update", json={})
    assert reply.status_code == 422
    assert reply.json()["error"]["tensors"] == ["model.norm.weight"]
    assert generate(server)["weight_versions"][0]["version"] == "old"


def test_a_caller_that_lost_the_reply_can_ask_what_happened(
    server: Server, new: Path
) -> None:
    body = {"path": str(new), "weight_version": "v", "update_id": "lost"}
    server.post_and_leave("/update_weights_from_disk", body)
    until(lambda: server.client.get("/weight_update/lost").is_success)
    again = server.post("/update_weights_from_disk", body)
    outcome = server.client.get("/weight_update/lost").json()
    assert outcome["phase"] == "committed"
    assert outcome["result"]["epoch"] == again["epoch"]
