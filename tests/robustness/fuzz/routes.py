"""`python -m tests.robustness.fuzz.routes --requests 20000`: the routes over a socket,
no engine.

The requests of requests.py, to a server whose engine encodes what it is asked, as
vLLM would to send it, and then says yes to everything.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import uvicorn

from tests.robustness.fuzz.requests import (
    KEY,
    ONE_EACH,
    PATIENCE_S,
    bodies,
    drawn,
    verdict,
)
from tests.support.route_stub import Engine, served
from vllm.inflight.config import ADMIN_KEY_ENV


class Encoding(Engine):
    """An engine that a call has to be sent to."""

    def __init__(self) -> None:
        super().__init__()
        model = self.vllm_config.model_config
        model.model = model.tokenizer = "m"
        model.runner_type, model.hf_config = "generate", SimpleNamespace()

    async def call_utility_all_async(
        self, name: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        msgspec.msgpack.encode((name, method, body))
        self.asked.clear()
        (reply,) = await super().call_utility_all_async(name, method, body)
        reply["ok"]["path"] = None
        return [reply]


def main() -> int:
    """Send them; 1 if one had no proper answer."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    os.environ[ADMIN_KEY_ENV] = KEY
    config = uvicorn.Config(served(Encoding()), port=0, log_level="error")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    rng, known = random.Random(asked.seed), bodies("/models/a")
    codes: Counter[int] = Counter()
    wrong: Counter[str] = Counter()
    with (
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=ONE_EACH
        ) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        requests = (drawn(rng, known) for _ in range(asked.requests))
        for reply in pool.map(lambda request: client.request(**request), requests):
            codes[reply.status_code] += 1
            if (problem := verdict(reply)) is not None:
                if problem not in wrong:
                    print(
                        f"{problem}: {reply.request.url} {reply.request.content!r:.600}"
                    )
                wrong[problem] += 1
    server.should_exit = True
    print(f"{codes.total():,} requests, by status: {dict(sorted(codes.items()))}")
    print(f"{wrong.total()} without a proper answer: {dict(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
