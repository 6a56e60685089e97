"""The colocated round of a server: streams stay connected, on one rank and on two."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import gentle
from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
PROMPTS = [list(range(30 + i, 60 + i)) for i in range(3)]
TOKENS = 200
"""At 15 ms each: no machine has them before a call of a test comes."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def num_ranks(request: pytest.FixtureRequest) -> int:
    ranks: int = request.param
    return ranks


@pytest.fixture(scope="module")
def running(old: Path, num_ranks: int) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--enable-sleep-mode")
    flags += ("--tensor-parallel-size", str(num_ranks))
    flags += ("--logits-processors", gentle.NAME)
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    if num_ranks == 2:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with Server(old, *flags, env=env, main="tests.support.engines.sleeping") as server:
        yield server


@pytest.fixture
def server(running: Server, old: Path) -> Iterator[Server]:
    update(running, old, "old")
    yield running
    running.client.post("/wake_up")
    running.client.post("/continue_generation")


def update(server: Server, path: Path, label: str) -> None:
    body = {"path": str(path), "weight_version": label}
    reply = server.client.post("/update_weights_from_disk", json=body)
    assert reply.status_code == 200, reply.text


def generated(server: Server, prompt: list[int], most: int) -> list[int]:
    body = {
        "token_ids": prompt,
        "sampling_params": {"temperature": 0, "max_tokens": most, "ignore_eos": True},
    }
    reply = server.client.post("/inference/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def all_generated(
    server: Server, prompts: list[list[int]], most: list[int]
) -> list[list[int]]:
    """As `generated`, of requests that decode side by side."""
    with ThreadPoolExecutor(len(prompts)) as callers:
        return list(
            callers.map(lambda *asked: generated(server, *asked), prompts, most)
        )


class Stream(threading.Thread):
    """A client that reads the tokens of one request as they come."""

    def __init__(self, server: Server, number: int) -> None:
        super().__init__(daemon=True)
        self._server, self._number = server, number
        self.tokens: list[int] = []
        self.reasons: list[str] = []
        self.spans: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        body = {
            "model": "tiny",
            "prompt": PROMPTS[self._number],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "request_id": f"stream-{self._number}",
        }
        with self._server.client.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    self.tokens += choice.get("token_ids") or []
                    self.spans = choice.get("weight_versions") or self.spans
                    if choice["finish_reason"] is not None:
                        self.reasons.append(choice["finish_reason"])


def streaming(server: Server) -> list[Stream]:
    """Three streams that have begun in one step, and are far from their ends."""

    def num_waiting() -> int:
        reply = server.post("/pause_generation", {"mode": "retract"})
        return int(reply["num_waiting"])

    num_waiting()  # pauses
    streams = [Stream(server, number) for number in range(len(PROMPTS))]
    until(lambda: num_waiting() == len(streams), "the requests came")
    server.post("/continue_generation")
    until(lambda: all(stream.tokens for stream in streams), "the streams began")
    return streams


def released(server: Server, **body: Any) -> Any:
    reply = server.client.post(RELEASE, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def by_mode(server: Server) -> None:
    assert released(server, mode="retract")["num_retracted"] == 3


def by_pause(server: Server) -> None:
    server.client.post("/pause_generation", json={"mode": "retract"})
    released(server, tags=["kv_cache"])
    released(server, tags=["weights"])


def by_upstreams_sleep(server: Server) -> None:
    assert server.client.post("/sleep?level=1&mode=keep").status_code == 200


WAYS = [by_mode, by_pause, by_upstreams_sleep]

# The requests of two ranks are scheduled as those of one, so a run has less of two.
TWO = pytest.param(2, marks=pytest.mark.slow, id="two-ranks")
NUM_RANKS = [pytest.param(1, id="one-rank"), TWO]


def rounds() -> Iterator[Any]:
    """Every way to fall asleep, on one rank and on two."""
    for name, number in (("one-rank", 1), ("two-ranks", 2)):
        for way in WAYS:
            marks = () if number == 1 or way is by_mode else pytest.mark.slow
            yield pytest.param(number, way, id=f"{name}-{way.__name__}", marks=marks)


@pytest.mark.parametrize(
    ("num_ranks", "fall_asleep"), [*rounds()], indirect=["num_ranks"]
)
def test_streams_continue_with_tokens_of_the_weights_that_arrived_during_sleep(
    server: Server, new: Path, fall_asleep: Callable[[Server], None]
) -> None:
    check_round(server, fall_asleep, lambda: update(server, new, "new"))


def check_round(
    server: Server,
    fall_asleep: Callable[[Server], None],
    bring: Callable[[], None],
) -> None:
    """Have streams live through a round in which `bring` makes the version `new`."""
    streams = streaming(server)
    fall_asleep(server)
    assert server.client.post(RESUME, json={"tags": ["weights"]}).status_code == 200
    bring()
    assert server.client.post(RESUME, json={"tags": ["kv_cache"]}).status_code == 200
    server.client.post("/continue_generation")
    for stream in streams:
        stream.join(timeout=120)
        assert stream.reasons == ["length"]
    counts = [stream.spans[0]["end"] for stream in streams]
    begun = [s.tokens[:count] for s, count in zip(streams, counts, strict=True)]
    ends = all_generated(
        server,
        [prompt + first for prompt, first in zip(PROMPTS, begun, strict=True)],
        [TOKENS - count for count in counts],
    )
    for stream, count, first, end in zip(streams, counts, begun, ends, strict=True):
        assert len(stream.tokens) == TOKENS
        assert stream.tokens == first + end
        told = [(s["version"], s["start"], s["end"]) for s in stream.spans]
        assert told == [("old", 0, count), ("new", count, TOKENS)]


@pytest.mark.parametrize("num_ranks", NUM_RANKS, indirect=True)
def test_a_stream_that_is_aborted_asleep_ends_at_once_and_the_others_go_on(
    server: Server,
) -> None:
    streams = streaming(server)
    released(server, mode="retract")
    reply = server.client.post("/abort_request", json={"rid": "stream-1"})
    assert reply.json()["num_aborted"] == 1
    streams[1].join(timeout=30)
    assert streams[1].reasons == ["abort"]
    server.client.post(RESUME)
    others = [streams[0], streams[2]]
    for stream in others:
        stream.join(timeout=120)
        assert stream.reasons == ["length"]
    expected = all_generated(server, [PROMPTS[0], PROMPTS[2]], [TOKENS] * 2)
    assert [stream.tokens for stream in others] == expected


def test_requests_that_a_pause_holds_in_place_are_not_lost_by_a_release(
    server: Server,
) -> None:
    streams = streaming(server)
    server.client.post("/pause_generation", json={"mode": "in_place"})
    refused = server.client.post(RELEASE)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "pause_conflict"
    assert "use mode 'retract'" in refused.json()["message"]
    refused = server.client.post("/release_kv_cache_memory")
    assert refused.status_code != 200
    server.client.post("/continue_generation")
    for stream in streams:
        stream.join(timeout=120)
    expected = all_generated(server, PROMPTS, [TOKENS] * 3)
    assert [stream.tokens for stream in streams] == expected


@pytest.mark.parametrize("num_ranks", NUM_RANKS, indirect=True)
def test_a_retracting_release_is_rejected_until_a_waiting_pause_has_ended(
    server: Server,
) -> None:
    streams = streaming(server)
    pausing = threading.Thread(
        target=lambda: server.client.post("/pause_generation", json={"mode": "wait"})
    )
    pausing.start()
    until(lambda: server.client.get("/is_paused").json()["is_paused"], "it pauses")
    refused = server.client.post(RELEASE, json={"mode": "retract"})
    assert (refused.status_code, "'wait'" in refused.json()["message"]) == (409, True)
    for stream in [*streams, pausing]:
        stream.join(timeout=120)
    assert released(server, mode="retract")["num_aborted"] == 0
