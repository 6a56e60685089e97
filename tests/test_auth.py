"""Control routes are never open by accident."""

from __future__ import annotations

import os
from argparse import Namespace
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.door import Engine, served
from vllm.inflight.api import auth
from vllm.inflight.api.routes import ROUTES
from vllm.inflight.config import ADMIN_KEY_ENV
from vllm.inflight.errors import Forbidden, Unauthorized

HERE = "127.0.0.1"
ELSEWHERE = "10.1.2.3"


@pytest.fixture(autouse=True)
def no_key_of_this_environment(monkeypatch):
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def request(
    peer: str | None = HERE, *, api_key: list[str] | None = None, **headers: str
) -> Request:
    raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    state = SimpleNamespace(args=Namespace(api_key=api_key))
    return Request(
        {
            "type": "http",
            "headers": raw,
            "client": None if peer is None else (peer, 4711),
            "app": SimpleNamespace(state=state),
        }
    )


# Without any key: this host only


@pytest.mark.parametrize("peer", [HERE, "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_without_a_key_a_caller_on_this_host_is_let_in(peer):
    auth.check(request(peer))


@pytest.mark.parametrize(
    "peer",
    [
        ELSEWHERE,
        "0.0.0.0",
        "fe80::1",
        "::ffff:10.1.2.3",
        "2001:db8::7f00:1",
        "localhost",
        "testclient",
        "",
        None,
    ],
)
def test_without_a_key_anybody_else_is_refused(peer):
    with pytest.raises(Forbidden, match="--inflight-admin-key"):
        auth.check(request(peer))


@pytest.mark.parametrize(
    "header",
    ["forwarded", "x_forwarded_for", "x_forwarded_host", "x_real_ip", "via"],
)
def test_a_request_that_came_through_a_proxy_is_refused_without_a_key(header):
    with pytest.raises(Forbidden, match=header.replace("_", "-")):
        auth.check(request(HERE, **{header: HERE}))


def test_a_forwarded_header_does_not_make_anybody_local():
    with pytest.raises(Forbidden):
        auth.check(request(ELSEWHERE, x_forwarded_for=HERE))


def test_a_page_in_a_browser_on_this_host_is_refused_without_a_key():
    with pytest.raises(Forbidden, match="origin"):
        auth.check(request(HERE, origin="https://example.org"))


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example:8000",
        "Rebound.Example",
        "rebound.example.",
        "127.0.0.1.rebound.example",
        "localhost.rebound.example:8000",
    ],
)
def test_a_page_whose_name_was_led_to_this_host_is_refused_without_a_key(host):
    with pytest.raises(Forbidden, match="--inflight-admin-key"):
        auth.check(request(HERE, host=host))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "[::1]:8000", "localhost:8000", "a.localhost", "here:80", ""],
)
def test_names_that_no_page_can_come_from_are_let_in(host):
    auth.check(request(HERE, host=host))


def test_this_host_may_be_called_by_its_own_name(monkeypatch):
    monkeypatch.setattr(auth.socket, "gethostname", lambda: "Trainer.example.org")
    auth.check(request(HERE, host="trainer.Example.org:8000"))


# With keys: whoever has the right one, from anywhere


def test_the_api_key_opens_the_routes_while_there_is_no_other():
    auth.check(request(ELSEWHERE, api_key=["a", "b"], authorization="Bearer b"))
    auth.check(request(ELSEWHERE, api_key=["a"], authorization="bearer a"))
    auth.check(request(ELSEWHERE, api_key=["a"], authorization="Bearer a", via="x"))
    auth.check(request(HERE, api_key=["a"], authorization="Bearer a", host="a.example"))


def test_the_api_key_of_the_environment_counts(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "env")
    auth.check(request(ELSEWHERE, authorization="Bearer env"))
    with pytest.raises(Unauthorized):
        auth.check(request(HERE))


def test_with_an_admin_key_the_api_key_opens_nothing(monkeypatch):
    monkeypatch.setenv(ADMIN_KEY_ENV, "admin")
    auth.check(request(ELSEWHERE, api_key=["api"], authorization="Bearer admin"))
    with pytest.raises(Forbidden, match="does not open"):
        auth.check(request(HERE, api_key=["api"], authorization="Bearer api"))


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer ", "Basic key", "key"])
def test_with_a_key_set_a_call_without_one_is_not_authorised(sent):
    with pytest.raises(Unauthorized):
        auth.check(request(HERE, api_key=["key"], authorization=sent))


def test_with_a_key_set_this_host_needs_it_too():
    with pytest.raises(Unauthorized):
        auth.check(request(HERE, api_key=["key"]))


@pytest.mark.parametrize("sent", ["KEY", "key2", "ke", " key", "key "])
def test_a_wrong_key_is_forbidden(sent):
    with pytest.raises(Forbidden):
        auth.check(request(HERE, api_key=["key"], authorization=f"Bearer {sent}"))


def test_a_key_may_have_any_bytes(monkeypatch):
    monkeypatch.setenv(ADMIN_KEY_ENV, "schlüssel")
    auth.check(request(ELSEWHERE, authorization="Bearer schlüssel"))
    monkeypatch.setenv(ADMIN_KEY_ENV, os.fsdecode(b"\xff"))
    with pytest.raises(Forbidden, match="does not open"):
        auth.check(request(ELSEWHERE, authorization="Bearer schlüssel"))


# Over HTTP, through the routes as the server attaches them


def path_of(route: tuple[str, str]) -> str:
    return route[1].replace("{update_id}", "u")


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_no_route_answers_a_stranger(route):
    engine = Engine()
    client = TestClient(served(engine), client=(ELSEWHERE, 1))
    reply = client.request(route[0], path_of(route))
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "forbidden"
    assert engine.asked == []


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_no_route_answers_without_the_key_that_is_set(route):
    engine = Engine()
    client = TestClient(served(engine, api_key=["key"]), client=(HERE, 1))
    missing = client.request(route[0], path_of(route))
    wrong = client.request(
        route[0], path_of(route), headers={"Authorization": "Bearer no"}
    )
    assert (missing.status_code, wrong.status_code) == (401, 403)
    assert missing.json()["error"]["code"] == "unauthorized"
    assert engine.asked == []


def test_a_page_that_looks_at_its_own_name_reads_and_changes_nothing():
    # What a browser sends from http://rebound.example:8000, a name of that page's
    # owner, which is led to this host once the page is there.
    engine = Engine()
    client = TestClient(
        served(engine), base_url="http://rebound.example:8000", client=(HERE, 1)
    )
    for path in ("/get_weights_by_name?name=lm_head.weight", "/flush_cache"):
        assert client.get(path).status_code == 403
    assert engine.asked == []


def test_a_caller_on_this_host_is_answered():
    engine = Engine()
    client = TestClient(served(engine), client=("::1", 1))
    assert client.get("/weight_info").json()["weight_version"] == "v"
    assert client.post("/resume").json()["status"] == "resumed"
    assert engine.asked == ["info", "resume"]
