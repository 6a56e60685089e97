"""A trainer in one process, `vllm serve` in another, HTTP between them.

python -m examples.serve_over_http         # starts a server of its own
python -m examples.serve_over_http URL     # uses one that serves this model:
    export VLLM_CPU_KVCACHE_SPACE=1        # on the CPU build
    python -m examples.tiny_model /tmp/tiny
    vllm serve /tmp/tiny --weight-transfer-config '{"backend": "local"}'
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from examples.tiny_model import PROMPT, Trainer, make_checkpoint
from vllm.inflight.trainer import Publisher

START_S = 300


@contextmanager
def served(folder: str, backend: str = "local") -> Iterator[str]:
    """Start a server, yield its URL, and end the server."""
    # Held until the server listens there, so that nobody else is given the port.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = str(held.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder]
    command += ["--host", "127.0.0.1", "--port", port, "--enforce-eager"]
    command += ["--dtype", "float32", "--gpu-memory-utilization", "0.3"]
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    url = f"http://127.0.0.1:{port}"
    print(f"starting vllm serve on {url} …")
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not is_up(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.5)
        held.close()
        yield url
    finally:
        held.close()
        server.terminate()
        server.wait()


def is_up(url: str) -> bool:
    """Whether a server answers there."""
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def say(url: str) -> None:
    """Print what the server generates, and the version that sampled it."""
    # The first answer of a server that has just started takes a while.
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    versions = [span["version"] for span in choice["weight_versions"]]
    print(f"  {versions} {PROMPT + choice['text']!r}")


def train(url: str, trainer: Trainer) -> None:
    """Publish three versions, and print what the server generates with each."""
    say(url)
    # The optimiser goes on while a version is on its way; if two are ready
    # before the engine is, the older one is left out.
    with Publisher(url, trainer.model, on_busy="latest") as publisher:
        for _ in range(3):
            loss = trainer.train(num_steps=20)
            print(f"step {trainer.step}: loss {loss:.2f}")
            label = f"step-{trainer.step}"
            future = publisher.publish(label, step=trainer.step, block=False)
        outcome = future.result()
    print(
        f"{outcome.version} is live: {outcome.num_bytes >> 10} KiB in "
        f"{outcome.seconds['total']:.2f} s, gap {outcome.gap_ms:.2f} ms"
    )
    say(url)
    print("GET /weight_info:", httpx.get(f"{url}/weight_info").json())


def main() -> None:
    """Use the server in the arguments, or start one."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_checkpoint(folder))
        if len(sys.argv) > 1:
            train(sys.argv[1], trainer)
            return
        with served(folder) as url:
            train(url, trainer)


if __name__ == "__main__":
    main()
