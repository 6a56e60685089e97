"""Requests outlive a trainer's turns: the engine sleeps half-way through its streams.

    python -m examples.colocated_round

In each round the requests go back to the queue, and the engine gives its memory back.
The trainer uses it. Then the weights wake up, an update replaces them, and the KV cache
wakes up. Each request goes on from the tokens that it has. Sleep needs a GPU: on a CPU
the same round runs as a pause.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from typing import Any

import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from examples.tiny_model import MAX_LENGTH, PROMPT, Trainer, make_checkpoint
from vllm.inflight.trainer import Publisher

GIB = 1 << 30
HAS_GPU = torch.cuda.is_available()
TURNS_AT = (4, 36, 68)
"""Tokens of the first request when the trainer takes each of its turns."""
TOKENS = MAX_LENGTH - len(PROMPT)
NUM_SHOWN = 96


def free_gib() -> float:
    """Free memory of the GPU in GiB; 0 without one."""
    return torch.cuda.mem_get_info()[0] / GIB if HAS_GPU else 0.0


class Stream:
    """One request, and what has come of it so far."""

    def __init__(self, engine: AsyncLLM, num_tokens: int = TOKENS) -> None:
        self.choice: Any = None
        self._engine = engine
        self._num_tokens = num_tokens
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=self._num_tokens, ignore_eos=True
        )
        async for chunk in self._engine.generate(PROMPT, params, str(uuid.uuid4())):
            self.choice = chunk.outputs[0]

    async def reaches(self, num_tokens: int) -> None:
        """Wait until there are so many tokens."""
        while self.choice is None or len(self.choice.token_ids) < num_tokens:
            if self.task.done():
                self.task.result()  # raises what went wrong
                return
            await asyncio.sleep(0.001)


async def take_turn(
    engine: Any, trainer: Trainer, publisher: Publisher, stream: Stream
) -> None:
    """Let the trainer have the memory, while the requests wait."""
    awake = free_gib()
    # An AsyncLLM has these methods from vllm-inflight.
    await engine.pause_generation(mode="retract")
    if HAS_GPU:
        await engine.release_memory_occupation()
    num_tokens = len(stream.choice.token_ids)
    loss = await asyncio.to_thread(trainer.train, 15)
    print(
        f"step {trainer.step}, loss {loss:.2f}: requests waited with {num_tokens} "
        f"tokens, and {free_gib() - awake:.1f} GiB more were free"
    )
    if HAS_GPU:
        await engine.wake_up(["weights"])
    await asyncio.to_thread(
        publisher.publish, f"step-{trainer.step}", step=trainer.step
    )
    if HAS_GPU:
        await engine.wake_up(["kv_cache"])
    await engine.continue_generation()


async def main() -> None:
    """Take three turns under the same requests, and show which version wrote what."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(folder)
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                folder,
                dtype="float32",
                enforce_eager=True,
                max_model_len=MAX_LENGTH,
                gpu_memory_utilization=0.3,
                enable_sleep_mode=HAS_GPU,
                weight_transfer_config={"backend": "local"},
            )
        )
        trainer = Trainer(model.cuda() if HAS_GPU else model)
        try:
            with Publisher(engine, trainer.model) as publisher:
                streams = [Stream(engine) for _ in range(4)]
                for num_tokens in TURNS_AT:
                    await streams[0].reaches(num_tokens)
                    await take_turn(engine, trainer, publisher, streams[0])
                await asyncio.gather(*(stream.task for stream in streams))
                new = Stream(engine, NUM_SHOWN)
                await new.task
            for span in streams[0].choice.weight_versions:
                text = streams[0].choice.text[span.start : span.end]
                shown = text[:NUM_SHOWN] + "…" * (len(text) > NUM_SHOWN)
                print(f"  {span.start:3}-{span.end:<3} {span.version:8} {shown!r}")
            print(f"  a new request  {new.choice.text!r}")
        finally:
            engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
