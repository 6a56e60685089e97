"""slime's own rollout functions, unmodified, against a server of ours.

Usage: python -m tests.support.frameworks.slime URL OLD NEW

slime is in build/frameworks (`make test-frameworks`), without what it depends on: Ray
is an empty module. OLD and NEW are checkpoints. The server serves OLD as `old`, and is
updated to NEW while rollouts are aborted. A stand-in for SGLang's router lists the
server as its only worker, and passes requests on.

Prints what slime's samples have as JSON.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import tell
from tests.support.ports import free_port

LONGEST = 400
"""Tokens of a long rollout."""


def arguments(url: str, model: Path) -> Namespace:
    """What slime's functions read of its command line."""
    host, port = url.removeprefix("http://").split(":")
    return Namespace(
        sglang_router_ip=host,
        sglang_router_port=int(port),
        sglang_server_concurrency=16,
        sglang_dp_size=1,
        rollout_num_engines=1,
        use_distributed_post=False,
        ci_test=False,
        hf_checkpoint=str(model),
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=LONGEST,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_seed=1,
        use_rollout_routing_replay=False,
        sglang_enable_deterministic_inference=True,
        n_samples_per_prompt=2,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=False,
        custom_generate_function_path=None,
        custom_rm_path="tests.support.frameworks.slime.reward",
        group_rm=False,
        rollout_global_dataset=True,
        rollout_batch_size=2,
        over_sampling_batch_size=4,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        rollout_sample_hook_path=None,
        reward_key=None,
    )


async def reward(args: Namespace, sample: Any, **_: Any) -> float:
    """A reward: how long the response is."""
    return float(sample.response_length)


def router(url: str) -> str:
    """A stand-in for SGLang's router, with one worker; where it answers."""
    app, port = FastAPI(), free_port()
    client = httpx.AsyncClient(timeout=None)

    @app.get("/workers")
    async def workers() -> Any:
        return {"workers": [{"url": url}]}

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        headers = {"Content-Type": "application/json"}
        reply = await client.post(
            f"{url}/generate", content=await request.body(), headers=headers
        )
        return Response(reply.content, reply.status_code)

    config = uvicorn.Config(app, port=port, log_level="warning")
    threading.Thread(target=uvicorn.Server(config).run, daemon=True).start()
    return f"http://127.0.0.1:{port}"


def facts(sample: Any) -> dict[str, Any]:
    """What a sample of slime has after a rollout."""
    return {
        "status": sample.status.value,
        "tokens": list(sample.tokens),
        "response": sample.response,
        "length": sample.response_length,
        "logprobs": list(sample.rollout_log_probs or ()),
        "versions": list(sample.weight_versions),
        "reward": sample.reward,
        "prompt": sample.prompt,
    }


class Prompts:
    """slime's source of groups of samples, and the buffer of partial ones."""

    def __init__(self, sample_class: Any, size: int) -> None:
        self._sample, self._size, self._next = sample_class, size, 0
        self.given_back: list[Any] = []

    def get_samples(self, count: int) -> list[list[Any]]:
        """Groups, partial ones first."""
        groups, self.given_back = self.given_back[:count], self.given_back[count:]
        while len(groups) < count:
            index, self._next = self._next, self._next + self._size
            numbers = range(index, index + self._size)
            groups.append(
                [self._sample(index=n, prompt=f"number {index}") for n in numbers]
            )
        return groups

    def add_samples(self, groups: list[Any]) -> None:
        """Take partial groups back."""
        self.given_back += groups


async def one_by_one(args: Namespace, url: str, new: Path) -> dict[str, Any]:
    """`generate` and `generate_streaming` alone; then an abort, and on from there."""
    from slime.backends.sglang_utils.server_control import abort_servers_until_idle
    from slime.rollout import sglang_rollout, sglang_streaming_rollout
    from slime.utils import http_utils
    from slime.utils.types import Sample

    http_utils.init_http_client(args)
    sampling = sglang_rollout.GenerateState(args).sampling_params
    greedy = sampling | {"temperature": 0.0, "max_new_tokens": 24}
    whole, streamed = Sample(prompt="hello"), Sample(prompt="hello")
    await sglang_rollout.generate(args, whole, dict(greedy))
    await sglang_streaming_rollout.generate_streaming(args, streamed, dict(greedy))
    long = sampling | {"logit_bias": {"256": -100.0}}  # never ends by itself
    samples = [Sample(prompt="hello"), Sample(prompt="world")]
    running = [
        asyncio.create_task(sglang_rollout.generate(args, each, dict(long)))
        for each in samples
    ]
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            found = (await client.get(f"{url}/v1/loads")).json()["loads"][0]
            if found["num_running_reqs"] == 2 and found["num_used_tokens"] > 128:
                break
            await asyncio.sleep(0.01)
        await abort_servers_until_idle([url])
        await asyncio.gather(*running)
        partial = [facts(each) for each in samples]
        body = {"path": str(new), "weight_version": "new"}
        reply = await client.post(f"{url}/update_weights_from_disk", json=body)
        assert reply.json()["success"], reply.text
    for each in samples:
        await sglang_rollout.generate(args, each, dict(long))
    await http_utils._http_client.aclose()
    http_utils._http_client = None
    return {
        "whole": facts(whole),
        "streamed": facts(streamed),
        "partial": partial,
        "finished": [facts(each) for each in samples],
    }


def control_plane(url: str) -> dict[str, Any]:
    """How slime finds an external engine, and the calls of its engine's class."""
    from slime.backends.sglang_utils.external import discover_external_engines
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    (found,) = discover_external_engines([url])
    engine = SGLangEngine(Namespace(rollout_external=True), 0)
    engine.node_rank, engine.server_host, engine.server_port = 0, found.host, found.port
    assert engine.health_generate()
    engine.pause_generation()
    engine.flush_cache()
    processed = engine.post_process_weights(
        restore_weights_before_load=True, post_process_quantization=True
    )
    engine.continue_generation()
    return {
        "worker type": found.worker_type,
        "GPUs": found.num_gpus,
        "layout": found.parallel_config,
        "memory saver": found.server_info["enable_memory_saver"],
        "processed": processed["success"],
        "version": engine.get_weight_version(),
    }


def whole_rollout(args: Namespace) -> dict[str, Any]:
    """`generate_rollout`, twice: the second takes the partial samples of the first."""
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils
    from slime.utils.types import Sample

    http_utils.init_http_client(args)
    source = Prompts(Sample, args.n_samples_per_prompt)
    first = sglang_rollout.generate_rollout(args, 0, source)
    partial = [[facts(each) for each in group] for group in source.given_back]
    second = sglang_rollout.generate_rollout(args, 1, source)
    return {
        "first": [[facts(each) for each in group] for group in first.samples],
        "given back": partial,
        "second": [[facts(each) for each in group] for group in second.samples],
    }


def main(url: str, old: Path, new: Path) -> None:
    OWN["slime"].use()
    seen = {"engine": control_plane(url)}
    seen |= asyncio.run(one_by_one(arguments(url, old), url, new))
    tell(seen | whole_rollout(arguments(router(url), old)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
