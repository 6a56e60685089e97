"""vLLM's application on an `AsyncLLM`, with the routes that frameworks add to it.

The routes and the calls behind them are those of prime-rl, PipelineRL, SkyRL and AReaL;
what they send is in their clients' words. Before them the same engine is asked what
vLLM's own clients ask. Prints what happened as JSON.

Usage: python -m tests.support.engines.framework_server OLD NEW
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI, Request
from safetensors.torch import load_file

from tests.support.engines import gentle
from tests.support.engines.script import tell
from tests.support.ports import free_port
from vllm.inflight.transport.waiting import in_background

PLAIN = Path(__file__).parents[1] / "client_records" / "plain.json"
EXTENSION = "tests.support.engines.framework_extension.Extension"
NAMES = ["model.norm.weight", "model.embed_tokens.weight"]
OURS = {"path": "/nowhere"}

prime_rl = APIRouter()


@prime_rl.post("/pause")
async def pause(request: Request) -> dict[str, str]:
    await request.app.state.engine_client.pause_generation(
        mode="keep", clear_cache=False
    )
    return {"status": "paused"}


@prime_rl.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    await request.app.state.engine_client.resume_generation()
    return {"status": "resumed"}


@prime_rl.post("/update_weights")
async def update_weights(request: Request) -> dict[str, str]:
    data = await request.json()
    await request.app.state.engine_client.collective_rpc(
        "update_weights_from_path", args=(data.get("weight_dir"),)
    )
    return {"status": "ok"}


def asked(tensors: dict[str, Any], version: int) -> dict[str, Any]:
    """PipelineRL's `WeightUpdateRequest`."""
    infos = [
        {"name": n, "shape": list(tensors[n].shape), "dtype": str(tensors[n].dtype)}
        for n in NAMES
    ]
    return {"version": version, "parameters_info": infos}


def broadcasting(port: int, tensors: dict[str, Any]) -> Any:
    """PipelineRL's trainer: rank 0 of a group of vLLM's, and one broadcast for each.

    Returns the group, whose store lives as long as it does.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(
        host="127.0.0.1", port=port, rank=0, world_size=2
    )
    for name in NAMES:
        group.broadcast_obj(tensors[name], src=0)
    return group


async def tried_prime_rl(app: httpx.AsyncClient, folder: Path) -> list[Any]:
    replies = []
    for path, body in (
        ("/pause?mode=keep&clear_cache=false", None),
        ("/is_paused", ...),
        ("/update_weights", {"weight_dir": str(folder)}),
        ("/resume", None),
        ("/is_paused", ...),
    ):
        method = "GET" if body is ... else "POST"
        reply = await app.request(method, path, json=None if body is ... else body)
        told = reply.json()
        replies.append(told["is_paused"] if method == "GET" else told)
    return replies


async def tried_pipelinerl(engine: Any, app: httpx.AsyncClient, new: Path) -> Any:
    tensors = load_file(new / "model.safetensors")
    port = free_port()
    sent = in_background(lambda: broadcasting(port, tensors))
    await engine.collective_rpc(
        "init_actor_update_group", args=(0, 1, f"tcp://127.0.0.1:{port}", 2)
    )
    reply = await app.post("/receive_weight_update", json=asked(tensors, 3))
    (told,) = await engine.collective_rpc("framework_told")
    expected = {n: float(tensors[n].double().sum()) for n in NAMES}
    assert sent.result(timeout=60).world_size == 2
    return reply.json(), told["sums"] == expected, told["has a group"]


async def answered_otherwise(app: httpx.AsyncClient) -> list[Any]:
    """The calls of plain.json that ours answers in another way than plain vLLM."""
    found = []
    for record in json.loads(PLAIN.read_text())["requests"]:
        method, path, body = record["method"], record["path"], record.get("json")
        reply = await app.request(method, path, json=body)
        told = reply.json() if reply.content else None
        is_same = reply.status_code == record["status"]
        expected = record.get("reply")
        if is_same and isinstance(expected, dict):  # ours may say more
            is_same = told | expected == told
        if not is_same:
            status = [record["status"], reply.status_code]
            found.append([f"{method} {path}", body, status, expected, told])
    return found


async def ended(engine: Any, **how: Any) -> str | None:
    """How a request of 400 tokens ends when the engine is paused under it."""
    from vllm import SamplingParams

    began = asyncio.Event()
    reasons: list[str | None] = []

    async def generate() -> None:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        prompt = {"prompt_token_ids": list(range(30))}
        async for output in engine.generate(prompt, params, f"request {how}"):
            began.set()
            reasons.append(output.outputs[0].finish_reason)

    request = asyncio.create_task(generate())
    await began.wait()
    await engine.pause_generation(**how)
    await engine.resume_generation()
    await request
    return reasons[-1]


def client(app: FastAPI) -> httpx.AsyncClient:
    """A caller on the server's host."""
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def main(old: Path, new: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    words = ["--model", str(old), "--max-model-len", "1024", "--block-size", "32"]
    words += ["--enforce-eager", "--worker-extension-cls", EXTENSION]
    # A request that is to be paused must not be over before.
    words += ["--logits-processors", gentle.NAME]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    tasks = await engine.get_supported_tasks()
    own = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, own.state, args, tasks)
    async with client(own) as it:
        otherwise = await answered_otherwise(it)
    app = build_app(args, tasks, engine.model_config)
    app.include_router(prime_rl)

    @app.post("/receive_weight_update")
    async def receive_weight_update(request: Request) -> dict[str, str]:
        await engine.pause_generation(mode="keep", clear_cache=False)
        body = json.dumps(await request.json())
        await engine.engine_core.collective_rpc_async(
            "receive_weight_update", args=(body,)
        )
        await engine.resume_generation()
        return {"status": "ok"}

    await init_app_state(engine, app.state, args, tasks)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, str]:
        await engine.reset_prefix_cache()
        return {"status": "ok"}

    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1"
    ) as it:
        seen: dict[str, Any] = {
            "otherwise": otherwise,
            "prime-rl": await tried_prime_rl(it, new),
            "pipelinerl": await tried_pipelinerl(engine, it, new),
            "skyrl": (await it.post("/reset_prefix_cache", json={})).json(),
            "ours": (await it.get("/weight_info")).json()["weight_version"],
            "refused": (await it.post("/update_weights_from_disk", json=OURS)).json(),
        }
    (told,) = await engine.collective_rpc("framework_told")
    seen["paths"] = told["paths"]
    for flag in (False, True):
        how = {"wait_for_inflight_requests": flag, "clear_cache": True}
        seen[f"waited: {flag}"] = await ended(engine, **how)
    engine.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
