"""The clients: they stream completions without pause while the weights change.

`python -m examples.demo.clients --streams 8 --seed 0`, started by arm.py. A client
that has its last token asks for the next completion at once. Every token is
written down with the time it came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import httpx

from examples.demo import child, corpus
from examples.demo.rollout import LIMITS, MODEL, TIMEOUT_S

NUM_TOKENS, PROMPT_BYTES = 384, 32
DATA, DONE = "data: ", "[DONE]"


async def stream(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    """One completion: when how many tokens came, and of which versions they are."""
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
            async for line in reply.aiter_lines():
                if not line.startswith(DATA) or line.endswith(DONE):
                    continue
                chunk = json.loads(line.removeprefix(DATA))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"])
                for choice in chunk["choices"]:
                    if count := len(choice["token_ids"] or ()):
                        arrivals.append((round(time.time(), 5), count))
                    spans = choice["weight_versions"] or spans
        count = sum(count for _, count in arrivals)
        if count != NUM_TOKENS or spans[-1]["end"] != NUM_TOKENS:
            raise RuntimeError(f"{count} tokens came, and their versions are {spans}")
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
    """One client: completion after completion until `stopped`."""
    rng = random.Random(f"{seed} {number}")
    while not stopped.is_set():
        prompt = corpus.text_prompt(rng, PROMPT_BYTES)
        child.report("request", client=number, **await stream(client, prompt))


async def stream_all(num_streams: int, seed: int) -> None:
    """All clients, from the parent's order until it lets go."""
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
