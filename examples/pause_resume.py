"""A stream is paused and resumed: no token arrives in between, and none is lost.

    python -m examples.pause_resume

The weights are updated during the pause. With `in_place` the stream goes on with its
old KV. With `retract` its KV is computed again by the new weights.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from examples.tiny_model import MAX_LENGTH, PROMPT, make_checkpoint

NUM_TOKENS = MAX_LENGTH - len(PROMPT)
NUM_BEFORE = 32
"""Tokens after which it is paused."""
PAUSE_S = 1.0


@dataclass
class Stream:
    """The tokens of one request, and the arrival time of each."""

    arrivals: list[float] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, engine: AsyncLLM) -> None:
        """Read the stream to its end."""
        params = SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for chunk in engine.generate(PROMPT, params, str(uuid.uuid4())):
            output = chunk.outputs[0]
            self.arrivals += [time.monotonic()] * len(output.token_ids)
            self.spans = output.weight_versions
            if len(self.arrivals) >= NUM_BEFORE:
                self.begun.set()

    def gap(self) -> float:
        """The longest wait for a token, in seconds."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max(after - before for before, after in pairs)


async def paused_in_the_middle(engine: AsyncLLM, mode: str, path: str) -> None:
    """Start a stream, pause, update and resume; print the result."""
    stream = Stream()
    reading = asyncio.create_task(stream.read(engine))
    await stream.begun.wait()
    began = time.monotonic()
    # If this program died now, the engine would go on by itself after 30 s.
    await engine.pause_generation(mode=mode, flush_cache=False, lease_s=30)
    await engine.update_weights_from_disk(path, f"after-{mode}")
    # By now all has arrived that was made before the pause.
    stopped = time.monotonic()
    await asyncio.sleep(PAUSE_S)
    ended = time.monotonic()
    await engine.continue_generation()
    await reading
    during = sum(stopped < moment < ended for moment in stream.arrivals)
    print(f"{mode}: paused {ended - began:.2f} s after {stream.spans[0].end} tokens")
    print(f"  tokens during the pause: {during}")
    print(f"  longest wait for a token: {stream.gap():.2f} s")
    print(f"  tokens in all: {len(stream.arrivals)} of {NUM_TOKENS}")
    for span in stream.spans:
        print(f"  {span.start:3}-{span.end:<3} {span.version}")


async def main() -> None:
    """Both modes, one after the other."""
    with tempfile.TemporaryDirectory() as old, tempfile.TemporaryDirectory() as new:
        make_checkpoint(old, seed=0)
        make_checkpoint(new, seed=1)
        args = AsyncEngineArgs(
            old, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3
        )
        engine = AsyncLLM.from_engine_args(args)
        try:
            await paused_in_the_middle(engine, "in_place", new)
            await paused_in_the_middle(engine, "retract", old)
        finally:
            engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
