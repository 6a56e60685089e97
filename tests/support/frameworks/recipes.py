"""The recipes of docs/rl.md for frameworks whose engine is in their own process.

Usage: python -m tests.support.frameworks.recipes own|stand-in OLD NEW

The classes of OpenRLHF and verl are extended as the page does it. They are the
frameworks' own, from build/frameworks (`make test-frameworks`), or stand-ins, which
call vLLM's engine as the frameworks' classes do. A version is committed while the
completions run. Prints what the recipes have made of them as JSON.
"""

from __future__ import annotations

import asyncio
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.frameworks.packages import OWN
from tests.support.engines import gentle
from tests.support.engines.script import OPTIONS, ROOT, tell

PROMPT = list(range(30, 60))
LENGTH = 200
"""At 15 ms each: no machine has them before a call of a test comes."""
SHARED, TRL, OPENRLHF, VERL, PRIME_RL = range(5)
"""The blocks of the page, in its order."""
VERL_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def blocks() -> list[str]:
    """The Python of the page's section on frameworks."""
    page = (ROOT / "docs" / "rl.md").read_text()
    section = page.split("### Spans in a framework\n")[1].split("\n### ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def names(*numbers: int) -> dict[str, Any]:
    """What these blocks define, with the functions that all of them share."""
    made: dict[str, Any] = {"__name__": "recipe"}
    for number in (SHARED, *numbers):
        exec(blocks()[number], made)
    return made


class AsOpenRLHF:
    """Calls the engine and replies as OpenRLHF's executor of single turns does."""

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        ids = list(hf_tokenizer(text=prompt)["input_ids"][0].tolist())
        result = await llm_engine.generate(ids, sampling_params, multi_modal_data=None)
        whole = ids + list(result.outputs[0].token_ids)
        return {"observation_tokens": whole, "action_ranges": [(len(ids), len(whole))]}


class AsVerl:
    """Calls the engine and replies as verl's server does."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **_: Any,
    ) -> Any:
        from vllm import SamplingParams

        last = None
        async for output in self.engine.generate(
            prompt={"prompt_token_ids": prompt_ids},
            sampling_params=SamplingParams(**sampling_params),
            request_id=request_id,
        ):
            last = output
        assert last is not None
        return SimpleNamespace(
            token_ids=last.outputs[0].token_ids, extra_fields={"global_steps": 1}
        )


def server_of(made: type, engine: Any) -> Any:
    """A server with this engine; verl's own starts its engine elsewhere."""
    if AsVerl in made.__mro__:
        return made(engine)
    config = SimpleNamespace(
        max_model_len=OPTIONS["max_model_len"],
        full_determinism=False,
        enable_rollout_routing_replay=False,
        mtp=None,
        get=lambda name, default: default,
    )
    server = object.__new__(made)
    vars(server).update(
        engine=engine,
        config=config,
        model_config=SimpleNamespace(processor=None, lora_rank=0, lora={}),
        replica_rank=0,
        global_steps=1,
        _disaggregation_role="null",
        _pd_decode_peers=[],
        _submission_paused=False,
        _admitting=0,
    )
    return server


def training_sample(is_own: bool) -> Any:
    """prime-rl's `TrainingSample`, or a class that has any fields."""
    if not is_own:
        return SimpleNamespace
    OWN["prime_rl"].use()
    return import_module("prime_rl.transports.rollouts.types").TrainingSample


def stand_in(name: str, **content: Any) -> None:
    """A module with these names; its packages are empty."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    vars(sys.modules[name]).update(content)


async def through_an_update(engine: Any, new: Path, work: Any) -> Any:
    """The reply of `work`, while which a version is committed."""
    task = asyncio.create_task(work)
    running = engine.output_processor.request_states
    while not task.done() and all(each.is_prefilling for each in running.values()):
        await asyncio.sleep(0.001)
    # Paused, so that the request does not end before an update that is slow.
    await engine.pause_generation(mode="in_place", flush_cache=False)
    await engine.update_weights_from_disk(str(new), "new")
    await engine.continue_generation()
    return await task


def provide(source: str) -> None:
    """Let the recipes find the classes that they extend."""
    if source == "own":
        OWN["openrlhf"].use()
        OWN["verl_server"].use()
    else:
        stand_in("openrlhf.utils.agent", SingleTurnAgentExecutor=AsOpenRLHF)
        stand_in(VERL_SERVER, vLLMHttpServer=AsVerl)


async def seen(source: str, old: Path, new: Path) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: Any = OPTIONS | {"logits_processors": [gentle.NAME]}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(old), **options))
    provide(source)  # afterwards: vLLM would take the empty `ray` for the real one
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=0)

    class Actor:
        """OpenRLHF's actor, as far as an executor calls it."""

        async def generate(self, ids: Any, params: Any, **_: Any) -> Any:
            last, prompt = None, {"prompt_token_ids": ids}
            async for output in engine.generate(prompt, params, f"o{len(ids)}"):
                last = output
            return last

    def tokenizer(**_: Any) -> Any:
        return {"input_ids": torch.tensor([PROMPT])}

    executor = names(OPENRLHF)["AgentExecutor"]()
    executor.oldest = 0  # the tokens of the old version are too old

    def executed() -> Any:
        return executor.execute(
            prompt="",
            label=None,
            sampling_params=params,
            max_length=1024,
            hf_tokenizer=tokenizer,
            llm_engine=Actor(),
            images=None,
        )

    try:
        reply = await through_an_update(engine, new, executed())
        await engine.update_weights_from_disk(str(old), "old")
        server = server_of(names(VERL)["SpannedServer"], engine)
        asked = {"max_tokens": LENGTH, "ignore_eos": True}
        work = server.generate(list(PROMPT), asked, "v")
        output = await through_an_update(engine, new, work)
        return {
            "openrlhf": {
                "ranges": reply["action_ranges"],
                "tokens": len(reply["observation_tokens"]),
                "is of": type(executor).__mro__[1].__module__,
            },
            "verl": output.extra_fields | {"is of": type(server).__mro__[1].__module__},
            "spans that are left": len(server.engine.spans),
        }
    finally:
        engine.shutdown()


def main(source: str, old: Path, new: Path) -> None:
    tell(asyncio.run(seen(source, old, new)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
