"""One arm of the benchmark: an engine, its streams, and one way to update it.

`python -m benchmarks.arm NAME CHECKPOINT FD`, started by benchmarks/cpu.py. An arm
is a process of its own, because a process patches vLLM once or never. For the arm
`upstream` the environment switches the plugin off.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.record import OURS, UPSTREAM, Plan, Record, Update

PROMPT_TOKENS, PROBE_TOKENS = 16, 32
READY = "ready"


class Arm:
    """An engine and its way of updating.

    Args:
        checkpoint: the folder that it starts from.
        update: how it gets a version.
        served: asked of each rank after a round, for `Record.served`.
        options: of the engine.

    """

    def __init__(
        self,
        checkpoint: str,
        update: Way,
        *,
        served: Callable[[Any], int] | None = None,
        **options: Any,
    ) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._update, self._served = update, served
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=checkpoint,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,  # the probe must be computed anew
                max_num_seqs=64,
                disable_log_stats=True,
                **options,
            )
        )

    async def carry_out(self, plan: Plan) -> Record:
        """One round: its streams decode from the first second to the last."""
        record = Record([[] for _ in range(plan.num_streams)])
        streams = [
            asyncio.create_task(self._stream(number, arrivals))
            for number, arrivals in enumerate(record.arrivals)
        ]
        while min(len(arrivals) for arrivals in record.arrivals) < plan.warm_tokens:
            await asyncio.sleep(0.01)
            _refuse_ended(streams)
        record.begun = time.monotonic()
        await asyncio.sleep(plan.steady_s)
        for checkpoint in plan.checkpoints:
            start = time.monotonic()
            facts = await self._update(self.engine, checkpoint)
            called = facts.pop("called", None)
            record.updates.append(Update(start, time.monotonic(), facts, called))
            rest = plan.steady_s
            if plan.every_s is not None:
                rest = max(0.0, start + plan.every_s - time.monotonic())
            await asyncio.sleep(rest)
        record.ended = time.monotonic()
        _refuse_ended(streams)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        record.probe = await self._probe()
        if self._served is not None:
            record.served = await self.engine.collective_rpc(self._served)
        return record

    async def _stream(self, number: int, arrivals: list[tuple[float, int]]) -> None:
        longest = self.engine.model_config.max_model_len - PROMPT_TOKENS
        async for tokens in self._generate(first_token=number, num_tokens=longest):
            arrivals.append((time.monotonic(), len(tokens)))

    async def _probe(self) -> list[int]:
        """Tokens of a request that is alone: others in its steps change roundings.

        When a request before it has ended, the engine has let go of all streams.
        """
        found: list[int] = []
        for num_tokens in (1, PROBE_TOKENS):
            chunks = self._generate(first_token=0, num_tokens=num_tokens)
            found = [token async for tokens in chunks for token in tokens]
        return found

    async def _generate(
        self, *, first_token: int, num_tokens: int
    ) -> AsyncIterator[list[int]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": [first_token + n for n in range(PROMPT_TOKENS)]}
        request_id = f"{first_token}-{time.time_ns()}"
        async for output in self.engine.generate(prompt, params, request_id):
            yield output.outputs[0].token_ids


async def _update_ours(engine: Any, checkpoint: str) -> dict[str, float]:
    """One call; decoding goes on."""
    reply = await engine.update_weights_from_disk(checkpoint)
    return {"commit_ms": reply["gap_ms"], **reply["seconds"]}


async def _update_upstream(engine: Any, checkpoint: str) -> dict[str, float]:
    """The sequence upstream documents for an update between two tokens."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    file = str(Path(checkpoint) / "model.safetensors")
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest({"file": file}))
    await engine.finish_weight_update()
    await engine.resume_generation()
    return {}


def _own_ours() -> dict[str, Any]:
    return {}


def _own_upstream() -> dict[str, Any]:
    from benchmarks.transport import BACKEND, Extension

    return {
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": f"{Extension.__module__}.{Extension.__name__}",
    }


Own = Callable[[], dict[str, Any]]
Way = Callable[[Any, str], Awaitable[dict[str, float]]]

WAYS: dict[str, tuple[Own, Way]] = {
    OURS: (_own_ours, _update_ours),
    UPSTREAM: (_own_upstream, _update_upstream),
}


def _refuse_ended(streams: list[asyncio.Task[None]]) -> None:
    for stream in streams:
        if stream.done():
            stream.result()  # raises what ended it
            raise RuntimeError("a stream came to its end before its round did")


async def serve(arm: Arm, pipe: Connection) -> None:
    """Carry out the plans that arrive until None does."""
    # As upstream's server does: a collection of all that was imported takes a third
    # of a second, and would be counted as a gap of every stream.
    gc.collect()
    gc.freeze()
    pipe.send(READY)
    loop = asyncio.get_running_loop()
    while (plan := await loop.run_in_executor(None, pipe.recv)) is not None:
        pipe.send(await arm.carry_out(plan))
    arm.engine.shutdown()


async def main(name: str, checkpoint: str, handle: str) -> None:
    own, update = WAYS[name]
    # Compiling takes longer than all the rest.
    arm = Arm(checkpoint, update, enforce_eager=True, **own())
    await serve(arm, Connection(int(handle)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
