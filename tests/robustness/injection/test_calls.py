"""Control calls that come twice, in another order, or from a client that is gone."""

import json
import socket
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.robustness.injection.subject import Subject
from tests.support.engines.probe import begin_from_files
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.errors import InflightError

pytestmark = pytest.mark.engine

CALLS = ("start", "update", "finish", "abort")


def call(subject: Subject, name: str, update_id: str, new: Path) -> str:
    """One call of an update; the code of its refusal, or "ok"."""
    llm, info = subject.llm, {"update_info": {"path": str(new)}}
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: begin_from_files(llm, update_id=update_id),
        "update": lambda: llm.update_weights(info, update_id=update_id, chunk=0),
        "finish": lambda: llm.finish_weight_update("new", update_id=update_id),
        "abort": lambda: llm.abort_weight_update(update_id),
    }
    try:
        calls[name]()
    except InflightError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize("order", list(permutations(CALLS)), ids="-".join)
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_control_calls_in_any_order_leave_a_whole_version_served(
    subject: Subject, new: Path, order: tuple[str, ...], times: int
) -> None:
    update_id = f"{order} {times}"
    codes = [
        call(subject, name, update_id, new) for name in order for _ in range(times)
    ]
    began = [name for name in order if name in ("start", "update", "finish")]
    commits = began == ["start", "update", "finish"] and order[-1] == "abort"
    commits = commits or order == ("abort", "start", "update", "finish")
    subject.serves("new" if commits else "old")
    known = {"ok", "unknown_update", "wrong_phase", "malformed", "weights_mismatch"}
    assert set(codes) <= known
    if times == 2 and commits:
        assert codes.count("ok") == 6
    epoch = subject.llm.weight_info()["epoch"]
    late = call(subject, "finish", update_id, new)
    if commits:  # it is answered again, and does nothing again
        assert late == "ok"
        assert subject.llm.weight_info()["epoch"] == epoch
    if subject.llm.weight_update_status()["active"] is not None:
        subject.llm.abort_weight_update()
    subject.changes()


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    with Server(old, "--weight-transfer-config", '{"backend": "local"}') as running:
        yield running


def leave(server: Server, path: str, body: dict[str, Any], share: float = 1.0) -> None:
    """Send a call, or that share of its body, and hang up without its reply."""
    data = json.dumps(body).encode()
    address = urlsplit(server.url)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + data[: int(share * len(data))])


def phase(server: Server, update_id: str) -> str | None:
    reply = server.client.get(f"/weight_update/{update_id}")
    return reply.json()["phase"] if reply.status_code == 200 else None


def label(server: Server) -> str:
    return str(server.client.get("/weight_info").json()["weight_version"])


def test_a_client_can_resume_an_update_after_losing_any_reply(
    server: Server, new: Path
) -> None:
    opening = {"update_id": "gone", "weight_version": "v1"}
    chunk = {
        "update_id": "gone",
        "chunk": 0,
        "update_info": {"path": str(new)},
    }
    finish = {"update_id": "gone"}
    for path, body in (
        ("/start_weight_update", opening),
        ("/update_weights", chunk),
        ("/finish_weight_update", finish),
    ):
        leave(server, path, body, share=0.5)  # is no call
    assert phase(server, "gone") is None
    leave(server, "/start_weight_update", opening)
    until(lambda: phase(server, "gone") == "staging", "it was not begun")
    assert server.post("/start_weight_update", opening)["phase"] == "staging"
    leave(server, "/update_weights", chunk)
    server.post("/update_weights", chunk)
    leave(server, "/finish_weight_update", finish)
    until(lambda: phase(server, "gone") == "committed", "it was not committed")
    # What a caller finds who was cut off between the commit and its reply.
    told = server.client.get("/weight_update/gone").json()
    assert told["result"]["weight_version"] == label(server) == "v1"
    assert (
        server.post("/finish_weight_update", finish)["epoch"] == told["result"]["epoch"]
    )


def test_calls_of_a_disconnected_client_complete_exactly_once(
    server: Server, old: Path, new: Path
) -> None:
    def is_paused() -> bool:
        return bool(server.client.get("/is_paused").json()["is_paused"])

    leave(server, "/pause_generation", {"mode": "in_place"})
    until(is_paused, "it did not pause")
    leave(server, "/continue_generation", {})
    until(lambda: not is_paused(), "it did not go on")
    body = {"path": str(old), "weight_version": "v2", "update_id": "v2"}
    leave(server, "/update_weights_from_disk", body)
    until(lambda: phase(server, "v2") == "committed", "it was not committed")
    epoch = server.client.get("/weight_info").json()["epoch"]
    leave(server, "/rollback_weights", {"to_version": "v1"})
    until(lambda: label(server) != "v2", "it did not go back")
    assert server.client.get("/weight_info").json()["epoch"] == epoch + 1
    server.post("/start_weight_update", {"update_id": "given up"})
    leave(server, "/abort_weight_update", {"update_id": "given up"})
    until(lambda: phase(server, "given up") == "aborted", "it was not aborted")
    body = {"path": str(new), "weight_version": "v3"}
    assert server.post("/update_weights_from_disk", body)["weight_version"] == "v3"
