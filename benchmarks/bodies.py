"""Large bodies beside a stream: `python -m benchmarks.bodies`.

A server decodes, and a client of another process notes when the tokens of its streams
arrive. Meanwhile requests with large bodies come: manifests of as many tensors as large
models have, announcements of as many, and tensors in base64. What is measured is the
largest gap between two tokens of a stream from the moment a body is sent until every
rank has read it, beside the largest of as long a time just before, when nothing came.

Nothing is committed: each update is aborted when it has been read. `--also NAME=PYTHON`
measures another installation, such as one of an earlier commit, in turns with this one.
vLLM as it is has no manifests, so there is no arm of upstream's.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save

from benchmarks.checkpoint import CONFIG
from benchmarks.machine import Usage, facts

OUT = Path("out/bench")
START_S, READ_S = 300.0, 120.0
SETTLE_S = 1.0
"""How long a body is looked after once it has been read."""
NUM_STREAMS = 2
"""One begins anew when the other is in its middle, so that one is always there."""
SIZES = (400, 19_000, 46_000, 91_000)
MEGABYTES = 64
"""Of the tensors that come in base64."""

READER = """if True:
    import json, sys, threading, time
    import httpx

    lock = threading.Lock()

    def stream(number):
        asked = {"model": "bench", "token_ids": [number] * 8, "stream": True,
                 "sampling_params": {"max_tokens": 8000, "temperature": 0,
                                     "ignore_eos": True, "detokenize": False}}
        time.sleep(5 * number)
        while True:
            with httpx.stream("POST", sys.argv[1], json=asked, timeout=None) as reply:
                before = None
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if before is not None:
                            with lock:
                                print(json.dumps([before, now]), flush=True)
                        before = now

    for number in range(int(sys.argv[2])):
        threading.Thread(target=stream, args=(number,), daemon=True).start()
    sys.stdin.read()
"""
"""Each line says when two tokens of one stream came, one after the other."""

console = Console()


@dataclass
class Found:
    """What was measured of one body."""

    num_bytes: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    """The largest of each round."""
    alone_ms: list[float] = field(default_factory=list)
    """The largest of as long a time just before it."""
    seconds: list[float] = field(default_factory=list)
    """From the moment a body was sent until every rank had read it."""

    def row(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "bytes": self.num_bytes,
            "gap_median_ms": round(median(self.gaps_ms), 2),
            "gap_max_ms": round(max(self.gaps_ms), 2),
            "alone_median_ms": round(median(self.alone_ms), 2),
            "alone_max_ms": round(max(self.alone_ms), 2),
            "seconds": round(median(self.seconds), 3),
            "gaps_ms": [round(gap, 2) for gap in self.gaps_ms],
            "gaps_alone_ms": [round(gap, 2) for gap in self.alone_ms],
        }


class Arm:
    """A server of one installation, and the streams that it serves."""

    def __init__(self, name: str, python: str, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=600)
        self.found: dict[str, Found] = {}
        self._tokens: list[tuple[float, float]] = []
        self._log = OUT / f"bodies-{name}.log"
        words = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"),
            *("--served-model-name", "bench", "--skip-tokenizer-init"),
            *("--load-format", "dummy", "--enforce-eager"),
            *("--weight-transfer-config", '{"backend": "local"}'),
        ]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
            )

    def __enter__(self) -> Arm:
        until = time.monotonic() + START_S
        while not self._answers():
            if self._server.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise SystemExit(f"the server did not start; see {self._log}")
            time.sleep(0.5)
        path = f"{self.url}/inference/v1/generate"
        self._reader = subprocess.Popen(
            [sys.executable, "-c", READER, path, str(NUM_STREAMS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        while len(self._tokens) < 100 * NUM_STREAMS:
            time.sleep(0.1)
        time.sleep(5 * NUM_STREAMS)
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_reader"):
            self._reader.kill()
            self._reader.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self.client.close()

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return bool(self.client.get("/health").status_code == 200)
        return False

    def _read(self) -> None:
        assert self._reader.stdout is not None
        for line in self._reader.stdout:
            self._tokens.append(tuple(json.loads(line)))

    def measure(self, name: str, num_bytes: int, send: Callable[[Arm], None]) -> None:
        """Send a body, and note the largest gap until it has been read."""
        found = self.found.setdefault(name, Found(num_bytes))
        began = time.monotonic()
        send(self)
        read = time.monotonic()
        time.sleep(SETTLE_S)
        ended = time.monotonic()
        self.post("/abort_weight_update", {})
        time.sleep(SETTLE_S)
        found.gaps_ms.append(self._largest_ms(began, ended))
        found.alone_ms.append(self._largest_ms(2 * began - ended, began))
        found.seconds.append(read - began)
        console.print(
            f"[dim]{self.name}, {name}: gap {found.gaps_ms[-1]:.1f} ms (alone "
            f"{found.alone_ms[-1]:.1f}), read after {found.seconds[-1]:.2f} s"
        )

    def _largest_ms(self, begin: float, end: float) -> float:
        gaps = [b - a for a, b in self._tokens[-100_000:] if b > begin and a < end]
        return 1e3 * max(gaps, default=float("nan"))

    def post(self, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
        """A control call; `body` as JSON, made before or here."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self.client.post(path, content=raw, headers=headers)

    def wait_for_ranks(self) -> None:
        """Until every rank has done what it was asked to, or the update has ended."""
        until = time.monotonic() + READ_S
        while time.monotonic() < until:
            active = self.client.get("/weight_update").json()["active"]
            if active is None or active["waits_for"] == "trainer":
                return
            time.sleep(0.02)
        raise SystemExit("the ranks do not come to an end")


def bodies(sizes: list[int], megabytes: int) -> dict[str, tuple[int, Any]]:
    """Name → bytes of a body, and how it is sent."""
    made: dict[str, tuple[int, Any]] = {}
    for size in sizes:
        manifest = json.dumps({"manifest": {"format": 1, "tensors": _entries(size)}})
        made[f"manifest, {size:,} tensors"] = _begun(manifest.encode())
    info = _announcement(max(sizes))
    made[f"announcement, {max(sizes):,} tensors"] = _announced(info)
    made[f"{megabytes} MB of tensors in base64"] = _tensors(megabytes)
    return made


def _entries(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"model.layers.{i // 1536}.mlp.experts.{i % 512}.{i % 3}.weight"
            f"_{i}",
            "shape": [2048, 7168],
            "dtype": "bfloat16",
            "digest": f"{i * 0x9E3779B97F4A7C15 % (1 << 128):032x}",
        }
        for i in range(count)
    ]


def _begun(raw: bytes) -> tuple[int, Any]:
    def send(arm: Arm) -> None:
        arm.post("/start_weight_update", raw)
        arm.wait_for_ranks()

    return len(raw), send


def _announcement(count: int) -> bytes:
    entries = _entries(count)
    info = {
        "names": [entry["name"] for entry in entries],
        "dtype_names": [entry["dtype"] for entry in entries],
        "shapes": [entry["shape"] for entry in entries],
    }
    # What the backend 'local' does not know is refused when a rank has read it.
    return json.dumps({"update_info": info}).encode()


def _announced(raw: bytes) -> tuple[int, Any]:
    def send(arm: Arm) -> None:
        arm.post("/start_weight_update", {})
        arm.post("/update_weights", raw)

    return len(raw), send


def _tensors(megabytes: int) -> tuple[int, Any]:
    named = {"unknown": torch.zeros(megabytes << 20, dtype=torch.uint8)}
    text = base64.b64encode(save(named)).decode()
    raw = json.dumps({"serialized_named_tensors": [text]}).encode()

    def send(arm: Arm) -> None:
        arm.post("/update_weights_from_tensor", raw)

    return len(raw), send


def show(report: dict[str, Any]) -> None:
    """The table."""
    table = Table(title="Largest gap of a stream, ms: median (worst) of the rounds")
    table.add_column("body")
    table.add_column("MB", justify="right")
    for name in report["arms"]:
        table.add_column(f"{name}: with it", justify="right")
        table.add_column("as long without", justify="right")
        table.add_column("read after, s", justify="right")
    first = next(iter(report["arms"].values()))
    for body in first:
        cells = [f"{first[body]['bytes'] / 1e6:.1f}"]
        for rows in report["arms"].values():
            row = rows[body]
            cells.append(f"{row['gap_median_ms']:.1f} ({row['gap_max_ms']:.1f})")
            cells.append(f"{row['alone_median_ms']:.1f} ({row['alone_max_ms']:.1f})")
            cells.append(f"{row['seconds']:.2f}")
        table.add_row(body, *cells)
    console.print(table)
    console.print(
        f"Other processes kept {report['machine']['others_cores']:.2f} of "
        f"{report['machine']['cores']} cores busy."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PYTHON")
    options = parser.parse_args()
    model = OUT / "bodies"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    pythons = {"ours": sys.executable} | dict(
        each.split("=", 1) for each in options.also
    )
    made = bodies(options.sizes, options.megabytes)
    found: dict[str, Any] = {}
    others = 0.0
    # One after the other: two servers would share the cores of one.
    for name, python in pythons.items():
        with ExitStack() as stack:
            arm = stack.enter_context(Arm(name, python, model))
            before = Usage.now(os.getpid())
            for number in range(options.rounds + 1):
                for body, (num_bytes, send) in made.items():
                    arm.measure(body, num_bytes, send)
                if number == 0:
                    arm.found.clear()  # that round makes what later ones use
            others = max(others, before.others(Usage.now(os.getpid())))
        found[name] = {body: each.row() for body, each in arm.found.items()}
    report = {
        "rounds": options.rounds,
        "arms": found,
        "machine": facts() | {"others_cores": round(others, 2)},
    }
    (OUT / "bodies.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    console.print(f"Written: {OUT}/bodies.json")


if __name__ == "__main__":
    main()
