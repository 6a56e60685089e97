"""Spans through HTTP: every choice says which weights sampled its tokens.

All requests run at once while one label is published twice, so the tokens of
each come from three versions, two of which differ only in their epoch.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

NUM_TOKENS = 600
PROMPT = list(range(30, 60))
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
TEXT = {"model": "tiny", "return_token_ids": True, **LONG}
COMPLETION = TEXT | {"prompt": PROMPT}
CHAT = TEXT | {"messages": [{"role": "user", "content": "hello"}]}
GENERATE = {"model": "tiny", "token_ids": PROMPT, "sampling_params": LONG}

# name → (path, body, number of choices)
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": ("/v1/completions", COMPLETION, 1),
    "two prompts, n=2": (
        "/v1/completions",
        COMPLETION | {"n": 2, "prompt": [PROMPT, PROMPT[5:]]},
        4,
    ),
    "completion, asked for": (
        "/v1/completions",
        COMPLETION | {"return_weight_versions": True},
        1,
    ),
    "chat, asked for": (
        "/v1/chat/completions",
        CHAT | {"return_weight_versions": True},
        1,
    ),
    "completion, echo": ("/v1/completions", COMPLETION | {"echo": True}, 1),
    "chat": ("/v1/chat/completions", CHAT, 1),
    "chat, n=2": ("/v1/chat/completions", CHAT | {"n": 2}, 2),
    "generate": ("/inference/v1/generate", GENERATE, 1),
    "generate text, n=2": (
        "/inference/v1/generate",
        GENERATE | {"output_mode": "text", "sampling_params": LONG | {"n": 2}},
        2,
    ),
}
BATCH = CHAT | {"messages": [CHAT["messages"]] * 2}
WHOLE = REQUESTS | {"batch of chats": ("/v1/chat/completions/batch", BATCH, 2)}

Version = tuple[str, int]  # label, epoch


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> list[Path]:
    # Many layers make steps that are slow against the work of the server.
    return [checkpoint(seed, layers=16) for seed in range(2)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    with Server(folders[0]) as running:
        # Sixteen choices, beside other tests, and two versions in the middle of them.
        running.client.timeout = 180
        yield running


def publish(server: Server, folder: Path, label: str) -> Version:
    """Commit the weights in `folder`; the version they are served as."""
    body = {"path": str(folder), "weight_version": label}
    reply = server.post("/update_weights_from_disk", body)
    assert reply.get("success"), reply
    return reply["weight_version"], reply["epoch"]


def metric(server: Server, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    values = [line.split()[-1] for line in lines if line.startswith(f"vllm:{name}{{")]
    return sum(map(float, values))


@contextmanager
def frozen(server: Server, num_running: int) -> Iterator[None]:
    """Inside, nothing is sampled; before, some tokens of every choice were."""
    deadline = time.monotonic() + 120

    def wait_for(name: str, value: float) -> None:
        while metric(server, name) < value:
            assert time.monotonic() < deadline, f"{name} did not reach {value}"
            time.sleep(0.01)

    wait_for("num_requests_running", num_running)
    sampled = metric(server, "generation_tokens_total")
    wait_for("generation_tokens_total", sampled + 5 * num_running)
    assert server.post("/pause_generation", {"mode": "in_place"})["paused"]
    yield
    assert not server.post("/continue_generation")["paused"]


def all_at_once(
    server: Server,
    folders: list[Path],
    requests: dict[str, tuple[str, dict[str, Any], int]],
    send: Callable[[str, dict[str, Any]], Any],
) -> tuple[dict[str, Any], list[Version]]:
    """Replies by name, and the versions that were live while they grew."""
    num_choices = sum(number for _, _, number in requests.values())
    versions = [publish(server, folders[0], "old")]
    pause = partial(server.post, "/pause_generation", {"mode": "in_place"})

    def are_here() -> bool:
        reply = pause()
        return bool(reply["num_running"] + reply["num_waiting"] == num_choices)

    with ThreadPoolExecutor(len(requests)) as pool:
        # They run at one time on any machine: a pause has gathered them.
        pause()
        sent = {
            name: pool.submit(send, path, body)
            for name, (path, body, _) in requests.items()
        }
        until(are_here, "not all requests arrived", 120)
        server.post("/continue_generation")
        for folder in reversed(folders):
            with frozen(server, num_choices):
                versions.append(publish(server, folder, "new"))
        return {name: reply.result() for name, reply in sent.items()}, versions


@pytest.fixture(scope="module")
def replies(server: Server, folders: list[Path]) -> tuple[Any, list[Version]]:
    return all_at_once(server, folders, WHOLE, server.post)


@pytest.fixture(scope="module")
def streams(server: Server, folders: list[Path]) -> tuple[Any, list[Version]]:
    def send(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        reply = server.client.post(path, json=body)
        # Not `iter_lines`: to httpx, some characters of the text end a line too.
        *events, done, rest = reply.content.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        lines = [event.removeprefix(b"data: ") for event in events]
        return [json.loads(line, object_pairs_hook=once) for line in lines]

    return all_at_once(server, folders, REQUESTS, send)


def once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which has no field twice."""
    assert len(dict(fields)) == len(fields), fields
    return dict(fields)


def versions_of(choice: dict[str, Any]) -> list[Version]:
    """The version of every token; spans leave no hole and do not overlap."""
    tokens: list[Version] = []
    for span in choice["weight_versions"]:
        assert span.keys() == {"version", "epoch", "start", "end"}
        assert span["start"] == len(tokens) < span["end"]
        tokens += [(span["version"], span["epoch"])] * (span["end"] - len(tokens))
    return tokens


def in_order(tokens: list[Version]) -> list[Version]:
    return list(dict.fromkeys(tokens))


def test_two_publications_of_one_label_are_two_versions(replies: Any) -> None:
    _, ((old, first), (new, second), (again, third)) = replies
    assert (old, new, again) == ("old", "new", "new")
    assert [second, third] == [first + 1, first + 2]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_reply_says_which_weights_sampled_its_tokens(
    replies: Any, name: str
) -> None:
    by_name, versions = replies
    choices = {choice["index"]: choice for choice in by_name[name]["choices"]}
    assert sorted(choices) == list(range(WHOLE[name][2]))
    for choice in choices.values():
        tokens = versions_of(choice)
        assert len(tokens) == len(choice["token_ids"]) == NUM_TOKENS
        assert in_order(tokens) == versions


@pytest.mark.parametrize("name", REQUESTS)
def test_every_chunk_says_which_weights_sampled_the_tokens_so_far(
    streams: Any, name: str
) -> None:
    by_name, versions = streams
    num_tokens: dict[int, int] = {}
    known: dict[int, list[Version]] = {}
    *events, last = by_name[name]
    assert last["choices"] == [] and last["usage"]
    for event in events:
        (choice,) = event["choices"]
        index = choice["index"]
        sent = len(choice.get("token_ids") or ())
        num_tokens[index] = num_tokens.get(index, 0) + sent
        before = known.get(index, [])
        known[index] = versions_of(choice)
        assert len(known[index]) == num_tokens[index]
        assert known[index][: len(before)] == before
    assert num_tokens == dict.fromkeys(range(REQUESTS[name][2]), NUM_TOKENS)
    assert {tuple(in_order(tokens)) for tokens in known.values()} == {tuple(versions)}


def test_a_request_that_a_commit_aborts_returns_its_tokens_and_their_versions(
    server: Server, folders: list[Path]
) -> None:
    old = publish(server, folders[0], "old")
    commit = {"path": str(folders[1]), "weight_version": "new", "mode": "abort"}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(server.post, "/v1/completions", COMPLETION)
        with frozen(server, 1):
            ended = server.post("/update_weights_from_disk", commit)["num_aborted"]
        (choice,) = request.result()["choices"]
    tokens = versions_of(choice)
    assert (ended, choice["finish_reason"]) == (1, "abort")
    assert len(tokens) == len(choice["token_ids"]) < NUM_TOKENS
    assert set(tokens) == {old}


def test_beam_search_does_not_know_which_weights_sampled_its_tokens(
    server: Server,
) -> None:
    beams = {"n": 2, "use_beam_search": True, "max_tokens": 4, "temperature": 0}
    reply = server.client.post("/v1/completions", json=COMPLETION | beams)
    choices = reply.json()["choices"]
    assert [choice["weight_versions"] for choice in choices] == [None, None]
    served = server.client.get("/weight_info").json()
    assert reply.headers["X-Weight-Version"] == served["weight_version"]


@pytest.mark.parametrize("name", ["completion", "chat", "generate"])
def test_a_client_that_leaves_a_stream_ends_its_request(
    server: Server, name: str
) -> None:
    path, body, _ = REQUESTS[name]
    before = metric(server, "generation_tokens_total")
    stream = server.client.stream("POST", path, json=body | {"stream": True})
    with stream as reply:
        next(reply.iter_bytes())
    deadline = time.monotonic() + 60
    while server.post("/pause_generation", {"mode": "in_place"})["num_running"]:
        server.post("/continue_generation")
        assert time.monotonic() < deadline, "the request is still running"
    server.post("/continue_generation")
    assert metric(server, "generation_tokens_total") - before < NUM_TOKENS
