"""What keeping KV, recomputing it, and sending requests again cost at a commit.

`python -m benchmarks.gpu.pause_modes [--shape 8B]`. One engine decodes on one GPU.
For each context length, streams meet three changes of the weights. `in_place` keeps
their KV, and `retract` recomputes it. After `abort` each client sends its prompt and
tokens again. The change is a rollback, which flips as a commit does and stages nothing.
No request finds KV of other weights in the prefix cache.

`--device cpu --shape tiny --contexts 64 128` runs the same on a CPU, in a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from benchmarks.shapes import SHAPES, write_shape

IN_PLACE, RETRACT, RESEND = MODES = ("in_place", "retract", "abort and resend")
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
GROWTH = 4096
"""Tokens that a stream may sample before its KV has no room left."""
WARM_TOKENS = 8
NORM = "model.norm.weight"

console = Console()


@dataclass
class Change:
    """One change of the weights, as its clients saw it; times are monotonic."""

    steady_from: float
    """Since when all streams have decoded, and nothing else has happened."""
    asked: float
    ended: float
    """The end of the window that is looked at."""
    num_recomputed: int
    """Positions whose KV was computed again."""
    began: list[float] = field(default_factory=list)
    """Per stream: when its first token of the new weights arrived."""
    arrivals: list[list[tuple[float, int]]] = field(default_factory=list)
    """Per stream: when how many tokens arrived."""


@dataclass
class Figures:
    """What one change cost."""

    next_token_median_s: float
    next_token_max_s: float
    num_recomputed: int
    tokens_per_s: float
    """Of all streams, before the change."""
    window_s: float
    lost_tokens: float
    """That the streams would have had more, at that rate."""
    lost_tokens_per_s: float
    """Of those, on average over the window."""
    lost_share: float


def figures(change: Change) -> Figures:
    """Plain arithmetic on the arrivals."""
    waits = [at - change.asked for at in change.began]
    before = _tokens(change.arrivals, change.steady_from, change.asked)
    rate = before / (change.asked - change.steady_from)
    window = change.ended - change.asked
    lost = rate * window - _tokens(change.arrivals, change.asked, change.ended)
    return Figures(
        next_token_median_s=median(waits),
        next_token_max_s=max(waits),
        num_recomputed=change.num_recomputed,
        tokens_per_s=rate,
        window_s=window,
        lost_tokens=lost,
        lost_tokens_per_s=lost / window,
        lost_share=lost / (rate * window),
    )


def _tokens(
    arrivals: Sequence[Sequence[tuple[float, int]]], start: float, end: float
) -> int:
    return sum(n for each in arrivals for at, n in each if start < at <= end)


def num_streams(context: int, room: int, most: int) -> int:
    """How many streams of a context length have room for their KV."""
    return max(1, min(most, room // (context + GROWTH)))


class Stream:
    """One client: what it has sent, and what has come."""

    def __init__(self, engine: Any, number: int, context: int, longest: int) -> None:
        self._engine, self._number, self._longest = engine, number, longest
        self._vocabulary = engine.model_config.get_vocab_size()
        self.prompt = [(7 * number + 3 * n) % self._vocabulary for n in range(context)]
        self.tokens: list[int] = []
        self.arrivals: list[tuple[float, int]] = []
        self.began: dict[int, float] = {}
        """Epoch of the weights: when the first token that they sampled arrived."""
        self.num_cached = 0
        self.num_sent = 0
        self._task: asyncio.Task[None] | None = None

    def send(self) -> None:
        """Send all that there is, prompt and tokens."""
        self._task = asyncio.create_task(self._read())

    def num_tokens_before(self, at: float) -> int:
        """How many tokens had come before a moment."""
        return len(self.tokens) - sum(n for when, n in self.arrivals if when >= at)

    def require_running(self) -> None:
        """Raise what ended the request, if it has ended."""
        assert self._task is not None
        if self._task.done():
            self._task.result()
            raise RuntimeError("a stream came to its end before its round did")

    async def ended(self) -> None:
        """Wait until the request has ended, for what reason ever."""
        assert self._task is not None
        await self._task

    async def stop(self) -> None:
        """End the request, if it still runs."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sent = self.prompt + self.tokens
        params = SamplingParams(
            temperature=0,
            max_tokens=self._longest - len(sent),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.num_sent += 1
        name = f"{len(self.prompt)}-{self._number}-{self.num_sent}"
        inputs = {"prompt_token_ids": sent}
        async for output in self._engine.generate(inputs, params, name):
            if came := output.outputs[0].token_ids:
                now = time.monotonic()
                self.arrivals.append((now, len(came)))
                self.tokens += came
                epoch = output.outputs[0].weight_versions[-1].epoch
                self.began.setdefault(epoch, now)
            self.num_cached = output.num_cached_tokens or 0


async def flow(streams: Sequence[Stream], num_tokens: int) -> None:
    """Wait until every stream has so many tokens more than now."""
    wanted = [len(stream.tokens) + num_tokens for stream in streams]
    while any(len(s.tokens) < n for s, n in zip(streams, wanted, strict=True)):
        await _a_moment(streams)


async def sampled_by(streams: Sequence[Stream], epoch: int) -> list[float]:
    """Wait until every stream has a token of these weights; when the first came."""
    while any(epoch not in stream.began for stream in streams):
        await _a_moment(streams)
    return [stream.began[epoch] for stream in streams]


async def _a_moment(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.require_running()
    await asyncio.sleep(0.005)


async def change(
    engine: Any, streams: Sequence[Stream], mode: str, steady_s: float
) -> Change:
    """Change the weights under the streams; return when all flow again."""
    for stream in streams:
        stream.arrivals.clear()
    await flow(streams, 1)
    steady_from = time.monotonic()
    await asyncio.sleep(steady_s)
    asked = time.monotonic()
    told = "abort" if mode == RESEND else mode
    lengths: list[int] = []
    reply = await engine.rollback_weights(mode=told)
    num_recomputed = 0
    if mode == RESEND:
        await asyncio.gather(*(stream.ended() for stream in streams))
        await engine.reset_prefix_cache()
        lengths = [len(s.prompt) + len(s.tokens) for s in streams]
        for stream in streams:
            stream.send()
    began = await sampled_by(streams, reply["epoch"])
    if mode == RESEND:
        num_recomputed = sum(lengths) - sum(stream.num_cached for stream in streams)
    elif mode == RETRACT:
        # All that a stream had; its first new token came from a step on all of it.
        num_recomputed = sum(
            len(s.prompt) + s.num_tokens_before(at)
            for s, at in zip(streams, began, strict=True)
        )
    await asyncio.sleep(steady_s)
    return Change(
        steady_from,
        asked,
        time.monotonic(),
        num_recomputed,
        began,
        [list(stream.arrivals) for stream in streams],
    )


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of every context length and mode."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    own: dict[str, Any] = {"gpu_memory_utilization": options.memory}
    if options.device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        own = {"enforce_eager": True, "block_size": 32}
    longest = max(options.contexts) + 2 * GROWTH
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=options.streams,
            disable_log_stats=True,
            **own,
        )
    )
    gc.collect()
    gc.freeze()
    try:
        await second_version(engine, folder)
        cache = engine.vllm_config.cache_config
        room = cache.num_gpu_blocks * cache.block_size
        console.print(f"room for the KV of {room:,} positions")
        found: dict[str, Any] = {}
        for context in options.contexts:
            count = num_streams(context, room, options.streams)
            rows = await at_context(engine, context, count, longest, options.steady)
            found[str(context)] = {"streams": count, "modes": rows}
            console.print(f"[dim]{context}: {json.dumps(rows[RETRACT])}")
        return found
    finally:
        engine.shutdown()


async def second_version(engine: Any, folder: Path) -> None:
    """Give the engine another version, and one to go back to."""
    import torch
    from safetensors.torch import save_file

    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    file = folder / "norm.safetensors"
    save_file({NORM: torch.full((width,), 0.5, dtype=torch.bfloat16)}, file)
    await engine.update_weights_from_disk(str(file), "second", subset=[NORM])


async def at_context(
    engine: Any, context: int, count: int, longest: int, steady_s: float
) -> dict[str, Any]:
    """The figures of all modes, on the same streams."""
    streams = [Stream(engine, number, context, longest) for number in range(count)]
    for stream in streams:
        stream.send()
    await flow(streams, WARM_TOKENS)
    rows = {}
    for mode in MODES:
        rows[mode] = asdict(figures(await change(engine, streams, mode, steady_s)))
    for stream in streams:
        await stream.stop()
    return rows


def show(title: str, report: dict[str, Any]) -> None:
    """The table: each mode's figures, and how many times those of `in_place`."""
    table = Table(title=title)
    for name in ("context", "streams", "mode"):
        table.add_column(name)
    for name in (
        "next token, s: median",
        "worst",
        "x in_place",
        "recomputed",
        "tokens/s before",
        "lost tokens",
        "lost tokens/s",
    ):
        table.add_column(name, justify="right")
    for context, found in report.items():
        least = found["modes"][IN_PLACE]["next_token_median_s"]
        for mode, row in found["modes"].items():
            table.add_row(
                context,
                str(found["streams"]),
                mode,
                f"{row['next_token_median_s']:.3f}",
                f"{row['next_token_max_s']:.3f}",
                f"{row['next_token_median_s'] / least:.1f}",
                f"{row['num_recomputed']:,}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['lost_tokens']:.0f}",
                f"{row['lost_tokens_per_s']:.0f} ({row['lost_share']:.0%})",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--streams", type=int, default=16, help="at most")
    parser.add_argument("--steady", type=float, default=1.0, help="seconds around each")
    parser.add_argument("--memory", type=float, default=0.92, help="of the GPU's, used")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    machine = facts()
    if options.device == "cuda":
        import torch

        machine["gpus"] = [torch.cuda.get_device_name(0)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        folder = write_shape(options.shape, Path(root))
        found = asyncio.run(measure(options, folder))
    report = {
        "machine": machine,
        "shape": options.shape,
        "seconds": round(time.monotonic() - began, 1),
        "contexts": found,
    }
    file = options.out / "gpu-pause-modes.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    show(f"{options.shape}: a change of the weights under load", found)
    console.print(f"Written: {file}, after {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
