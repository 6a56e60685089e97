"""Routes for trainers besides updates: reads, caches, requests, sleep.

Upstream has some of these paths in its development mode only, and without a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard

from fastapi import Response

from vllm.inflight import calls, upstream
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import (
    RELEASE_MODES,
    check_tags,
    control_of,
    release_memory,
    require_sleep_mode,
)
from vllm.inflight.api.control.methods import weight_names as names_of
from vllm.inflight.api.request.fields import Fields
from vllm.inflight.api.rollout.reply import returns_routing
from vllm.inflight.errors import (
    Malformed,
)
from vllm.inflight.worker.catalogue import dumped

Handler = Callable[[Any, dict[str, Any]], Awaitable[Any]]

ACTIONS = ("checksum", "compare")
NO_ROWS = 100
DIGITS = 19
"""A number with this many digits or more is too large for an engine."""


async def flush_cache(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Drop the prefix cache; rejected while running requests hold KV."""
    replies = await control_of(engine).ask(calls.FlushCaches())
    await engine.renderer.clear_mm_cache_async()
    waiting = sum(reply["num_waiting"] for reply in replies)
    return {
        "success": True,
        "message": "Cache flushed.",
        "num_waiting": waiting,
        "dropped": [reply["dropped"] for reply in replies],
    }


async def reset_prefix_cache(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Upstream's reset: `success` is false where `/flush_cache` rejects the call."""
    fields = Fields(body)
    running = fields.word("reset_running_requests", False)
    external = fields.word("reset_external", False)
    fields.only()
    return {"success": bool(await engine.reset_prefix_cache(running, external))}


async def abort_request(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Abort the request `rid`, or all with `abort_all`."""
    fields = Fields(body)
    rid, every = fields.take("rid"), fields.flag("abort_all", False)
    for name in ("abort_message", "finished_reason"):  # SGLang's own, between processes
        fields.take(name)
    fields.only()
    ids = [rid] if isinstance(rid, str) and rid else rid
    if every:
        ids = None
    elif not _are_ids(ids):
        raise Malformed("the body needs 'rid', or 'abort_all': true")
    aborted = await _aborted(engine, ids)
    message = "aborted" if aborted else "no such request is running or waiting"
    return {"success": True, "message": message, "num_aborted": aborted}


async def abort_requests(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """Abort the requests in `request_ids`, or all, as upstream does."""
    fields = Fields(body)
    ids = fields.take("request_ids")
    fields.only()
    if ids not in (None, []) and not _are_ids(ids):
        raise Malformed("request_ids must be a list of strings")
    return {"status": "aborted", "aborted": await _aborted(engine, ids or None)}


async def weight_version(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """The label of the live weights."""
    Fields(body).only()
    info = await control_of(engine).info()
    return {"weight_version": info["weight_version"]}


async def weight_names(engine: upstream.EngineClient, body: dict[str, Any]) -> Response:
    """Name, shape and dtype of every tensor that an update may contain."""
    Fields(body).only()
    names = await names_of(engine)
    # A thread writes the JSON in parts, so that token streams go on meanwhile.
    content = await asyncio.to_thread(dumped, names)
    return Response(content, media_type="application/json")


async def model_info(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """SGLang's description of the model; `model_path` is that of the last commit.

    A version that came over a transport does not change `model_path`.
    """
    Fields(body).only()
    (source, *_) = await control_of(engine).ask(calls.ReadSource())
    model = engine.vllm_config.model_config
    return {
        "model_path": source["path"] or model.model,
        "tokenizer_path": model.tokenizer,
        "is_generation": model.runner_type == "generate",
        "weight_version": source["weight_version"],
        "model_type": getattr(model.hf_config, "model_type", None),
        "architectures": getattr(model.hf_config, "architectures", None),
    }


async def get_weights_by_name(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Any:
    """The first rows of a tensor as lists of numbers, from all ranks.

    NaN and Inf are null, since JSON has neither.
    """
    fields = Fields(body)
    name, size = fields.needed("name"), fields.take("truncate_size")
    fields.only()
    if isinstance(size, str) and size.isdecimal() and len(size) < DIGITS:
        size = int(size)  # a query parameter
    size = NO_ROWS if size is None else size
    replies = await control_of(engine).ask(calls.ReadRows(name, size))
    return _finite(replies[0]["rows"])


def _finite(rows: Any) -> Any:
    """Nested numbers, with None for NaN and Inf."""
    if isinstance(rows, list):
        return [_finite(row) for row in rows]
    return rows if math.isfinite(rows) else None


async def weights_checker(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """SGLang's digests of every parameter of every rank, or a comparison of them.

    Action `verify` is our own: it compares the live weights with the digest of their
    label. SGLang's action `reset_tensors` destroys weights and is rejected.
    """
    fields = Fields(body)
    action = fields.text("action", "checksum")
    fields.flag("allow_quant_error", False)
    selector = fields.one_of("selector", (None, "all", "target"))
    skipped = fields.take("skip_tensor_list")
    fields.only()
    if skipped not in (None, []) and not _are_ids(skipped):
        raise Malformed("skip_tensor_list must be a list of strings")
    if action == "verify":
        return await _verified(engine)
    if action != "checksum":
        raise Malformed(
            f"action {action!r} is not offered: it would write into live weights, or "
            "keep a copy of them. Use 'checksum' for digests that you compare, or "
            "'verify' to compare with the digest of the label"
        )
    is_target = selector == "target"
    replies = await control_of(engine).ask(calls.ReadChecksums(skipped, is_target))
    ranks = [rank for reply in replies for rank in reply["ranks"]]
    every = "".join(rank["per_gpu_checksum"] for rank in ranks)
    return {
        "success": True,
        "message": f"checksums of {len(ranks)} ranks",
        "ranks": ranks,
        "per_engine_checksum": hashlib.blake2b(
            every.encode(), digest_size=16
        ).hexdigest(),
    }


async def _verified(engine: upstream.EngineClient) -> Reply:
    found = await control_of(engine).verify()
    compared = (
        f"{found['num_tensors']} tensors were compared with their digests, and "
        f"{found['num_parameters']} parameters with what was staged"
    )
    message = {
        "equal": f"the live weights are what was committed: {compared}",
        "different": f"the live weights are NOT what was committed: {compared}; these "
        f"differ: {', '.join(found['different'])}",
        "unknown": "the live weights had no known digest; they have been read now, and "
        "the next call compares with this digest",
    }[found["result"]]
    return {"success": found["result"] != "different", "message": message} | found


async def weight_checker(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """The same digests under upstream's keys, or compared with a `baseline`."""
    fields = Fields(body)
    action, baseline = fields.needed("action"), fields.take("baseline")
    fields.only()
    if action not in ACTIONS:
        raise Malformed(
            f"action {action!r} is not offered; it can be 'checksum' or 'compare'"
        )
    if action == "compare" and not isinstance(baseline, dict):
        raise Malformed("action 'compare' needs 'baseline', an object of checksums")
    found: dict[str, str] = {}
    for reply in await control_of(engine).ask(calls.ReadChecksums()):
        for rank in reply["ranks"]:
            at = rank["parallelism_info"]
            where = f"dp{at['dp_rank']}:pp{at['pp_rank']}:pcp0:tp{at['tp_rank']}:"
            found |= {where + name: d for name, d in rank["checksums"].items()}
    if action == "checksum":
        return {"checksums": found}
    names = found.keys() | baseline.keys()
    odd = sorted(name for name in names if found.get(name) != baseline.get(name))
    return {"match": not odd, "mismatches": odd}


async def server_info(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
    """The configuration as upstream has it, and SGLang's fields for its layout."""
    import pydantic

    fields = Fields(body)
    form = fields.one_of("config_format", (None, "text", "json")) or "text"
    fields.only()
    config = engine.vllm_config
    parallel, model = config.parallel_config, config.model_config
    reply = {
        # Of SGLang's fields, those that say how an engine is laid out.
        "model_path": model.model,
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "dp_size": parallel.data_parallel_size,
        "enable_memory_saver": model.enable_sleep_mode,
        "enable_return_routed_experts": returns_routing(config),
    }
    if form == "text":
        return {"vllm_config": str(config)} | reply
    adapter = pydantic.TypeAdapter(type(config))
    content = adapter.dump_python(config, mode="json", fallback=str)
    _hide(content)
    return {"vllm_config": content} | reply


async def release_memory_occupation(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Sleep: release the memory of weights and KV; `mode` says what requests do.

    Without `mode`, the requests of a pause `in_place` or `retract` stay. Without such a
    pause, all requests are aborted.
    """
    fields = Fields(body)
    mode = fields.one_of("mode", (None, *RELEASE_MODES))
    tags = check_tags(fields.take("tags"))
    fields.only()
    reply = await release_memory(engine, tags, mode)
    return {"success": True, "message": _released(reply)} | reply


async def resume_memory_occupation(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Wake up: everything, or one tag of SGLang at a time."""
    fields = Fields(body)
    tags = fields.take("tags")
    chosen = check_tags(tags)
    fields.only()
    require_sleep_mode(engine)
    await engine.wake_up(None if tags is None else sorted(chosen))
    return {"success": True, "message": "awake"}


def _hide(config: dict[str, Any]) -> None:
    """Replace tokens of a model hub by `set`; a drafter's model has one too."""
    for name, value in config.items():
        if isinstance(value, dict):
            _hide(value)
        elif name == "hf_token" and isinstance(value, str):
            config[name] = "set"


def _released(reply: Reply) -> str:
    """What was released, in words."""
    names = {"weights": "the weights", "kv_cache": "the KV cache"}
    parts = [names[each] for each in reply["released"]]
    if not parts:
        return "asleep already"
    verb = "is" if reply["released"] == ["kv_cache"] else "are"
    return f"{' and '.join(parts)} {verb} asleep"


async def _aborted(engine: upstream.EngineClient, ids: list[str] | None) -> int:
    replies = await control_of(engine).ask(calls.AbortRequests(ids))
    return sum(reply["num_aborted"] for reply in replies)


def _are_ids(value: object) -> TypeGuard[list[str]]:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(item, str) and item for item in value)
    )


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/flush_cache"): flush_cache,
    ("GET", "/flush_cache"): flush_cache,
    ("POST", "/abort_request"): abort_request,
    ("GET", "/weight_version"): weight_version,
    ("GET", "/get_weight_version"): weight_version,
    ("GET", "/model_info"): model_info,
    ("GET", "/get_model_info"): model_info,
    ("GET", "/weight_names"): weight_names,
    ("POST", "/get_weights_by_name"): get_weights_by_name,
    ("GET", "/get_weights_by_name"): get_weights_by_name,
    ("POST", "/weights_checker"): weights_checker,
    ("POST", "/release_memory_occupation"): release_memory_occupation,
    ("POST", "/resume_memory_occupation"): resume_memory_occupation,
    ("POST", "/weight_checker"): weight_checker,
    ("POST", "/abort_requests"): abort_requests,
    ("POST", "/reset_prefix_cache"): reset_prefix_cache,
    ("GET", "/server_info"): server_info,
    ("GET", "/get_server_info"): server_info,
}
"""SGLang's routes, then upstream's."""
