"""Two data-parallel engines of one mixture-of-experts model, under load and commits.

As a script: python -m tests.support.gpu.two_engines together|apart A B COMMITS; prints
every request's prompt, tokens, log-probabilities and versions as JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from tests.support.engines.probe import prompts
from tests.support.engines.script import OPTIONS, tell
from tests.support.gpu.exact import be_exact

NUM_STREAMS = 8


async def stream(engine: Any, number: int) -> dict[str, Any]:
    """One request, whichever engine it goes to."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        seed=number,
        max_tokens=120,
        ignore_eos=True,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = prompts(NUM_STREAMS)[number % NUM_STREAMS]
    async for output in engine.generate(prompt, params, f"r{number}"):
        last = output
    (done,) = last.outputs
    return {
        "prompt": prompt["prompt_token_ids"],
        "tokens": list(done.token_ids),
        "logprobs": [
            step[token].logprob
            for step, token in zip(done.logprobs, done.token_ids, strict=True)
        ],
        "spans": [[s.version, s.start, s.end] for s in done.weight_versions],
    }


async def main(way: str, a: str, b: str, num_commits: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if way == "apart":
        from vllm.inflight.engine.update.dp_commit import DpCommit

        # Nobody meets. The engines, which are forked off this process, inherit it.
        DpCommit.is_kept = property(lambda self: False)  # type: ignore[method-assign,assignment]
        DpCommit.meet = lambda self: False  # type: ignore[method-assign]
        DpCommit.together = lambda self, flip, take_back: flip()  # type: ignore[method-assign]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=a,
            dtype="float32",
            data_parallel_size=2,
            enable_expert_parallel=True,
            enable_prefix_caching=False,
            **OPTIONS | {"enforce_eager": False},
        )
    )
    seen: list[dict[str, Any]] = []
    number = iter(range(10**6))

    async def keep_busy(commits: asyncio.Task[Any]) -> None:
        while not commits.done():
            seen.append(await stream(engine, next(number)))

    async def commit_all() -> list[Any]:
        replies = []
        for index in range(int(num_commits)):
            label, path = (("b", b), ("a", a))[index % 2]
            replies.append(
                await engine.update_weights_from_disk(path=path, weight_version=label)
            )
        return replies

    await stream(engine, next(number))  # compiled by then
    commits = asyncio.create_task(commit_all())
    await asyncio.gather(*(keep_busy(commits) for _ in range(NUM_STREAMS)))
    replies = [str(reply)[:300] for reply in commits.result()]
    tell({"streams": seen, "replies": replies[:2]})
    engine.shutdown()


if __name__ == "__main__":
    be_exact()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    asyncio.run(main(*sys.argv[1:]))
