"""Control routes are never open by accident."""

from __future__ import annotations

import os
import random
import string
from argparse import Namespace
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.support.route_stub import Engine, caller, served
from vllm.inflight.api.request import auth
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.config import ADMIN_KEY_ENV
from vllm.inflight.errors import ConfigError, Forbidden, Unauthorized

HERE = "127.0.0.1"
ELSEWHERE = "10.1.2.3"


@pytest.fixture(autouse=True)
def no_key_of_this_environment(monkeypatch):
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def request(
    peer: str | None = HERE,
    *,
    api_key: list[str] | None = None,
    http_version: str = "1.1",
    **headers: str,
) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    state = SimpleNamespace(args=Namespace(api_key=api_key))
    return Request(
        {
            "type": "http",
            "http_version": http_version,
            "headers": raw,
            "client": None if peer is None else (peer, 4711),
            "app": SimpleNamespace(state=state),
        }
    )


# Without any key: a direct caller on this host only


@pytest.mark.parametrize("peer", [HERE, "::1", "::ffff:127.0.0.1"])
def test_a_caller_on_this_host_is_allowed_if_no_key_is_set(peer):
    auth.authorize(request(peer))


@pytest.mark.parametrize(
    "peer",
    [
        ELSEWHERE,
        "127.0.0.6",  # the sidecar of Istio
        "127.8.9.10",
        "::ffff:127.0.0.6",
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
def test_a_caller_on_another_host_is_rejected_if_no_key_is_set(peer):
    with pytest.raises(Forbidden, match="--inflight-admin-key"):
        auth.authorize(request(peer))


CLIENTS = {
    "curl": {"user-agent": "curl/8.5.0", "accept": "*/*", "content-length": "2"}
    | {"content-type": "application/json", "expect": "100-continue"},
    "httpx": {"accept": "*/*", "accept-encoding": "gzip, deflate, br, zstd"}
    | {"connection": "keep-alive", "user-agent": "python-httpx/0.28.1"},
    "requests": {"user-agent": "python-requests/2.32.3", "accept": "*/*"}
    | {"accept-encoding": "gzip", "connection": "keep-alive"},
    "aiohttp": {"accept": "*/*", "accept-encoding": "gzip, deflate"}
    | {"user-agent": "Python/3.12 aiohttp/3.12.0", "content-type": "application/json"},
    "urllib": {"accept-encoding": "identity", "user-agent": "Python-urllib/3.11"}
    | {"connection": "close"},
    "go": {"user-agent": "Go-http-client/1.1", "accept-encoding": "gzip"}
    | {"transfer-encoding": "chunked"},
    "node": {"connection": "keep-alive", "accept": "*/*", "accept-language": "*"}
    | {"sec-fetch-mode": "cors", "user-agent": "node", "accept-encoding": "gzip"},
    "java": {"connection": "Upgrade, HTTP2-Settings", "http2-settings": "AAEAAEAA"}
    | {"upgrade": "h2c", "user-agent": "Java-http-client/21"},
    "openai": {"x-stainless-lang": "python", "x-stainless-retry-count": "0"}
    | {"x-stainless-async": "false", "user-agent": "OpenAI/Python 2.0"}
    | {"idempotency-key": "k", "openai-project": "p", "authorization": "Bearer EMPTY"},
    "traced": {"traceparent": "00-1-2-01", "tracestate": "a=b", "baggage": "c=d"}
    | {"sentry-trace": "1-2-0"},
    "probe": {"user-agent": "kube-probe/1.31", "accept": "*/*", "connection": "close"},
    "wget": {"user-agent": "Wget/1.21", "accept": "*/*", "accept-encoding": "identity"}
    | {"connection": "Keep-Alive", "cache-control": "no-cache", "pragma": "no-cache"},
}


@pytest.mark.parametrize("name", CLIENTS)
def test_an_ordinary_client_needs_no_key_on_this_host(name):
    auth.authorize(request(HERE, **CLIENTS[name], host="localhost:8000"))


PROXIES = [
    *("forwarded", "via", "x-real-ip", "x-forwarded", "x-forwarded-for"),
    *("x-forwarded-host", "x-forwarded-proto", "x-forwarded-port", "x-forwarded-by"),
    *("x-forwarded-server", "x-forwarded-client-cert", "x-forwarded-prefix"),
    *("x-original-forwarded-for", "x-original-host", "x-original-url"),
    *("x-envoy-attempt-count", "x-envoy-decorator-operation", "x-envoy-internal"),
    *("x-envoy-expected-rq-timeout-ms", "x-envoy-peer-metadata", "x-b3-traceid"),
    *("x-request-id", "x-correlation-id", "x-scheme", "x-cluster-client-ip"),
    *("l5d-client-id", "l5d-dst-canonical", "true-client-ip", "x-client-ip"),
    *("cf-connecting-ip", "cf-ray", "cf-visitor", "cdn-loop", "fastly-client-ip"),
    *("x-amzn-trace-id", "x-amz-cf-id", "cloudfront-forwarded-proto"),
    *("x-cloud-trace-context", "x-appengine-user-ip", "x-azure-clientip"),
    *(
        "k-proxy-request",
        "x-varnish",
        "x-cache",
        "akamai-origin-hop",
        "front-end-https",
    ),
    *("x-proxyuser-ip", "proxy-authorization", "proxy-connection", "surrogate"),
    *("x-a-proxy-of-next-year", "x_forwarded_for"),
]


@pytest.mark.parametrize("header", PROXIES)
def test_a_request_that_came_through_a_proxy_is_rejected_without_a_key(header):
    with pytest.raises(Forbidden, match=f"{header}'.*leave it out.*--inflight-admin-k"):
        auth.authorize(request(HERE, **{header: HERE}))


def test_a_header_that_is_not_known_is_rejected_without_a_key():
    for number in range(200):
        name = "".join(random.Random(number).choices(string.ascii_lowercase, k=9))
        with pytest.raises(Forbidden, match=name):
            auth.authorize(request(HERE, **CLIENTS["curl"], **{name: "1"}))


def test_a_long_header_does_not_make_a_long_rejection():
    with pytest.raises(Forbidden) as refusal:
        auth.authorize(request(HERE, **{"x" * 100_000: "1"}))
    assert len(refusal.value.message) < 500


def test_a_forwarded_header_does_not_make_anybody_local():
    with pytest.raises(Forbidden):
        auth.authorize(request(ELSEWHERE, **{"x-forwarded-for": HERE}))


def test_a_request_in_the_http_of_proxies_is_rejected_without_a_key():
    with pytest.raises(Forbidden, match=r"HTTP/1\.0"):
        auth.authorize(request(HERE, http_version="1.0"))
    auth.authorize(request(HERE, http_version="1.1"))


FIREFOX = {
    "user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox",
    "accept": "text/html,application/xhtml+xml",
    "accept-language": "en-GB",
    "accept-encoding": "gzip, deflate",
    "connection": "keep-alive",
}
"""All that an image of a page asks with, where the name is no secure one."""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"origin": "https://example.org"},
        {"origin": "null"},
        {"referer": "http://example.org/"},
        {"cookie": "a=b"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"upgrade-insecure-requests": "1"},
    ],
)
def test_a_page_in_a_browser_on_this_host_is_rejected_without_a_key(more):
    with pytest.raises(Forbidden, match="browser"):
        auth.authorize(request(HERE, **FIREFOX, **more))
    if more:  # whatever it says it is
        with pytest.raises(Forbidden, match="browser"):
            auth.authorize(request(HERE, **more))


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example:8000",
        "Rebound.Example",
        "rebound.example.",
        "127.0.0.1.rebound.example",
        "localhost.rebound.example:8000",
        "vllm:8000",
        "vllm.namespace.svc.cluster.local",
        "10.0.0.5:8000",
        "[2001:db8::1]:8000",
        "0x7f000001",
    ],
)
def test_a_host_name_that_allows_dns_rebinding_is_rejected_without_a_key(host):
    with pytest.raises(Forbidden, match="--inflight-admin-key"):
        auth.authorize(request(HERE, host=host))


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "127.0.1.1", "[::1]:8000", "0.0.0.0:8000"),
        *("localhost:8000", "LocalHost", "a.localhost", "localhost.localdomain:80", ""),
    ],
)
def test_names_of_this_host_are_let_in(host):
    auth.authorize(request(HERE, host=host))


def test_every_host_header_is_looked_at():
    two = request(HERE, host="localhost")
    two.scope["headers"].append((b"host", b"rebound.example"))
    with pytest.raises(Forbidden, match="rebound"):
        auth.authorize(two)


def test_this_host_may_be_called_by_its_own_name(monkeypatch):
    monkeypatch.setattr(auth.socket, "gethostname", lambda: "Trainer.example.org")
    auth.authorize(request(HERE, host="trainer.Example.org:8000"))


# With keys: whoever has the right one, from anywhere


def test_the_api_key_opens_the_control_routes_if_no_admin_key_is_set():
    auth.authorize(request(ELSEWHERE, api_key=["a", "b"], authorization="Bearer b"))
    auth.authorize(request(ELSEWHERE, api_key=["a"], authorization="bearer a"))
    auth.authorize(request(ELSEWHERE, api_key=["a"], authorization="Bearer a", via="x"))
    auth.authorize(
        request(HERE, api_key=["a"], authorization="Bearer a", host="a.example")
    )


def test_the_api_key_of_the_environment_counts(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "env")
    auth.authorize(request(ELSEWHERE, authorization="Bearer env"))
    with pytest.raises(Unauthorized):
        auth.authorize(request(HERE))


def test_the_api_key_does_not_open_the_control_routes_if_an_admin_key_is_set(
    monkeypatch,
):
    monkeypatch.setenv(ADMIN_KEY_ENV, "admin")
    auth.authorize(request(ELSEWHERE, api_key=["api"], authorization="Bearer admin"))
    with pytest.raises(Forbidden, match="does not open"):
        auth.authorize(request(HERE, api_key=["api"], authorization="Bearer api"))


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer ", "Basic key", "key"])
def test_with_a_key_set_a_call_without_one_is_not_authorised(sent):
    with pytest.raises(Unauthorized):
        auth.authorize(request(HERE, api_key=["key"], authorization=sent))


def test_a_caller_on_this_host_also_needs_the_key_that_is_set():
    with pytest.raises(Unauthorized):
        auth.authorize(request(HERE, api_key=["key"]))


@pytest.mark.parametrize("sent", ["KEY", "key2", "ke", " key", "key "])
def test_a_wrong_key_is_forbidden(sent):
    with pytest.raises(Forbidden):
        auth.authorize(request(HERE, api_key=["key"], authorization=f"Bearer {sent}"))


def test_a_blank_key_opens_nothing(monkeypatch):
    for blank in ("", " ", "\n"):
        with pytest.raises(ConfigError, match=r"--api-key .* blank"):
            served(Engine(), api_key=["key", blank])
    with pytest.raises(Unauthorized):  # and would not, if it came this far
        auth.authorize(request(HERE, api_key=[" "], authorization="Bearer  "))


def test_a_key_may_have_any_bytes(monkeypatch):
    monkeypatch.setenv(ADMIN_KEY_ENV, "schlüssel")
    auth.authorize(request(ELSEWHERE, authorization="Bearer schlüssel"))
    monkeypatch.setenv(ADMIN_KEY_ENV, os.fsdecode(b"\xff"))
    with pytest.raises(Forbidden, match="does not open"):
        auth.authorize(request(ELSEWHERE, authorization="Bearer schlüssel"))


# Over HTTP, through the routes as the server attaches them


def path_of(route: tuple[str, str]) -> str:
    return route[1].replace("{update_id}", "u")


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_no_control_route_answers_a_remote_caller_without_a_key(route):
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


READS = {"info", "paused", "status", "source", "rows", "requests"}
"""Calls of the engine that change nothing in it."""
CHANGING = {("GET", "/flush_cache")}
"""Routes of GET that change something, since SGLang's clients call them so."""


@pytest.mark.parametrize("route", [r for r in ROUTES if r[0] == "GET"], ids=" ".join)
def test_only_the_get_routes_that_are_listed_change_anything(route):
    engine = Engine()
    client = TestClient(
        served(engine),
        base_url="http://localhost",
        client=(HERE, 1),
        raise_server_exceptions=False,  # some want a model's configuration
    )
    client.get(path_of(route), params={"name": "a"})
    assert (not READS.issuperset(engine.asked)) == (route in CHANGING), engine.asked


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
@pytest.mark.parametrize(
    ("url", "headers"),
    [
        # A name of the page's owner, which is led to this host once the page is there.
        ("http://rebound.example:8000", FIREFOX),
        # An image of any page: a GET without Origin, Referer and Sec-Fetch-Site.
        ("http://0.0.0.0:8000", FIREFOX),
        ("http://localhost:8000", FIREFOX),
        ("http://localhost:8000", FIREFOX | {"sec-fetch-site": "cross-site"}),
        ("http://localhost:8000", FIREFOX | {"origin": "null"}),
    ],
)
def test_a_web_page_can_neither_read_nor_change_anything_by_a_control_route(
    route, url, headers
):
    engine = Engine()
    client = TestClient(served(engine), base_url=url, client=(HERE, 1))
    reply = client.request(route[0], path_of(route), headers=headers)
    assert reply.status_code == 403, reply.text
    assert engine.asked == []


def test_a_caller_on_this_host_is_answered():
    engine = Engine()
    client = caller(served(engine), "::1")
    assert client.get("/weight_info").json()["weight_version"] == "v"
    assert client.post("/resume").json()["status"] == "resumed"
    assert engine.asked == ["info", "resume"]
