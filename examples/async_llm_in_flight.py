"""Weights change while tokens flow: a trainer's thread beside a streaming engine.

    python -m examples.async_llm_in_flight

Streams are never interrupted. At the end of each, the engine tells which version of
the weights wrote which part of it; those that lived through an update are shown.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from examples.tiny_model import MAX_LENGTH, PROMPT, Trainer, make_checkpoint
from vllm.inflight.trainer import Publisher

NUM_SHOWN = 64


def train(trainer: Trainer, publisher: Publisher) -> None:
    """Runs in a thread; takes the next step while the last one is on its way."""
    futures = []
    for _ in range(4):
        loss = trainer.train(num_steps=15)
        label = f"step-{trainer.step}"
        futures.append(publisher.publish(label, step=trainer.step, block=False))
        print(f"{label}: loss {loss:.2f}, on its way")
    for future in futures:
        outcome = future.result()
        print(f"{outcome.version}: live after {outcome.seconds['total']:.2f} s")


async def stream(engine: AsyncLLM) -> Any:
    """Read one stream to its end; returns its last chunk, which has all spans."""
    params = SamplingParams(max_tokens=MAX_LENGTH - len(PROMPT), ignore_eos=True)
    last: Any = None
    async for chunk in engine.generate(PROMPT, params, str(uuid.uuid4())):
        last = chunk.outputs[0]
    return last


def show(number: int, choice: Any) -> None:
    """Print which version wrote which part of a stream."""
    print(f"stream {number}:")
    for span in choice.weight_versions:
        part = choice.text[span.start : span.end]  # a token here is a letter
        shown = part[:NUM_SHOWN] + "…" * (len(part) > NUM_SHOWN)
        print(f"  {span.start:3}-{span.end:<3} {span.version:8} {shown!r}")


async def main() -> None:
    """Stream for as long as the training takes."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_checkpoint(folder))
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                folder,
                dtype="float32",
                enforce_eager=True,
                max_model_len=MAX_LENGTH,
                gpu_memory_utilization=0.3,
                weight_transfer_config={"backend": "local"},
            )
        )
        try:
            with Publisher(engine, trainer.model) as publisher:
                training = asyncio.create_task(
                    asyncio.to_thread(train, trainer, publisher)
                )
                number = 0
                while not training.done():
                    number += 1
                    choice = await stream(engine)
                    if len(choice.weight_versions) > 1:
                        show(number, choice)
                await training  # raises what went wrong in it
                show(number + 1, await stream(engine))
        finally:
            engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
