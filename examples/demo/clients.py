"""The clients: they stream completions without pause while the weights change.

`python -m examples.demo.clients --streams 8 --seed 0`, started by arm.py. A client
asks for its next completion as soon as it has the last token of one. It records when
every token arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from examples.demo import child
from examples.demo.learning import corpus
from examples.demo.rollout import LIMITS, MODEL, TIMEOUT_S

NUM_TOKENS, PROMPT_BYTES = 384, 32
DATA, DONE = b"data: ", b"[DONE]"


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every event of a stream, as it arrives.

    `aiter_lines` also ends a line at characters that the text of a token may have,
    such as U+2028 and U+0085. Events end with an empty line, and JSON has none.
    """
    rest = b""
    async for data in reply.aiter_bytes():
        *complete, rest = (rest + data).split(b"\n\n")
        for event in complete:
            if event.startswith(DATA) and not event.endswith(DONE):
                yield json.loads(event.removeprefix(DATA))


async def stream(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    """Stream one completion; return its tokens' arrival times and version spans."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    arrivals: list[tuple[float, int]] = []
    spans: list[dict[str, Any]] = []
    error = None
    started = time.time()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for chunk in events(reply):
                if "error" in chunk:
                    raise RuntimeError(chunk["error"])
                for choice in chunk["choices"]:
                    if count := len(choice["token_ids"] or ()):
                        arrivals.append((round(time.time(), 5), count))
                    spans = choice["weight_versions"] or spans
        count = sum(count for _, count in arrivals)
        if count != NUM_TOKENS or spans[-1]["end"] != NUM_TOKENS:
            raise RuntimeError(f"{count} tokens arrived, version spans {spans}")
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return {
        "started": started,
        "ended": time.time(),
        "arrivals": arrivals,
        "spans": spans,
        "error": error,
    }


async def stream_on(
    client: httpx.AsyncClient, number: int, seed: int, stopped: asyncio.Event
) -> None:
    """Run one client: completion after completion until `stopped` is set."""
    rng = random.Random(f"{seed} {number}")
    while not stopped.is_set():
        prompt = corpus.text_prompt(rng, PROMPT_BYTES)
        child.report("request", client=number, **await stream(client, prompt))


async def stream_all(num_streams: int, seed: int) -> None:
    """Run all clients, from the parent's order until the parent closes the pipe."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    orders = child.orders(at_end=lambda: loop.call_soon_threadsafe(stopped.set))
    for order in orders:
        async with httpx.AsyncClient(
            base_url=order["url"], timeout=TIMEOUT_S, limits=LIMITS
        ) as client:
            await asyncio.gather(
                *(stream_on(client, n, seed, stopped) for n in range(num_streams))
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    flags = parser.parse_args()
    asyncio.run(stream_all(flags.streams, flags.seed))
