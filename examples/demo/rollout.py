"""Rollouts: groups of sampled answers, taken from the live server.

Requests run all the time, also while the optimiser works and while a version is
committed. So an answer may have tokens of two versions, and every token has the epoch
of its version and its log-probability under that version.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from examples.demo.learning import task
from examples.demo.learning.alphabet import decode, encode

MODEL = "demo"
TIMEOUT_S = 120.0
"""Seconds without a byte. They are many, since a busy host is no server fault."""

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""One connection per request: a kept one might be closed at its next use."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with the log-probability and epoch of each token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    epochs: list[int]
    reward: float


Group = list[Sample]
"""Answers to one prompt: each is judged against the mean of its group."""


def to_samples(prompt: str, reply: dict[str, Any]) -> Group:
    """The choices of a reply of `/v1/completions`, judged by the verifier."""
    return [
        Sample(
            prompt=encode(prompt),
            tokens=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            epochs=token_epochs(choice["weight_versions"]),
            reward=task.reward(prompt, decode(choice["token_ids"])),
        )
        for choice in reply["choices"]
    ]


def token_epochs(spans: Sequence[dict[str, Any]]) -> list[int]:
    """The epoch of every output token, from the spans of a choice."""
    return [span["epoch"] for span in spans for _ in range(span["start"], span["end"])]


class Rollouts:
    """Requests groups from a server in a thread, until `close`.

    Args:
        num_at_once: most prompts that are being answered, or whose answers wait to be
            taken. The bound keeps answers from growing stale.

    """

    def __init__(
        self,
        url: str,
        *,
        group_size: int,
        num_at_once: int,
        seed: int,
    ) -> None:
        self._url = url
        self._group_size = group_size
        self._num_at_once = num_at_once
        self._rng = random.Random(seed)
        self._groups: queue.Queue[Group | Exception] = queue.Queue(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()))
        self._thread.start()

    def take(self, count: int) -> list[Group]:
        """The next `count` groups, oldest first; raises what ended the thread."""
        groups = []
        while len(groups) < count:
            group = self._groups.get(timeout=TIMEOUT_S)
            if isinstance(group, Exception):
                raise group
            groups.append(group)
        return groups

    def close(self) -> None:
        """Stop the requests, and wait for the thread."""
        self._closed.set()
        self._thread.join()

    async def _ask(self) -> None:
        try:
            async with httpx.AsyncClient(
                base_url=self._url, timeout=TIMEOUT_S, limits=LIMITS
            ) as client:
                asking = [self._ask_on(client) for _ in range(self._num_at_once)]
                await asyncio.gather(*asking)
        except Exception as error:
            self._groups.put(error)

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not self._closed.is_set():
            prompt = task.draw_prompt(self._rng)
            body = completion(prompt, n=self._group_size, logprobs=0)
            reply = await client.post("/v1/completions", json=body)
            reply.raise_for_status()
            group = to_samples(prompt, reply.json())
            # Put without blocking the loop: the other prompts are on their way.
            while not self._closed.is_set():
                try:
                    self._groups.put_nowait(group)
                    break
                except queue.Full:
                    await asyncio.sleep(0.005)


def completion(prompt: str | list[str], **options: Any) -> dict[str, Any]:
    """The body of a completion that answers the task, sampled as it is trained."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": task.MAX_ANSWER_TOKENS,
        "temperature": 1.0,
        "return_token_ids": True,
        **options,
    }
