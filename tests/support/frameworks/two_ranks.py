"""An engine of two ranks in processes of its own, updated by a framework's calls.

The extension makes the calls of OpenRLHF. Requests stream meanwhile. Prints what
happened as JSON.

Usage: python -m tests.support.frameworks.two_ranks OLD NEW
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.engines import gentle
from tests.support.engines.script import OPTIONS, tell
from tests.support.frameworks.openrlhf import MEETINGS
from tests.support.gpu.exact import be_exact
from tests.support.trainers.store_group import HOST, StoreTrainer

EXTENSION = "tests.support.frameworks.openrlhf.Meeting"
NUM_TOKENS = 1900
"""Of a request that runs until it is aborted. At 15 ms each they take half a minute."""


async def said(engine: Any, name: str, num: int = 24) -> Any:
    """The tokens of one prompt, and the versions that sampled them."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True)
    prompt = {"prompt_token_ids": [(7 * i) % 250 for i in range(40)]}
    output: Any = None
    async for each in engine.generate(prompt, params, name):
        output = each
    spans = [[v.version, v.end] for v in output.outputs[0].weight_versions]
    return list(output.outputs[0].token_ids), spans


async def main(old: Path, new: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tensors = load_file(new / "model.safetensors")
    (dtype,) = {str(t.dtype).removeprefix("torch.") for t in tensors.values()}
    options: dict[str, Any] = OPTIONS | {
        "dtype": dtype,
        "tensor_parallel_size": 2,
        "max_model_len": 2048,
        "logits_processors": [gentle.NAME],
        "worker_extension_cls": EXTENSION,
    }

    def start(folder: Path) -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **options))

    fresh = start(new)
    expected, _ = await said(fresh, "fresh")
    await fresh.update_weights_from_disk(str(new))
    digest = (await fresh.weight_info())["digest"]
    fresh.shutdown()
    engine = start(old)
    trainer = StoreTrainer(world_size=3)

    async def send(names: list[str], *, is_marked: bool = True) -> list[Any]:
        replies: list[Any] = []
        for name in names:
            trainer.broadcast(tensors[name])
            told = name, tensors[name].dtype, tensors[name].shape
            is_last = is_marked and name == names[-1]
            replies = await engine.collective_rpc(
                "update_weight", args=(*told, is_last)
            )
        return replies

    async def error_of(call: Any) -> Any:
        try:
            await call
        except Exception as error:
            return str(error)
        return None

    join = HOST, trainer.port, 1, 3, "openrlhf"
    await engine.collective_rpc("init_process_group", args=join)
    before, _ = await said(engine, "before")
    seen: dict[str, Any] = {"before": before, "expected": expected}
    names = list(tensors)
    stream = asyncio.create_task(said(engine, "stream", NUM_TOKENS))
    while engine.output_processor.get_num_unfinished_requests() == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await send(names[:9], is_marked=False)
    wrong = names[9], "torch.int8", (1,), False
    seen["error"] = await error_of(engine.collective_rpc("update_weight", args=wrong))
    seen["after the error"] = (await said(engine, "after the error"))[0]
    seen["meetings"] = {}
    for way in MEETINGS:
        meeting = engine.collective_rpc("update_weight", args=(way, "", (), False))
        seen["meetings"][way] = await error_of(meeting)
    seen["error of the rest"] = await error_of(send(names[10:]))
    seen["replies"] = await send(names)
    info = await engine.weight_info()
    seen["label"], seen["is digest"] = info["weight_version"], info["digest"] == digest
    seen["after"] = (await said(engine, "after"))[0]
    await engine.abort("stream")  # it has tokens of the steps of the request before
    seen["stream"] = (await stream)[1]
    engine.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if torch.cuda.is_available():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        be_exact()  # tokens of different batches are compared
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
