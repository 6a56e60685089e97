"""The control routes that SGLang's clients call, with its fields and its replies.

Each call becomes part of an update: tensors go into the shadow weights, and the call
that completes a version commits it. SGLang waits for running requests, or for a pause,
before it writes. Here decoding goes on. Fields without an effect here are accepted.
Values that are not supported are rejected by name. A reply has `success` and `message`;
a rejection also has `error`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from vllm.inflight import calls, upstream
from vllm.inflight.api.compat import partial_updates
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.from_disk import from_disk
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.request.fields import Fields
from vllm.inflight.api.request.schema import OPENING
from vllm.inflight.calls import StartUpdate
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import InflightError, Malformed, PauseConflict
from vllm.inflight.transport.sglang.checkpoint_engine import ZmqUpdateInfo, reject
from vllm.inflight.transport.sglang.request_tensors import spooled
from vllm.inflight.update import check_label, check_owner

NO_EFFECT = {
    "torch_empty_cache": "an update allocates nothing",
    "is_async": "updates always load while decoding goes on",
    "recapture_cuda_graph": "addresses do not change, so CUDA graphs stay valid",
    "disable_draft_model": "a drafter keeps its weights if the update has none for it",
}
"""Flags of SGLang that have no effect here; both values are accepted."""

FALSE_ONLY = {
    "block_generation": "an update blocks nothing here; POST /pause_generation does",
}
TRUE_ONLY = {
    "online": "an update never takes the engine off line here",
    "non_blocking": "an update never blocks requests here; pause first if it should",
}
"""Older flags of SGLang; only the value that describes this server is accepted."""


async def commit_options(
    engine: upstream.EngineClient, control: Control, fields: Fields
) -> dict[str, Any]:
    """`mode` and `flush_cache` of the commit, from the fields of an update.

    Raises:
        Malformed: a flag has a value that is not supported.
        PauseConflict: requests that stay in place hold the cache.

    """
    for name in NO_EFFECT:
        fields.flag(name, False)
    for name, why in FALSE_ONLY.items():
        if fields.flag(name, False):
            raise Malformed(f"{name} cannot be true: {why}")
    for name, why in TRUE_ONLY.items():
        if not fields.flag(name, True):
            raise Malformed(f"{name} cannot be false: {why}")
    fields.one_of("selector", (None, "all", "target"))  # draft_path is for the drafter
    is_shared = InflightConfig.of(engine.vllm_config).prefix_cache == "shared"
    # SGLang flushes by default, so that new requests do not read KV of old weights. A
    # versioned cache keeps them apart by itself.
    flush = fields.flag("flush_cache", is_shared)
    mode, abort = fields.text("mode", None), fields.flag("abort_all_requests", None)
    if None not in (mode, abort) and abort != (mode == "abort"):
        raise Malformed(
            f"mode {mode!r:.80} contradicts abort_all_requests "
            f"{str(abort).lower()}: leave one of them out"
        )
    if mode is None:
        mode = "abort" if abort else "retract" if flush else None
    if flush and mode == "retract":
        counts = await control.ask(calls.CountRequests())
        if any(c["paused"] and c["num_running"] for c in counts):
            raise PauseConflict(
                "flush_cache cannot drop the KV of requests that are paused in place; "
                "pause with mode 'retract', or leave flush_cache out"
            )
    return {"mode": mode, "flush_cache": flush}


Handler = Callable[[Any, dict[str, Any]], Awaitable[Reply]]

GROUP = "weight_update_group"
LONGEST_WAIT_S = 300.0

OLDER_MODES = {
    "abort_all": "abort",
    "retract_all": "retract",
    "non_blocking": "in_place",
}
"""Names of pause modes, and of flags, in drafts of SGLang's interface."""
OLDER_FLAGS = OLDER_MODES | {"block_generation": "wait"}
SAME = {"keep": "in_place"}
ALONE = ("abort", "in_place", "wait", "retract")
"""A pause that names no mode has the first of these that no flag excludes."""

OF_EVERY_REQUEST = ("rid", "http_worker_ipc")
"""Fields of every request dataclass of SGLang, which its clients send whole. They are
for SGLang's own processes and are ignored here."""


async def pause_generation(
    engine: upstream.EngineClient, body: dict[str, Any], pause: Handler
) -> Reply:
    """SGLang's modes, older spellings of them, and ours; its default is `abort`."""
    fields = _fields(body)
    _settle_mode(fields)
    if fields.flag("online", False) or body.get("mode") == "online":
        raise Malformed("online: an update needs no pause here; leave this call out")
    flush = fields.flag("flush_cache", False)
    asked = fields.only("mode", "lease_s", "owner") | {"flush_cache": flush}
    asked.setdefault("mode", "abort")
    control, memory = control_of(engine), partial_updates.memory_of(engine)
    is_paused = (await control.paused())["is_paused"]
    if not is_paused and await partial_updates.unfinished(control) is not None:
        await control.ask(
            calls.PauseDecoding(**asked, is_trial=True)
        )  # a rejection must end no version
        await partial_updates.drop(control, memory)
    reply = await pause(engine, asked)
    if not is_paused and not memory.has_begun:
        memory.forget()  # the next tensors belong to another version
    return _ok(reply, "Generation paused successfully.") | {"status": "ok"}


async def continue_generation(
    engine: upstream.EngineClient, body: dict[str, Any], resume: Handler
) -> Reply:
    """End a pause; an incomplete version is aborted, and a 422 names what it lacks."""
    fields = _fields(body)
    fields.flag("torch_empty_cache", True)
    asked = fields.only("owner")
    control = control_of(engine)
    owners = check_owner(asked.get("owner")), (await control.paused())["owner"]
    if None not in owners and len(set(owners)) == 2:
        return await resume(engine, asked)  # is rejected, and ends no version
    missing = await partial_updates.close(control, partial_updates.memory_of(engine))
    reply = await resume(engine, asked)
    if missing is not None:
        missing.message += "; decoding goes on with the live weights"
        raise missing
    return _ok(reply, "Generation continued successfully.") | {"status": "ok"}


async def update_weights_from_disk(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Serve a checkpoint of the engine's host; `model_path` is SGLang's `path`."""
    fields = _fields(body)
    path = fields.take("path")
    path = fields.take("model_path") if path is None else path
    fields.one_of("load_format", (None, "auto", "safetensors"))
    step = fields.number("token_step", 0)
    keep_pause = fields.flag("keep_pause", False)
    control = control_of(engine)
    commit = await commit_options(engine, control, fields)
    options = fields.described(OPENING, "subset", "draft_path", "expect_digest")
    if step:
        manifest = options.setdefault("manifest", {"format": 1})
        if isinstance(manifest, dict):
            manifest["step"] = step
    reply = await from_disk(control, path, keep_pause=keep_pause, **options, **commit)
    counts = await control.ask(calls.CountRequests())
    frozen = sum(c["num_running"] + c["num_waiting"] for c in counts if c["paused"])
    return _ok(reply, "weights updated") | {"num_paused_requests": frozen}


async def update_weights_from_tensor(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Tensors in base64: one entry for all ranks, or one each.

    An entry is a safetensors file, or a pickle if the server was started for pickles.
    The tensors of a pickle may be CUDA IPC handles of the sender's GPU memory.

    With `manifest` the tensors are a version, or a delta, and the call is all of its
    update. With `chunk` they are a chunk of the update under way. With neither they are
    SGLang's: a version, or a piece of one.
    """
    fields = _fields(body)
    entries = fields.take("serialized_named_tensors")
    if isinstance(entries, str):
        entries = [entries]
    size = engine.vllm_config.parallel_config.world_size
    if not isinstance(entries, list) or len(entries) not in (1, size):
        raise Malformed(
            f"serialized_named_tensors must be a list of 1 or {size} strings, one for "
            "all ranks or one for each"
        )
    load_format = fields.one_of("load_format", (None, "flattened_bucket"))
    control = control_of(engine)
    allow = InflightConfig.of(engine.vllm_config).pickled_tensors == "on"
    # In a thread, since this thread sends the tokens of all streams.
    spool = spooled(entries, load_format, allow_pickle=allow)
    stack = ExitStack()
    try:
        tensors = await asyncio.to_thread(stack.enter_context, spool)
        info: Any = tensors.infos
        replicas = engine.vllm_config.parallel_config.data_parallel_size
        info = info * replicas if len(info) > 1 else info[0]
        chunk = fields.take("chunk")
        if chunk is not None:
            whose = fields.only("update_id", "owner")
            reply = await control.update(info, chunk=chunk, **whose)
            return _ok(reply, "chunk received")
        commit = await commit_options(engine, control, fields)
        options = fields.described(OPENING, "expect_digest")
        if "manifest" in options:
            digest = options.pop("expect_digest", None)
            start = StartUpdate(transport=tensors.transport, **options)
            finish = {"expect_digest": digest, **commit}
            reply = await control.update_in_one_call([info], start=start, finish=finish)
            return _ok(reply, "weights updated")
        label = options.pop("weight_version", None)
        if options:
            raise Malformed(
                f"{sorted(options)} are fields of an update with 'manifest'; a call "
                "without it is a piece of a version"
            )
        reply = await partial_updates.take(
            control,
            tensors.transport,
            info,
            label=label,
            commit=commit,
            memory=partial_updates.memory_of(engine),
            names=tensors.names,
        )
    finally:
        await asyncio.to_thread(stack.close)
    return _ok(reply, reply["message"])


async def init_weights_update_group(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Join the group that a trainer, rank 0, opens with `torch.distributed`."""
    fields = _fields(body)
    address, port = fields.needed("master_address"), fields.needed("master_port")
    info = {
        "init_method": f"tcp://{address}:{port}",
        "rank_offset": fields.needed("rank_offset"),
        "world_size": fields.needed("world_size"),
        "group_name": fields.text("group_name", GROUP),
        "backend": fields.text("backend", "nccl"),
        "timeout_s": fields.number("timeout_s", LONGEST_WAIT_S),
    }
    fields.only()
    control = control_of(engine)
    # The trainer of an open version is gone, or starts again.
    await partial_updates.drop(control, partial_updates.memory_of(engine))
    await control.join_group(info)
    return _ok({}, f"joined group {info['group_name']!r}")


async def destroy_weights_update_group(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Leave a group; a version that waits for more tensors from it is aborted."""
    fields = _fields(body)
    name = fields.text("group_name", GROUP)
    fields.only()
    control = control_of(engine)
    await partial_updates.drop(control, partial_updates.memory_of(engine))
    await control.leave_group(name)
    return _ok({}, f"left group {name!r}")


async def update_weights_from_distributed(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Receive the tensors that the trainer broadcasts now."""
    fields = _fields(body)
    control = control_of(engine)
    group = fields.text("group_name", GROUP)
    async with control.announced(group) as announcement:
        bucket = fields.one_of("load_format", (None, "flattened_bucket"))
        info = {
            "names": fields.needed("names"),
            "dtype_names": fields.needed("dtypes"),
            "shapes": fields.needed("shapes"),
            "group_name": group,
            "flattened": bucket is not None,
            "announcement": announcement,
        }
        commit = await commit_options(engine, control, fields)
        label = fields.only("weight_version").get("weight_version")
        reply = await partial_updates.take(
            control,
            "groups",
            info,
            label=label,
            commit=commit,
            memory=partial_updates.memory_of(engine),
            names=_strings(info["names"]),
            is_broadcast=True,
        )
    return _ok(reply, reply["message"])


async def begin_weight_update(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Begin a version; an incomplete version before it is aborted."""
    fields = _fields(body)
    fields.one_of("selector", (None, "all", "target"))
    fields.only()
    await partial_updates.begin(control_of(engine), partial_updates.memory_of(engine))
    return _ok({}, "send the version; it is served at POST /end_weight_update")


async def end_weight_update(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """End a version and commit it; a 422 names the tensors that it lacks."""
    _fields(body).only()
    control = control_of(engine)
    reply = await partial_updates.end(control, partial_updates.memory_of(engine)) or {}
    served = (await control.info())["weight_version"]
    reply |= {"weight_version": served}
    return _ok(reply, f"version {served!r} is served")


async def update_weights_from_ipc(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Receive the tensors that a checkpoint-engine of this host lends.

    Its messages are pickles. They are read only if the server was started for pickles.
    """
    fields = _fields(body)
    try:
        info = ZmqUpdateInfo(fields.needed("zmq_handles"))
    except ValueError as error:
        raise Malformed(str(error)) from None
    allow = InflightConfig.of(engine.vllm_config).pickled_tensors == "on"
    try:
        reply = await _from_checkpoint_engine(engine, fields, info)
    except InflightError as error:
        # Its processes wait for an answer, and perhaps no rank has come to give one.
        if allow:
            await asyncio.to_thread(reject, info, str(error))
        raise
    return _ok(reply, reply["message"])


async def _from_checkpoint_engine(
    engine: upstream.EngineClient, fields: Fields, info: ZmqUpdateInfo
) -> Reply:
    control, memory = control_of(engine), partial_updates.memory_of(engine)
    commit = await commit_options(engine, control, fields)
    label = fields.only("weight_version").get("weight_version")
    if InflightConfig.of(engine.vllm_config).pickled_tensors != "on":
        raise Malformed(
            "the messages of a checkpoint-engine are pickles, which can run anything; "
            "start with --inflight-pickled-tensors on, or use another route"
        )
    if not memory.has_begun:
        await partial_updates.drop(control, memory)  # of a sender that is gone
    return await partial_updates.take(
        control,
        "checkpoint_engine",
        {"zmq_handles": info.zmq_handles},
        label=label,
        commit=commit,
        memory=memory,
        is_broadcast=True,
        is_whole=True,
    )


async def update_weight_version(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Give the live weights another label; this is a version without bytes.

    SGLang aborts all requests by default. Here `abort_all_requests` does that.
    """
    fields = _fields(body)
    label = fields.needed("new_version")
    abort = fields.flag("abort_all_requests", False)
    fields.only()
    control = control_of(engine)
    if abort and check_label(label):
        replies = await control.ask(calls.ReadVersion())
        # Otherwise the rename is rejected. Abort first: no request then has both
        # labels.
        if all(reply["weights"] == "live" for reply in replies):
            await control.ask(calls.AbortRequests())
    await control.rename(label)
    return _ok({"new_version": label}, f"Weight version updated to {label}")


async def post_process_weights(
    engine: upstream.EngineClient, body: dict[str, Any]
) -> Reply:
    """Answer that nothing is to be done: an update processes its weights itself."""
    fields = _fields(body)
    fields.flag("restore_weights_before_load", False)
    fields.flag("post_process_quantization", False)
    fields.only()
    return _ok({}, "nothing to do: every update processes its own weights")


def pausing(pause: Handler) -> Handler:
    """`pause` with the request and the reply of SGLang."""

    @wraps(pause_generation)
    async def handler(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
        return await pause_generation(engine, body, pause)

    return handler


def continuing(resume: Handler) -> Handler:
    """`resume` with the request and the reply of SGLang."""

    @wraps(continue_generation)
    async def handler(engine: upstream.EngineClient, body: dict[str, Any]) -> Reply:
        return await continue_generation(engine, body, resume)

    return handler


def _settle_mode(fields: Fields) -> None:
    """Merge all fields that can name the mode of a pause into `mode`.

    A false flag excludes its mode. `abort_all: false` alone is the pause of a draft of
    SGLang that aborts nothing.

    Raises:
        Malformed: two fields contradict each other.

    """
    mode = fields.take("mode")
    if not isinstance(mode, str | None):
        fields.default("mode", mode)  # the engine rejects it
        return
    mode = None if mode is None else OLDER_MODES.get(mode, mode)
    named = {} if mode is None else {SAME.get(mode, mode): "mode"}
    excluded: dict[str, str] = {}
    for name, meant in OLDER_FLAGS.items():
        flag = fields.flag(name, None)
        if flag:
            named.setdefault(meant, name)
        elif flag is not None:
            excluded[meant] = name
    if len(named) > 1 or named.keys() & excluded.keys():
        flags = [name for each, name in excluded.items() if each in named]
        raise Malformed(
            f"these fields contradict each other: {[*named.values(), *flags]}; send "
            "'mode' alone: in_place, retract, abort or wait"
        )
    if not named:
        left = [each for each in ALONE if each not in excluded]
        if not left:
            raise Malformed(
                "these fields exclude every mode; send 'mode' alone: in_place, "
                "retract, abort or wait"
            )
        mode = left[0]
    fields.default("mode", mode or next(iter(named)))


def _fields(body: dict[str, Any]) -> Fields:
    """The fields of a request, without those of every request of SGLang."""
    fields = Fields(body)
    for name in OF_EVERY_REQUEST:
        fields.take(name)
    return fields


def _ok(reply: Reply, message: str) -> Reply:
    return reply | {"success": True, "message": message}


def _strings(value: object) -> list[str]:
    """The strings in a list. The engine rejects the other entries."""
    if not isinstance(value, list):
        return []
    return [each for each in value if isinstance(each, str)]


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/update_weights_from_disk"): update_weights_from_disk,
    ("POST", "/update_weights_from_tensor"): update_weights_from_tensor,
    ("POST", "/init_weights_update_group"): init_weights_update_group,
    ("POST", "/update_weights_from_distributed"): update_weights_from_distributed,
    ("POST", "/destroy_weights_update_group"): destroy_weights_update_group,
    ("POST", "/begin_weight_update"): begin_weight_update,
    ("POST", "/end_weight_update"): end_weight_update,
    ("POST", "/update_weights_from_ipc"): update_weights_from_ipc,
    ("POST", "/update_weight_version"): update_weight_version,
    ("POST", "/post_process_weights"): post_process_weights,
}
"""SGLang's routes for updates; its other routes are in queries.py."""
