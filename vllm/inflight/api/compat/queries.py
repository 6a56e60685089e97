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
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.control.methods import weight_names as names_of
from vllm.inflight.api.request.fields import Fields
from vllm.inflight.errors import (
    Conflict,
    EngineAsleep,
    EngineFault,
    Malformed,
    PauseConflict,
)
from vllm.inflight.worker.catalogue import dumped

Handler = Callable[[Any, dict[str, Any]], Awaitable[Any]]

ACTIONS = ("checksum", "compare")
SLEEPS = {"weights", "kv_cache"}
NO_ROWS = 100
DIGITS = 19
"""A number with as many digits is too large for an engine."""


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
    told = await names_of(engine)
    # In a thread, and in pieces: streams go on meanwhile.
    content = await asyncio.to_thread(dumped, told)
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
            "keep a copy of them; 'checksum' tells what to compare, and 'verify' "
            "compares with the digest of the label"
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
        "equal": f"what is served is what was committed: {compared}",
        "different": f"what is served is NOT what was committed: {compared}; not equal "
        f"are {', '.join(found['different'])}",
        "unknown": "of what is served no digest is known; it has been read now, and "
        "the next call compares with that",
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
    """The configuration, as upstream has it, without the environment."""
    import pydantic

    fields = Fields(body)
    form = fields.one_of("config_format", (None, "text", "json")) or "text"
    fields.only()
    config = engine.vllm_config
    if form == "text":
        return {"vllm_config": str(config)}
    adapter = pydantic.TypeAdapter(type(config))
    told = adapter.dump_python(config, mode="json", fallback=str)
    _hide(told)
    return {"vllm_config": told}


async def release_memory_occupation(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Sleep: release the memory of weights and KV; running requests are aborted."""
    tags = _tags(engine, body)
    if tags == {"kv_cache"}:
        await release_kv_cache(engine)
        return {"success": True, "message": "the KV cache is asleep"}
    # Level 1 keeps a copy of the weights in host memory, so waking needs no trainer.
    await engine.sleep(level=1, mode="abort")
    return {"success": True, "message": "asleep"}


async def resume_memory_occupation(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Wake up: everything, or one tag of SGLang at a time."""
    tags = _tags(engine, body)
    await engine.wake_up(sorted(tags) if tags else None)
    return {"success": True, "message": "awake"}


def _hide(told: dict[str, Any]) -> None:
    """Replace tokens of a model hub by `set`; a drafter's model has one too."""
    for name, value in told.items():
        if isinstance(value, dict):
            _hide(value)
        elif name == "hf_token" and isinstance(value, str):
            told[name] = "set"


def _tags(engine: upstream.EngineClient, body: dict[str, Any]) -> set[str]:
    fields = Fields(body)
    tags = fields.take("tags")
    fields.only()
    if tags is not None and not _are_ids(tags):
        raise Malformed("tags must be a list of strings")
    unknown = set(tags or ()) - SLEEPS
    if unknown:
        raise Malformed(
            f"tags {sorted(unknown)} are unknown; there are weights, kv_cache"
        )
    if not engine.vllm_config.model_config.enable_sleep_mode:
        raise Conflict(
            "this server was started without --enable-sleep-mode, so it cannot give "
            "memory back"
        )
    return set(tags or ())


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
}
"""SGLang's routes, then upstream's."""


async def release_kv_cache(engine: upstream.EngineClient) -> None:
    """Abort requests, pause, and release the memory; the call may be repeated.

    Raises:
        EngineAsleep: the weights are asleep, and so most likely the KV cache.
        PauseConflict: the pause was over, or a request ended, before the release.
        EngineFault: the memory could not be released.

    """
    control = control_of(engine)
    if any(
        reply["weights"] == "asleep" for reply in await control.ask(calls.ReadVersion())
    ):
        raise EngineAsleep(
            "the weights are asleep, and so is the KV cache unless it was woken up "
            "alone; it can be released by itself once the weights have been woken up"
        )
    before = await control.ask(calls.ReadStandstill())
    await engine.sleep(level=0, mode="abort")
    try:
        await engine.renderer.clear_mm_cache_async()  # the engines drop theirs
        await control.ask(calls.ReleaseKvCache())
    except (PauseConflict, EngineFault) as error:
        if not any(each["ends_on_waking"] for each in before):
            # A pause that was asked for outlives it, and ends as it would have. With
            # the tag: of several engines some may have released theirs.
            await engine.wake_up(["kv_cache"])
        error.message += "; requests were aborted"
        if not any(each["is_paused"] for each in before):
            error.message += ", and the pause that this call began is over"
        error.message += (
            ". Call again"
            if isinstance(error, PauseConflict)
            else ". POST /resume_memory_occupation wakes up what sleeps, the server's "
            "log says more"
        )
        raise
