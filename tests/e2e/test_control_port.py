"""A port of its own for the control routes: there they answer, and nowhere else."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.cli.finding import State
from vllm.inflight.cli.server_check import check_server

pytestmark = pytest.mark.engine

KEY = "k3y-that-nobody-may-read"
API_KEY = "4pi-key-that-nobody-may-read"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    port = free_port()
    flags = (
        # Two servers share the own port; the first has the control port to itself.
        *("--inflight-port", str(port), "--api-server-count", "2"),
        *("--api-key", API_KEY, "--inflight-allowed-paths", str(old.parent)),
    )
    # Upstream's development routes of the same paths would ask for no key.
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with Server(old, *flags, key=KEY, env=env) as server:
        server.control = f"http://127.0.0.1:{port}"
        until(lambda: listens(port), "the first server did not come up", 120)
        yield server


@pytest.fixture
def control(server: Server) -> Iterator[httpx.Client]:
    """A client of the control port, with the key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.control, headers=headers, timeout=60) as client:
        yield client


def test_an_update_goes_through_the_control_port_alone(
    server: Server, control: httpx.Client, new: Path
) -> None:
    reply = control.post("/update_weights_from_disk", json={"path": str(new)})
    assert reply.json()["success"] is True, reply.text
    text = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    asked = {"Authorization": f"Bearer {API_KEY}"}
    url = server.url + "/v1/completions"
    said = httpx.post(url, json=text, headers=asked, timeout=60)
    assert said.status_code == 200, said.text
    (choice,) = said.json()["choices"]
    assert choice["weight_versions"][0]["epoch"] == reply.json()["epoch"]


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_the_servers_own_port_has_no_control_route(
    server: Server, route: tuple[str, str]
) -> None:
    path = route[1].replace("{update_id}", "u")
    for key in (KEY, API_KEY):
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.request(route[0], server.url + path, headers=headers, timeout=60)
        assert reply.status_code in (401, 404), reply.text


def test_the_doctor_says_which_port_to_ask(server: Server) -> None:
    findings = check_server(server.url, KEY, 0.1)
    (finding,) = (each for each in findings if each.name == "control routes")
    assert "of their own" in finding.found
    assert {each.state for each in check_server(server.control, KEY, 0.1)} == {
        State.GOOD
    }


def test_the_control_port_does_not_generate(control: httpx.Client) -> None:
    text = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    assert control.post("/v1/completions", json=text).status_code == 404
    assert control.get("/health").status_code == 200
    assert "vllm:inflight_epoch" in control.get("/metrics").text


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), (API_KEY, 403), ("wrong", 403), (KEY, 200)]
)
def test_the_control_port_asks_for_the_admin_key(
    server: Server, key: str | None, status: int
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    reply = httpx.get(server.control + "/weight_info", headers=headers, timeout=60)
    assert reply.status_code == status


def test_no_reply_and_no_log_contains_a_key(
    server: Server, control: httpx.Client
) -> None:
    control.post("/update_weights_from_disk", json={"path": "/nowhere"})
    control.post("/start_weight_update", content=b"{" * 10)
    control.get("/weight_info", headers={"Authorization": f"Bearer {KEY}x"})
    told = [server.log(), control.get("/metrics").text]
    for path in (
        "/server_info",
        "/server_info?config_format=json",
        "/weight_update",
        "/weight_info",
        "/model_info",
    ):
        told.append(control.get(path).text)
    for key in (KEY, API_KEY):
        assert [text[:200] for text in told if key in text] == []
