"""The steps of PipelineRL's server, on an `AsyncLLM` without its worker extension.

The trainer opens its group with torch. Prints what happened as JSON.

Usage: python -m tests.support.engines.pipelinerl_server OLD NEW
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.engines import gentle
from tests.support.engines.pipelinerl_actor import asked
from tests.support.engines.script import tell
from tests.support.engines.torch_trainer import HOST, facts, training


async def main(old: Path, new: Path) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {"max_model_len": 1024, "block_size": 32, "enforce_eager": True}
    # The stream is to last until all is done.
    args = AsyncEngineArgs(str(old), logits_processors=[gentle.NAME], **options)
    engine = AsyncLLM.from_engine_args(args)

    streaming = asyncio.Event()

    async def generate(name: str, count: int) -> Any:
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        prompt = {"prompt_token_ids": [(7 * i) % 250 for i in range(30)]}
        async for output in engine.generate(prompt, params, name):
            if name == "stream":
                streaming.set()
            if output.finished:
                return output.outputs[0]

    async def tokens(name: str) -> list[int]:
        return list((await generate(name, 24)).token_ids)

    seen: dict[str, Any] = {"before": await tokens("before")}
    with training("actor") as trainer:
        workers = engine.engine_core
        await workers.collective_rpc_async(
            "init_actor_update_group", args=(0, 1, f"tcp://{HOST}:{trainer.port}", 2)
        )
        stream = asyncio.create_task(generate("stream", 900))
        await streaming.wait()
        trainer.begin(new, facts(new)["names"])
        await engine.pause_generation(mode="keep", clear_cache=False)
        await workers.collective_rpc_async(
            "receive_weight_update", args=(json.dumps(asked(new, 1)),)
        )
        await engine.resume_generation()
        seen["after receive_weight_update"] = await tokens("after one")
        trainer.begin(old, facts(old)["names"])
        await engine.pause_and_update(asked(old, 2))
        seen["after pause_and_update"] = await tokens("after two")
        streamed = await stream
        await engine.update_weights_from_disk(str(new))
        seen["expected"] = await tokens("expected")
    seen["versions of a stream"] = [s.version for s in streamed.weight_versions]
    seen["length of that stream"] = len(streamed.token_ids)
    engine.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
