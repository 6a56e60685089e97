"""verl's adapter for SGLang's HTTP API on a server of ours: its calls, in verl.json.

The adapter's file is verl's, unmodified. What it imports of SGLang is only there to
start SGLang's own server, so five names stand in for it. verl's colocated trainers put
CUDA IPC handles into a pickle; here the adapter is given safetensors bytes to send,
which is what a server of ours takes.

Usage: python -m tests.support.client_records.record_verl .../http_server_engine.py
    FOLDER
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import httpx
from safetensors.torch import load_file, save

from tests.support.models.tiny import make_checkpoint
from tests.support.serving import Server

RECORD = Path(__file__).with_name("verl.json")
PROMPT = {"model": "tiny", "prompt": [[(7 * i) % 250 for i in range(20)]]}
GREEDY = PROMPT | {"temperature": 0, "max_tokens": 16, "return_token_ids": True}


@dataclass
class ServerArgs:
    """In place of SGLang's."""

    host: str
    port: int
    node_rank: int = 0


@dataclass
class TensorsInput:
    """In place of SGLang's request between processes."""

    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True


def adapter(file: Path) -> Any:
    """verl's class, from its file."""
    names = {
        "entrypoints.EngineBase": {"EngineBase": object},
        "entrypoints.http_server": {"launch_server": None},
        "managers.io_struct": {"UpdateWeightsFromTensorReqInput": TensorsInput},
        "server_args": {"ServerArgs": ServerArgs},
        "utils": {"kill_process_tree": None},
    }
    for name in ("sglang", "sglang.srt", *(f"sglang.srt.{n}" for n in names)):
        parent, _, leaf = name.rpartition(".")
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(names.get(name.removeprefix("sglang.srt."), {}))
        if parent in sys.modules:
            setattr(sys.modules[parent], leaf, module)
    spec = importlib.util.spec_from_file_location("verl_http_server_engine", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AsyncHttpServerAdapter


def noted(asked: list[dict[str, Any]]) -> Any:
    """Writes down what aiohttp sends; of tensors their names."""
    send = aiohttp.ClientSession._request

    async def wrapper(self: Any, method: str, url: Any, **options: Any) -> Any:
        body = dict(options.get("json") or {})
        if "serialized_named_tensors" in body:
            body["serialized_named_tensors"] = len(body["serialized_named_tensors"])
        entry = {"method": method, "path": httpx.URL(str(url)).path, "json": body}
        asked.append(entry)
        reply = await send(self, method, url, **options)
        entry["status"] = reply.status
        return reply

    return wrapper


async def drive(engine: Any, server: Server, new: Path) -> tuple[Any, Any]:
    """What verl's rollout does with it: pieces, then a flush."""

    def said() -> Any:
        choices = server.post("/v1/completions", GREEDY)["choices"]
        return [choice["token_ids"] for choice in choices]

    before = said()
    await engine.abort_request(abort_all=True)
    names = list(tensors := load_file(new / "model.safetensors"))
    for part in (names[:12], names[12:]):
        data = save({name: tensors[name] for name in part})
        await engine.update_weights_from_tensor(TensorsInput([data], None, False))
    await engine.flush_cache()
    await engine.available_models()
    return before, said()


def main(file: Path, folder: Path) -> None:
    asked: list[dict[str, Any]] = []
    aiohttp.ClientSession._request = noted(asked)  # type: ignore[method-assign]
    old, new = (make_checkpoint(folder / name, seed) for seed, name in enumerate("ab"))
    with Server(old) as server:
        url = httpx.URL(server.url)
        engine = adapter(file)(launch_server=False, host=url.host, port=url.port)
        before, after = asyncio.run(drive(engine, server, new))
        assert before != after, "the weights did not follow"
    RECORD.write_text(json.dumps({"client": "verl 0.9.1", "requests": asked}, indent=1))
    print(f"{len(asked)} requests; output changed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
