"""Gaps of streams while a server reads large bodies: `python -m benchmarks.bodies`.

A server decodes, and a client in another process records when the tokens of its streams
arrive. Meanwhile requests with large bodies arrive: manifests and tensor lists with as
many tensors as large models have, and tensors in base64. The benchmark measures the
largest gap between two tokens from the sending of a body until every rank has read it.
Beside it stands the largest gap of an equally long time before, without a body.

Most manifests have names that the model lacks, and are rejected. One manifest has the
model's own names, and is accepted. Its model is a small dense one. With `--experts N`
it is a mixture with N experts of three tensors in each layer. Kernels on a GPU take up
to 512 experts, so there `--layers` makes the names many.

On few cores, every other process costs the server time. So one row has no body: an
unrelated process computes for some seconds.

Every update is aborted when it has been read, so none is committed. `--also
NAME=PYTHON` measures another installation, such as an earlier commit, in turns with
this one. vLLM has no manifests, so there is no arm of upstream.
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
from safetensors import safe_open
from safetensors.torch import save, save_file

from benchmarks.checkpoint import CONFIG, make_checkpoint
from benchmarks.machine import Usage, facts

OUT = Path("out/bench")
CALM = Path(__file__).parents[1] / "tests" / "support" / "calm"
START_S, READ_S = 300.0, 120.0
SETTLE_S = 1.0
"""How long a body is looked after once it has been read."""
NUM_STREAMS = 2
"""One begins anew when the other is in its middle, so that one is always there."""
SIZES = (400, 19_000, 46_000, 91_000)
COMPUTE_S = 4.0
FEW_CORES = 8
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

HIDDEN, INTERMEDIATE, HEAD_DIM = 128, 64, 64
"""Of the mixture of experts, which has many tensors and few bytes."""

console = Console()


@dataclass
class Found:
    """The measurement of one body."""

    num_bytes: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    """The largest of each round."""
    alone_ms: list[float] = field(default_factory=list)
    """The largest of as long a time just before it."""
    seconds: list[float] = field(default_factory=list)
    """From the moment a body was sent until every rank had read it."""

    def row(self) -> dict[str, Any]:
        """The measurement as a row of the result file."""
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

    def __init__(self, name: str, python: str, model: Path, *, graphs: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=600)
        self.found: dict[str, Found] = {}
        self._lasted: dict[str, float] = {}
        """How long each body was looked after."""
        self._tokens: list[tuple[float, float]] = []
        self._log = OUT / f"bodies-{name}.log"
        words = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"),
            *("--served-model-name", "bench", "--skip-tokenizer-init"),
            *([] if graphs else ["--enforce-eager"]),
            *("--weight-transfer-config", '{"backend": "local"}'),
        ]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        if len(os.sched_getaffinity(0)) < FEW_CORES:
            # There, vLLM's loops around `sched_yield` stop all others for seconds.
            paths = str(CALM), os.environ.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = os.pathsep.join(paths)
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
        # As long as the last time, so that no other body's gap is among those alone.
        time.sleep(self._lasted.get(name, 0.0))
        began = time.monotonic()
        send(self)
        read = time.monotonic()
        time.sleep(SETTLE_S)
        ended = time.monotonic()
        self._lasted[name] = ended - began
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
        """Make a control call; `body` is JSON, or is encoded here."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self.client.post(path, content=raw, headers=headers)

    def wait_for_ranks(self) -> None:
        """Wait until every rank has read the body, or the update has ended."""
        until = time.monotonic() + READ_S
        while time.monotonic() < until:
            active = self.client.get("/weight_update").json()["active"]
            if active is None or active["waits_for"] == "trainer":
                return
            time.sleep(0.02)
        raise SystemExit("the ranks do not come to an end")


def make_experts(folder: Path, num_experts: int, num_layers: int) -> None:
    """Make the checkpoint of a mixture of experts in `folder`, unless it is there."""
    file = folder / "model.safetensors"
    if file.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INTERMEDIATE,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], HIDDEN),
        "lm_head.weight": (CONFIG["vocab_size"], HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(num_layers):
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (2 * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 2 * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate": (num_experts, HIDDEN),
        }
        for expert in range(num_experts):
            layer[f"mlp.experts.{expert}.gate_proj"] = (INTERMEDIATE, HIDDEN)
            layer[f"mlp.experts.{expert}.up_proj"] = (INTERMEDIATE, HIDDEN)
            layer[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, INTERMEDIATE)
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    tensors = {n: (0.1 * torch.randn(shape)).bfloat16() for n, shape in shapes.items()}
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.rename(file)


def _own_entries(model: Path) -> list[dict[str, Any]]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return [
            {
                "name": name,
                "shape": file.get_slice(name).get_shape(),
                "dtype": "bfloat16",
            }
            for name in file.keys()  # noqa: SIM118
        ]


def bodies(model: Path, sizes: list[int], megabytes: int) -> dict[str, tuple[int, Any]]:
    """Name → bytes of a body, and how it is sent."""
    made: dict[str, tuple[int, Any]] = {}
    own = _own_entries(model)
    for told, entries in (
        (f"manifest of the model's {len(own):,} tensors", own),
        *((f"manifest, {size:,} tensors", _entries(size)) for size in sizes),
    ):
        manifest = json.dumps({"manifest": {"format": 1, "tensors": entries}})
        made[told] = _begun(manifest.encode())
    info = _announcement(max(sizes))
    made[f"announcement, {max(sizes):,} tensors"] = _announced(info)
    made[f"{megabytes} MB of tensors in base64"] = _tensors(megabytes)
    made["no body: another process computes"] = 0, _compute
    return made


def _compute(_: Arm) -> None:
    loop = (
        f"import time\nend = time.time() + {COMPUTE_S}\nwhile time.time() < end: pass"
    )
    subprocess.run([sys.executable, "-c", loop], check=True)


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
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, or compile")
    parser.add_argument("--only", nargs="+", help="bodies whose name has one of these")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PYTHON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    model = OUT / f"bodies-{options.experts}-{options.layers}"
    OUT.mkdir(parents=True, exist_ok=True)
    if options.experts:
        make_experts(model, options.experts, options.layers)
    else:
        make_checkpoint(model, 0)
    pythons = {"ours": sys.executable} | dict(
        each.split("=", 1) for each in options.also
    )
    made = bodies(model, options.sizes, options.megabytes)
    if options.only:
        made = {
            name: body
            for name, body in made.items()
            if any(word in name for word in options.only)
        }
    found: dict[str, Any] = {}
    others = 0.0
    # One after the other: two servers would share the cores of one.
    for name, python in pythons.items():
        with ExitStack() as stack:
            arm = stack.enter_context(Arm(name, python, model, graphs=options.graphs))
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
        "experts": options.experts,
        "layers": options.layers,
        "graphs": options.graphs,
        "arms": found,
        "machine": facts() | {"others_cores": round(others, 2)},
    }
    (OUT / "bodies.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    console.print(f"Written: {OUT}/bodies.json")


if __name__ == "__main__":
    main()
