"""Versions beyond the choices of a reply: headers, responses, and who wants none."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from tests.support import event_stream
from tests.support.engines import gentle
from tests.support.serving import Server

pytestmark = pytest.mark.engine

LABEL = 'step "7", 100 % / ü'
PROMPT = list(range(30, 60))
TEXT = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT | {"prompt": PROMPT, "n": 2, "temperature": 1},
    "/v1/chat/completions": TEXT | {"messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 8},
    "/v1/messages": {"model": "tiny", "max_tokens": 8, "messages": MESSAGES},
    "/inference/v1/generate": {
        "model": "tiny",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 8, "ignore_eos": True},
    },
}
CHOICES = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    with Server(old, "--logits-processors", gentle.NAME) as running:
        body = {"path": str(old), "weight_version": LABEL}
        assert running.post("/update_weights_from_disk", body)["epoch"] == 1
        yield running


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    reply = server.client.post(path, json=body | {"stream": True})
    lines = [x for x in reply.content.split(b"\n") if x.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.mark.parametrize("path", BODIES)
def test_the_headers_of_a_reply_name_the_version_that_made_the_reply(
    server: Server, path: str
) -> None:
    reply = server.client.post(path, json=BODIES[path])
    assert reply.status_code == 200
    assert unquote(reply.headers["X-Weight-Version"]) == LABEL
    assert reply.headers["X-Weight-Epoch"] == "1"


def test_a_reply_without_tokens_has_no_version_header(server: Server) -> None:
    reply = server.client.post("/v1/completions", json={"model": "other"})
    assert reply.status_code >= 400
    assert "X-Weight-Version" not in reply.headers
    assert "X-Weight-Version" not in server.client.get("/v1/models").headers


@pytest.mark.parametrize(
    ("peer", "headers", "why"),
    [
        ("127.0.0.6", {}, "127.0.0.1"),
        ("127.0.0.1", {"X-Forwarded-Proto": "https"}, "x-forwarded-proto"),
        ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, "x-forwarded-for"),
        ("127.0.0.1", {"X-Envoy-Attempt-Count": "1"}, "x-envoy-attempt-count"),
        ("127.0.0.1", {"Referer": "http://example.org/"}, "referer"),
        ("127.0.0.1", {"User-Agent": "Mozilla/5.0"}, "browser"),
        ("127.0.0.1", {"Host": "vllm:8000"}, "vllm:8000"),
    ],
)
def test_without_a_key_only_a_direct_caller_on_this_host_is_answered(
    server: Server, peer: str, headers: dict[str, str], why: str
) -> None:
    before = server.client.get("/weight_info").json()
    wire = httpx.HTTPTransport(local_address=peer)
    with httpx.Client(transport=wire, base_url=server.url, headers=headers) as client:
        for method, path in (
            ("GET", "/flush_cache"),
            ("POST", "/update_weight_version"),
        ):
            reply = client.request(method, path)
            assert reply.status_code == 403, reply.text
            assert why in reply.json()["error"]["message"]
            assert "--inflight-admin-key" in reply.json()["error"]["message"]
    assert server.client.get("/weight_info").json() == before


def test_a_proxy_that_adds_no_header_is_detected_by_its_http_version(
    server: Server,
) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as wire:
        wire.sendall(b"GET /flush_cache HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert wire.makefile("rb").readline().split()[1] == b"403"


def test_a_label_with_special_characters_is_returned_exactly(server: Server) -> None:
    assert server.client.get("/weight_info").json()["weight_version"] == LABEL
    for path in CHOICES:
        for choice in server.post(path, BODIES[path])["choices"]:
            assert [s["version"] for s in choice["weight_versions"]] == [LABEL]


def test_a_response_has_the_spans_of_its_last_turn(server: Server) -> None:
    body = BODIES["/v1/responses"]
    spans = server.post("/v1/responses", body)["weight_versions"]
    whole = {"version": LABEL, "epoch": 1, "start": 0, "end": 8}
    assert spans == [whole]
    *_, last = events(server, "/v1/responses", body)
    # From 0.33 on, vLLM calls a response that reached its limit incomplete.
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["weight_versions"] == [whole]


@pytest.mark.parametrize("path", CHOICES)
def test_a_client_that_rejects_unknown_fields_can_switch_the_spans_off(
    server: Server, path: str
) -> None:
    body = BODIES[path] | {"vllm_xargs": {"weight_versions": 0}}
    whole = server.post(path, body)["choices"]
    streamed = [c for event in events(server, path, body) for c in event["choices"]]
    # A busy server sends several tokens in one event.
    assert whole and len(streamed) > 1
    assert not any("weight_versions" in choice for choice in whole + streamed)


@pytest.mark.parametrize("asking", [{}, {"weight_versions": 0}], ids=repr)
@pytest.mark.parametrize("path", (*CHOICES, "/inference/v1/generate"))
def test_a_client_may_ask_whose_kv_was_read(
    server: Server, path: str, asking: dict[str, int]
) -> None:
    asking = asking | {"kv_versions": 1}
    body = BODIES[path] | {"vllm_xargs": asking}
    if path not in CHOICES:
        sampling = BODIES[path]["sampling_params"] | {"extra_args": asking}
        body = BODIES[path] | {"sampling_params": sampling}
    reply = server.post(path, body | {"return_token_ids": True})
    choices = reply["choices"]
    choices += [c for event in events(server, path, body) for c in event["choices"]][
        -1:
    ]
    length = reply["usage"]["prompt_tokens"]
    for choice in choices:
        (span,) = choice["kv_versions"]
        assert (span["version"], span["epoch"], span["start"]) == (LABEL, 1, 0)
        assert span["end"] == length + 7
        if path in CHOICES:
            assert ("weight_versions" in choice) == ("weight_versions" not in asking)
    plain = server.post(path, BODIES[path])["choices"]
    assert not any("kv_versions" in choice for choice in plain)


def test_an_aborted_chat_goes_on_from_its_prompt_and_tokens(server: Server) -> None:
    """Through the door that takes tokens, under the id that its user gave."""
    chat = BODIES["/v1/chat/completions"] | {"max_tokens": 900}
    body = chat | {"stream": True, "return_token_ids": True, "request_id": "mine"}
    had: list[int] = []
    prompt: list[int] = []
    with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for event in event_stream.events(reply):
            prompt = event.get("prompt_token_ids") or prompt
            (choice,) = event["choices"]
            num_before = len(had)
            had += choice.get("token_ids") or ()  # several where a client lags
            if num_before < 20 <= len(had):
                server.post("/pause_generation", {"mode": "abort"})
            last = event
    server.post("/continue_generation")
    assert "mine" in last["id"]
    assert choice["finish_reason"] == "abort"
    assert 20 <= len(had) == choice["weight_versions"][-1]["end"] < 900

    def generated(tokens: list[int], count: int) -> list[int]:
        sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"model": "tiny", "token_ids": tokens, "sampling_params": sampling}
        return server.post("/inference/v1/generate", body)["choices"][0]["token_ids"]

    whole = generated(prompt, len(had) + 50)
    assert had + generated(prompt + had, 50) == whole


def test_whole_and_streamed_replies_report_that_they_were_aborted(
    server: Server,
) -> None:
    """Where there is no `finish_reason`, by the words that the route has."""
    long: dict[str, dict[str, Any]] = {
        "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 900},
        "/v1/messages": BODIES["/v1/messages"] | {"max_tokens": 900},
    }

    def ask(path: str, is_streamed: bool) -> Any:
        body = long[path] | {"temperature": 0}
        if is_streamed:
            return events(server, path, body)
        return server.post(path, body)

    asked = [(path, streamed) for path in long for streamed in (False, True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = [pool.submit(ask, *each) for each in asked]
        while " 4.0" not in running(server):
            time.sleep(0.01)
            assert not any(reply.done() for reply in replies)
        paused = server.post("/pause_generation", {"mode": "abort"})
        server.post("/continue_generation")
        told = dict(zip(asked, (reply.result() for reply in replies), strict=True))
    assert paused["num_aborted"] == len(asked)
    responses = (
        told["/v1/responses", False],
        told["/v1/responses", True][-1]["response"],
    )
    for response in responses:
        assert response["status"] == "cancelled"
        assert response["incomplete_details"] is None
        assert response["usage"]["output_tokens"] < 900
        assert response["weight_versions"][-1]["version"] == LABEL
    assert told["/v1/messages", False].get("stop_reason") is None
    ends = [
        e["delta"] for e in told["/v1/messages", True] if e["type"] == "message_delta"
    ]
    assert ends[-1].get("stop_reason") is None


def running(server: Server) -> str:
    """The line of the metrics that counts the requests that run."""
    lines = server.client.get("/metrics").text.splitlines()
    return next(x for x in lines if x.startswith("vllm:num_requests_running{"))
