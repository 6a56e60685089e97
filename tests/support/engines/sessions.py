"""A session whose input comes in chunks, ended by the engine, run as a script.

Usage: python -m tests.support.engines.sessions MODEL
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.engines import gentle
from tests.support.engines.script import tell

NUM_TOKENS = 200
NUM_LOOKS = 5
PATIENCE_S = 60


def params(count: int) -> SamplingParams:
    kind = RequestOutputKind.DELTA
    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, output_kind=kind
    )


def chunk(start: int) -> StreamingInput:
    return StreamingInput(prompt={"prompt_token_ids": list(range(start, start + 40))})


class Session:
    """One session; `said` of its input is known to the engine."""

    def __init__(self, engine: Any, name: str, count: int, num_chunks: int) -> None:
        self.said, self.is_left = 0, False
        self.goes_on = asyncio.Event()
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.task = asyncio.create_task(self._run(engine, name, count, num_chunks))

    async def _input(self, num_chunks: int) -> AsyncGenerator[StreamingInput, None]:
        try:
            for number in range(num_chunks):
                yield chunk(number)
                self.said += 1
            await self.goes_on.wait()
            yield chunk(7)
        except (asyncio.CancelledError, GeneratorExit):
            self.is_left = True
            raise

    async def _run(self, engine: Any, name: str, count: int, num_chunks: int) -> None:
        async for output in engine.generate(
            self._input(num_chunks), params(count), name
        ):
            (choice,) = output.outputs
            self.tokens += choice.token_ids
            self.finish_reason = choice.finish_reason


async def aborted(
    engine: Any, name: str, count: int, num_chunks: int
) -> dict[str, Any]:
    """A session that the engine ends when it has said something."""
    session = Session(engine, name, count, num_chunks)
    # Until some of the first answer, or all of it if the next chunk is to be awaited.
    num_awaited = count if count < NUM_TOKENS else 5
    while len(session.tokens) < num_awaited or session.said < num_chunks:
        await asyncio.sleep(0.01)
    await engine.pause_generation(mode="abort")
    num_tokens = len(session.tokens)
    await engine.continue_generation()
    session.goes_on.set()
    await asyncio.wait_for(session.task, PATIENCE_S)
    return {
        "finish_reason": session.finish_reason,
        "num_more": len(session.tokens) - num_tokens,
        "is_left": session.is_left,
    }


async def abandoned(engine: Any, name: str) -> int:
    """How often a pause finds nothing of a session that its user aborts at a chunk."""
    session = Session(engine, name, NUM_TOKENS, 1)
    while len(session.tokens) < 5:
        await asyncio.sleep(0.01)
    session.goes_on.set()  # its input gives the chunk out before it is told of the end
    await engine.abort(name)
    await asyncio.wait_for(session.task, PATIENCE_S)
    for _ in range(NUM_LOOKS):
        # Refused, while there is a session.
        await engine.pause_generation(mode="retract")
        await engine.continue_generation()
        await asyncio.sleep(0.05)
    return NUM_LOOKS


async def answered(engine: Any, name: str) -> int:
    """How many tokens a request is answered with, and then a session of two chunks."""
    count = 0
    async with asyncio.timeout(PATIENCE_S):
        async for output in engine.generate(chunk(3).prompt, params(4), name):
            count += len(output.outputs[0].token_ids)
    await aborted(engine, name, NUM_TOKENS, 1)
    session = Session(engine, name, 4, 1)
    session.goes_on.set()
    await asyncio.wait_for(session.task, PATIENCE_S)
    return count + len(session.tokens)


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=8,
            enforce_eager=True,
            disable_log_stats=True,
            logits_processors=[gentle.NAME],
        )
    )
    seen = {
        "running": await aborted(engine, "a", NUM_TOKENS, 1),
        "with a chunk that waits": await aborted(engine, "b", NUM_TOKENS, 2),
        "awaiting a chunk": await aborted(engine, "c", 4, 1),
    }
    after = [
        token
        async for output in engine.generate(
            {"prompt_token_ids": list(range(40))}, params(4), "d"
        )
        for token in output.outputs[0].token_ids
    ]
    seen["after"] = len(after)
    seen["abandoned"] = await abandoned(engine, "e")
    # The ids of aborted ones once more: that of a request, and that of a session.
    for name in ("b", "c"):
        seen[f"{name} again"] = await answered(engine, name)
    seen["states"] = len(engine.output_processor.request_states)
    tell(seen)
    engine.shutdown()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    asyncio.run(main(sys.argv[1]))
