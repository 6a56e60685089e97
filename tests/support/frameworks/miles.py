"""miles' own rollout function and engine class, unmodified, against a server of ours.

Usage: python -m tests.support.frameworks.miles URL OLD NEW

miles is in build/frameworks (`make test-frameworks`), without what it depends on. OLD
and NEW are checkpoints. The server serves OLD as `old`. It is updated to NEW by the
calls of miles' `SGLangEngine`, in miles' pause, while samples are generated. Then a
rollout is aborted and goes on. The router is the stand-in of slime.py.

Prints what miles' samples have as JSON.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import tell
from tests.support.frameworks.slime import arguments, facts, router


def arguments_of_miles(url: str, model: Path) -> Namespace:
    """What miles' functions read of its command line."""
    found = arguments(url, model)
    more = {
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "eval_num_gpus": 0,
        "chat_template_path": None,
        "lora_rank": 0,
        "lora_adapter_path": None,
        "sglang_speculative_algorithm": None,
        "sglang_router_policy": None,
        "use_miles_router": False,
        "custom_agent_function_path": None,
    }
    return Namespace(**(vars(found) | more))


def engine_at(args: Namespace, url: str) -> Any:
    """miles' class of an engine that runs already."""
    from miles.backends.sglang_utils.sglang_engine import SGLangEngine

    engine = SGLangEngine(args, 0)
    engine.node_rank = 0
    host, port = url.removeprefix("http://").split(":")
    engine.server_host, engine.server_port = host, int(port)
    return engine


async def running(url: str, count: int) -> None:
    """Wait until so many requests have decoded for a while."""
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            load = (await client.get(f"{url}/v1/loads")).json()["loads"][0]
            if load["num_running_reqs"] == count and load["num_used_tokens"] > 128:
                return
            await asyncio.sleep(0.01)


async def seen(args: Namespace, url: str, new: Path) -> dict[str, Any]:
    from miles.rollout import sglang_rollout
    from miles.utils import http_utils
    from miles.utils.types import Sample

    http_utils.init_http_client(args)
    sampling = sglang_rollout.GenerateState(args).sampling_params
    greedy = sampling | {"temperature": 0.0, "max_new_tokens": 24}
    long = sampling | {"logit_bias": {"256": -100.0}}  # never ends by itself
    engine = engine_at(args, url)
    found: dict[str, Any] = {"healthy": engine.health_generate()}

    async def generated(sample: Any, params: dict[str, Any]) -> Any:
        await sglang_rollout.generate(args, sample, dict(params))
        return facts(sample)

    def update() -> None:
        engine.pause_generation()
        engine.flush_cache()
        engine.begin_weight_update()
        assert engine.update_weights_from_disk(str(new), weight_version="new")
        engine.end_weight_update()
        engine.continue_generation()

    found["whole"] = await generated(Sample(prompt="hello"), greedy)
    samples = [Sample(prompt="hello"), Sample(prompt="world")]
    tasks = [asyncio.create_task(generated(each, long)) for each in samples]
    await running(url, 2)
    await asyncio.to_thread(update)
    found["through the update"] = [await task for task in tasks]
    found["version"] = engine.get_weight_version()
    found["after"] = await generated(Sample(prompt="hello"), greedy)
    sample = Sample(prompt="world")
    state = sglang_rollout.GenerateState(args)
    state.pendings = {asyncio.create_task(group_of(generated, sample, long))}
    await running(url, 1)
    await sglang_rollout.abort(args, 0)
    found["partial"] = facts(sample)
    found["finished"] = await generated(sample, long)
    await http_utils._http_client.aclose()
    return found


async def group_of(generated: Any, sample: Any, params: dict[str, Any]) -> list[Any]:
    """A group of one sample, as `abort` takes it back."""
    await generated(sample, params)
    return [sample]


def main(url: str, old: Path, new: Path) -> None:
    OWN["miles"].use()
    import sglang_router

    sglang_router.__version__ = "0.3"
    args = arguments_of_miles(router(url), old)
    tell(asyncio.run(seen(args, url, new)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
