"""A server, and what its clients ask of it: the stage of the plays in `served`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.event_stream import events
from tests.support.serving import Server

KEY = "a-key-of-the-tests"
NEVER_S = 3600
"""How long a trainer that has died takes over a tensor."""
PATIENCE_S = 30.0
"""After which a client gives up waiting for a reply."""
DEADLINE_S = 5
"""Of updates whose trainer dies, where an engine knows of deadlines."""
LEASE_S = 5
"""Of pauses, where an engine knows of leases."""
PROMPT = list(range(3, 100))

Seen = dict[str, Any]


class Stream(threading.Thread):
    """A request in a thread: when its tokens came, and how it ended.

    Attributes:
        times: of every token, by `time.monotonic()`.
        last: the last chunk's choice.
        ended: the reason why it finished, or what went wrong.

    """

    def __init__(self, site: Site, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.site = site
        self.num_tokens = num_tokens
        self.times: list[float] = []
        self.last: Any = None
        self.ended: str | None = None
        self.start()
        while not self.times and self.is_alive():
            time.sleep(0.005)

    def run(self) -> None:
        body = request(self.num_tokens) | {"stream": True}
        try:
            with self.site.server.client.stream(
                "POST", "/inference/v1/generate", json=body
            ) as reply:
                for event in events(reply):
                    self.take(event)
        except httpx.HTTPError as error:
            self.ended = type(error).__name__
        self.ended = self.ended or "cut off"

    def take(self, chunk: dict[str, Any]) -> None:
        if "choices" not in chunk:
            self.ended = "an error"
            return
        (self.last,) = chunk["choices"]
        self.times += [time.monotonic()] * len(self.last["token_ids"] or ())
        self.ended = self.last["finish_reason"] or self.ended

    def between(self, begin: float, end: float) -> int:
        """How many tokens came in that time."""
        return sum(begin < moment < end for moment in self.times)


class Site:
    """A server, and what its clients ask of it."""

    def __init__(self, server: Server, old: Path, new: Path) -> None:
        self.server = server
        self.old = str(old)
        self.new = str(new)

    def call(
        self, path: str, body: Any = None, *, wait_s: float = 60, **options: Any
    ) -> Any:
        """POST a body, or GET: {status, body, seconds}; status `None` is no answer."""
        method = "GET" if body is None else "POST"
        begin = time.monotonic()
        try:
            reply = self.server.client.request(
                method, path, json=body, timeout=wait_s, **options
            )
            seen = {"status": reply.status_code, "body": content(reply)}
        except httpx.HTTPError as error:
            seen = {"status": None, "body": type(error).__name__}
        return seen | {"seconds": time.monotonic() - begin}

    def stranger(self, path: str, body: Any = None) -> Any:
        """The status that the same call has without a key."""
        method = "GET" if body is None else "POST"
        url = self.server.url + path
        return httpx.request(method, url, json=body, timeout=30).status_code

    def pause(self) -> Any:
        return self.call("/pause?mode=keep&clear_cache=false", {})

    def send(self, *, wait_s: float = 60, **faults: Any) -> Any:
        info = {"update_info": {"path": self.new, **faults}}
        return self.call("/update_weights", info, wait_s=wait_s)

    def finish(self, label: str, *, wait_s: float = 60) -> Any:
        body = {"weight_version": label}
        return self.call("/finish_weight_update", body, wait_s=wait_s)

    def tokens(self, *, wait_s: float = 30, **options: Any) -> Any:
        """Sixteen tokens, or the status that came instead."""
        reply = self.call(
            "/inference/v1/generate", request(16), wait_s=wait_s, **options
        )
        if reply["status"] != 200:
            return reply["status"]
        return reply["body"]["choices"][0]["token_ids"]

    def tokens_of_each(self) -> list[Any]:
        """The same of each of two engines."""
        return [self.tokens(headers={"X-data-parallel-rank": n}) for n in "01"]

    def lives(self) -> bool:
        """Whether it still is there after a moment, and answers a request."""
        time.sleep(1)
        return isinstance(self.tokens(wait_s=PATIENCE_S), list)

    def tidy(self) -> None:
        """Leave nothing open, and serve what was served in the beginning."""
        self.call("/abort_weight_update", {})
        self.call("/continue_generation", {})
        body = {"path": self.old, "weight_version": "old"}
        self.call("/update_weights_from_disk", body)


def content(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text[-2000:]


def request(num_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"token_ids": PROMPT, "sampling_params": sampling}


@contextmanager
def site(
    old: Path, new: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[Site]:
    """A server with its control routes open to a key, and a transport."""
    always = (
        *("--weight-transfer-config", '{"backend": "other"}'),
        *("--worker-extension-cls", "tests.support.engines.transport.Extension"),
        *("--api-key", KEY, "--dtype", "float32"),
    )
    env = {"VLLM_SERVER_DEV_MODE": "1"} | (env or {})
    with Server(old, *always, *flags, env=env, key=KEY) as server:
        yield Site(server, old, new)
