"""The methods of `AsyncLLM` and `LLM`: new ones, and upstream's that become
transactional.

Each method asks the engine through `Control`. The blocking methods of `LLM` drive the
same coroutines.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import (
    AsyncCoreClient,
    Reply,
    SyncCoreClient,
    run_sync,
)
from vllm.inflight.api.control.from_disk import from_disk
from vllm.inflight.api.control.restore import restore
from vllm.inflight.api.request.fields import fields_of, one_value, opening
from vllm.inflight.api.request.schema import FINISHING, OPENING
from vllm.inflight.calls import ReadNames, ReleaseMemory, StartUpdate, UndoRelease
from vllm.inflight.errors import Conflict, InflightError, Malformed
from vllm.inflight.releases import fields as release_fields
from vllm.inflight.worker.catalogue import unpacked

T = TypeVar("T")

MEMORY_TAGS = ("kv_cache", "weights")
"""The parts of the memory that can be released."""
RELEASE_MODES = ("abort", "retract", "in_place")
"""What can happen to requests when memory is released."""


def control_of(engine: upstream.EngineClient | upstream.LLM) -> Control:
    """The control of an `AsyncLLM` or an `LLM`."""
    llm_engine = getattr(engine, "llm_engine", None)
    if llm_engine is not None:
        return Control(SyncCoreClient(llm_engine.engine_core))
    return Control(AsyncCoreClient(engine.engine_core))


def _field(request: object, name: str) -> Any:
    """`name` of a request: upstream's object, its dict, or the value alone."""
    if isinstance(request, dict):
        return request.get(name, request)
    found = getattr(request, name, None)
    if found is None:
        raise Malformed(f"the request has no {name}")
    return found


# Methods of AsyncLLM. Those of LLM are made from them, in `blocking`.


async def init_weight_transfer_engine(self: upstream.AsyncLLM, request: object) -> None:
    """Connect the configured transport in the staging thread, while decoding goes on.

    Args:
        self: the engine.
        request: `{"init_info": …}` of the backend, or upstream's request.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.
        NoTransport: no backend is configured.
        UpdateBusy: an update is under way, or another trainer is connecting.
        TransferFault: the trainer did not connect.

    """
    await control_of(self).init_transport(_field(request, "init_info"))


async def shutdown_weight_transfer_engine(self: upstream.AsyncLLM) -> None:
    """Release the trainer's connection.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.
        UpdateBusy: an update is under way.

    """
    await control_of(self).shutdown_transport()


async def start_weight_update(
    self: upstream.AsyncLLM, is_checkpoint_format: bool | None = None, **options: Any
) -> Reply:
    """Open an update.

    Args:
        self: the engine.
        is_checkpoint_format: argument of vLLM 0.21 to 0.24. True and None are accepted:
            tensors have the names and shapes of the checkpoint.
        **options: `update_id`, `weight_version`, `base_version`, `manifest`,
            `deadline_s`, `allow_nonfinite` and `owner` of
            `POST /start_weight_update`.

    Returns:
        `{"update_id", "phase"}`.

    Raises:
        Malformed: an option is unknown, or `is_checkpoint_format` is False.
        UpdateBusy: another update is under way.
        VersionConflict: `base_version` is not the live version.
        NoTransport: no backend is configured.
        StagingUnavailable: this model has no shadow weights.

    """
    release_fields.settled(
        {"is_checkpoint_format": is_checkpoint_format}, release_fields.START
    )
    return await control_of(self).start(StartUpdate(**opening(options)))


async def start_draft_weight_update(self: upstream.AsyncLLM, **options: Any) -> Reply:
    """Open an update of the drafter alone; see `start_weight_update`.

    Tensors have the names of the drafter's own checkpoint.

    Args:
        self: the engine.
        **options: the options of `start_weight_update`.

    Returns:
        `{"update_id", "phase"}`.

    Raises:
        Conflict: the engine has no drafter, or its drafter is MTP layers of the model.

    """
    manifest = opening(options).pop("manifest", None)
    if manifest is None:
        manifest = {"format": 1}
    if not isinstance(manifest, dict):
        raise Malformed(f"manifest must be an object, got {manifest!r:.80}")
    return await control_of(self).start(
        StartUpdate(manifest=manifest | {"draft": True}, **options)
    )


async def update_weights(
    self: upstream.AsyncLLM,
    request: object,
    update_id: str | None = None,
    chunk: int | None = None,
    owner: str | None = None,
    *,
    start: dict[str, Any] | None = None,
    finish: dict[str, Any] | None = None,
) -> Reply:
    """Receive a chunk into the shadow weights; return when every rank has it.

    With `start` the call opens the update first, and aborts it if the call fails. With
    `finish` it commits the update. With both it is a whole update in one call.

    Args:
        self: the engine.
        request: `{"update_info": …}` of the backend, or upstream's request.
        update_id: the id of the update; None for the update under way.
        chunk: the number of the chunk, from 0. A chunk with a number is received once.
        owner: the owner that `start_weight_update` was given.
        start: the options of `start_weight_update`; None: the update is open.
        finish: the options of `finish_weight_update`; None: the update stays open.

    Returns:
        `{"update_id", "phase", "bytes", "parameters"}`; with `finish` the reply of
        `finish_weight_update`.

    Raises:
        Malformed: an option is unknown, or ids or owners differ.
        WeightsMismatch: the model does not accept tensors; `tensors` names them.
        TransferFault: the transfer broke off.
        DeadlineExceeded: the update took longer than `deadline_s`.
        WrongPhase: no update is open.

    """
    control, info = control_of(self), _field(request, "update_info")
    if start is None and finish is None:
        return await control.update(info, update_id, chunk, owner)
    opens, commits = {}, {}
    if start is not None:
        opens = fields_of("start", start, OPENING, release_fields.START)
    if finish is not None:
        commits = fields_of("finish", finish, FINISHING)
    ids = {
        name: one_value(name, given, opens.pop(name, None), commits.pop(name, None))
        for name, given in (("update_id", update_id), ("owner", owner))
    }
    return await control.update_in_one_call(
        [info],
        start=None if start is None else StartUpdate(**opens, **ids),
        finish=None if finish is None else commits,
        chunk=chunk,
        **ids,
    )


async def prepare_weight_update(
    self: upstream.AsyncLLM, update_id: str | None = None, owner: str | None = None
) -> Reply:
    """Prepare the commit: every rank verifies its shadow weights, and nothing flips.

    A trainer with several engines compares their replies before it commits on any of
    them. The update stays staged until it is finished, aborted, or past its deadline.

    Args:
        self: the engine.
        update_id: the id of the update; None for the update under way.
        owner: the owner that `start_weight_update` was given.

    Returns:
        The reply of `POST /prepare_weight_update`.

    Raises:
        WeightsMismatch: tensors are missing or differ from the manifest; `tensors`
            names them.
        WrongPhase: no update is open.

    """
    return await control_of(self).prepare(update_id, owner)


async def finish_weight_update(
    self: upstream.AsyncLLM, weight_version: str | None = None, **options: Any
) -> Reply:
    """Prepare and commit: verify the shadow weights, then flip between two steps.

    Args:
        self: the engine.
        weight_version: the label of the version, if `start_weight_update` gave none.
        **options: `mode`, `flush_cache`, `expect_version`, `expect_digest`,
            `update_id` and `owner` of `POST /finish_weight_update`.

    Returns:
        `weight_version`, `epoch`, `digest` (hex), `gap_ms`, `seconds` and more of
        `POST /finish_weight_update`.

    Raises:
        WeightsMismatch: tensors are missing or differ from the manifest; `tensors`
            names them.
        VersionConflict: the start gave another label, or `expect_version` is not the
            live version.
        WrongPhase: no update is open.

    """
    return await control_of(self).finish(weight_version, **options)


async def update_weights_from_disk(
    self: upstream.AsyncLLM,
    path: str | None,
    weight_version: str | None = None,
    *,
    mode: str | None = None,
    **options: Any,
) -> Reply:
    """Stage, verify and commit the checkpoint at `path` in one call.

    Args:
        self: the engine.
        path: a safetensors file, or a directory of them; None if only `draft_path` is
            given.
        weight_version: the label of the version.
        mode: what happens to running requests at the commit.
        **options: the options of `start_weight_update`, and these. `subset`: patterns
            of the names at `path`, if the checkpoint does not have all tensors; the
            other tensors keep their live values. `draft_path`: a drafter's checkpoint,
            for the same update. `expect_digest`: the digest that the new version must
            have. `flush_cache`: whether to drop the caches at the commit.

    Returns:
        The reply of `finish_weight_update`.

    Raises:
        Forbidden: `path` is outside of `--inflight-allowed-paths`.
        WeightsMismatch: `path` is not a whole checkpoint of this model.
        UpdateBusy: another update is under way.

    """
    options = opening(options, "flush_cache", "subset", "draft_path", "expect_digest")
    control = control_of(self)
    return await from_disk(control, path, weight_version, mode=mode, **options)


async def abort_weight_update(
    self: upstream.AsyncLLM, update_id: str | None = None, owner: str | None = None
) -> Reply:
    """Abort an update; the live weights do not change.

    Args:
        self: the engine.
        update_id: the id of the update; None for the update under way.
        owner: the owner that `start_weight_update` was given.

    Returns:
        `{"update_id", "phase"}`.

    Raises:
        WrongPhase: the update is committed, or no update is open.
        UnknownUpdate: the engine does not know this id.

    """
    return await control_of(self).abort(update_id, owner)


async def rollback_weights(
    self: upstream.AsyncLLM, to_version: str | None = None, *, mode: str | None = None
) -> Reply:
    """Flip back to the rollback target, as fast as a commit.

    Args:
        self: the engine.
        to_version: the label that the rollback target must have.
        mode: what happens to running requests; by default nothing (`in_place`).

    Returns:
        The reply of `POST /rollback_weights`.

    Raises:
        NothingToRollBack: there is no rollback target.
        VersionConflict: the rollback target is not `to_version`.
        UpdateBusy: an update is under way.

    """
    return await control_of(self).rollback(to_version, mode=mode)


async def restore_weights(self: upstream.AsyncLLM) -> Reply:
    """Restore the version from before the restart, from `--inflight-journal`.

    Returns:
        The reply of `POST /restore_weights`.

    Raises:
        Conflict: there is no journal or no file, or an update was committed meanwhile.

    """
    return await restore(control_of(self))


async def weight_update_status(
    self: upstream.AsyncLLM, update_id: str | None = None
) -> Reply:
    """Return phase, staged bytes and outcome of one update, or of all known updates.

    Args:
        self: the engine.
        update_id: the id of the update; None for all known updates.

    Returns:
        The reply of `GET /weight_update/{update_id}`; for all updates the reply of
        `GET /weight_update`.

    Raises:
        UnknownUpdate: the engine does not know this id.

    """
    return await control_of(self).status(update_id)


async def verify_weights(self: upstream.AsyncLLM) -> Reply:
    """Compare the live weights with the digest of their label, while decoding goes on.

    Returns:
        `result` (`equal`, `different` or `unknown`), the names of `different` tensors,
        and more of `POST /weights_checker` with the action `verify`.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.
        EngineAsleep: there are no weights to read.

    """
    return await control_of(self).verify()


async def weight_info(self: upstream.AsyncLLM) -> Reply:
    """Return version, digest and epoch of the live weights, and the rollback target.

    Returns:
        `weight_version`, `epoch`, `digest`, `step`, `previous` and more of
        `GET /weight_info`.

    """
    return await control_of(self).info()


async def weight_names(self: upstream.AsyncLLM) -> Reply:
    """Return name, shape and dtype of every tensor that an update may contain.

    They are those of the start checkpoint. An engine without a start checkpoint names
    its parameters as a checkpoint would; the shape of a fused or sharded parameter is
    then None.

    Args:
        self: the engine.

    Returns:
        The reply of `GET /weight_names`: `of`, `num_tensors`, `tensors`.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.

    """
    first, *_ = await control_of(self).ask(ReadNames())
    if hasattr(self, "llm_engine"):
        return unpacked(first["catalogues"])
    # A hundred thousand names would block the event loop.
    return await asyncio.to_thread(unpacked, first["catalogues"])


async def release_memory_occupation(
    self: upstream.AsyncLLM,
    tags: list[str] | None = None,
    *,
    mode: str | None = None,
) -> Reply:
    """Release memory until `wake_up`; a copy of the weights stays on the host.

    Args:
        self: the engine, which was started with `enable_sleep_mode`.
        tags: `weights`, `kv_cache`; None for both.
        mode: what happens to requests: `abort`, `retract` or `in_place`. None: the mode
            of a pause `in_place` or `retract`, else `abort`.

    Returns:
        The reply of `POST /release_memory_occupation`.

    Raises:
        Malformed: there is no such tag or mode.
        Conflict: the engine was started without `enable_sleep_mode`.
        PauseConflict: a request cannot be kept; nothing has changed.
        EngineFault: the memory could not be released.

    """
    chosen = check_tags(tags)
    if mode is not None and mode not in RELEASE_MODES:
        named = ", ".join(map(repr, RELEASE_MODES))
        raise Malformed(f"mode {mode!r:.80} is not supported; it can be {named}")
    return await release_memory(self, chosen, mode)


def check_tags(tags: object) -> set[str]:
    """The parts of the memory that `tags` of a request names; None names both."""
    if tags is None:
        return set(MEMORY_TAGS)
    if not isinstance(tags, list) or not tags:
        raise Malformed("tags must be a list of strings")
    for tag in tags:
        if tag not in MEMORY_TAGS:
            named = ", ".join(MEMORY_TAGS)
            raise Malformed(f"tag {tag!r:.80} is unknown; there are {named}")
    return set(tags)


async def release_memory(
    engine: upstream.EngineClient | upstream.LLM, tags: set[str], mode: str | None
) -> Reply:
    """Release memory on every engine, or on none of them if one rejects the call."""
    require_sleep_mode(engine)
    control = control_of(engine)
    release = ReleaseMemory(sorted(tags), mode, release_id=uuid.uuid4().hex)
    await control.ask(replace(release, is_trial=True))
    try:
        first, *others = await control.ask(release)
    except InflightError:
        await control.ask(UndoRelease(release.release_id))
        raise
    reply = dict(first)
    for name in ("num_aborted", "num_retracted"):
        reply[name] += sum(other[name] for other in others)
    return reply


def require_sleep_mode(engine: upstream.EngineClient | upstream.LLM) -> None:
    """Raise `Conflict` if the engine cannot release memory."""
    config = getattr(engine, "llm_engine", engine).vllm_config
    if not config.model_config.enable_sleep_mode:
        raise Conflict(
            "this server was started without --enable-sleep-mode, so it cannot release "
            "memory"
        )


def blocking(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """The blocking method of `LLM` for a method of `AsyncLLM`."""

    def call(self: upstream.LLM, *args: object, **kwargs: object) -> T:
        return run_sync(method(self, *args, **kwargs))

    call.__name__, call.__qualname__ = method.__name__, method.__qualname__
    call.__doc__ = method.__doc__
    return call


OUR_MODES = ("in_place", "retract")
"""Pause modes that upstream does not have; they do not drop the caches by default."""


async def pause_generation(
    self: upstream.AsyncLLM,
    *,
    mode: str = "abort",
    wait_for_inflight_requests: bool | None = None,
    clear_cache: bool | None = None,
    flush_cache: bool | None = None,
    lease_s: float | None = None,
    owner: str | None = None,
) -> Reply:
    """Pause between two steps; modes `in_place` (`keep`), `retract`, `abort`, `wait`.

    Args:
        self: the engine.
        mode: what happens to running requests; `keep` is upstream's name of `in_place`.
        wait_for_inflight_requests: argument of vLLM 0.15 to 0.31. True means the mode
            `wait`, whatever `mode` is; with False and None `mode` counts.
        clear_cache: upstream's argument, with upstream's effect: `keep` with it
            retracts and flushes. None: true for upstream's modes, as there, and
            false for `in_place` and `retract`, as on the route.
        flush_cache: whether to drop the caches, in every mode; it takes precedence over
            `clear_cache`. None: as `clear_cache`.
        lease_s: seconds after which the pause ends, unless the same call renews it; 0
            for never, None for `--inflight-pause-lease-s`.
        owner: name of the caller; another owner can neither change nor end the pause.

    Returns:
        The reply of `POST /pause_generation`.

    Raises:
        Malformed: there is no such mode, or an argument has the wrong type.
        PauseConflict: the current pause forbids this mode.
        OwnedByAnother: another owner holds the pause.

    """
    if not isinstance(wait_for_inflight_requests, bool | None):
        raise Malformed(
            "wait_for_inflight_requests must be true or false, got "
            f"{wait_for_inflight_requests!r:.80}"
        )
    if wait_for_inflight_requests:
        mode = "wait"
    if flush_cache is None:
        flush_cache = mode not in OUR_MODES if clear_cache is None else clear_cache
        if mode == "keep" and flush_cache:
            mode = "retract"
    renderer = getattr(self, "renderer", None)
    if flush_cache and renderer is not None:
        if hasattr(self, "llm_engine"):  # an `LLM` has no event loop to await in
            renderer.clear_mm_cache()
        else:
            await renderer.clear_mm_cache_async()
    return await control_of(self).pause(
        mode, flush_cache=flush_cache, lease_s=lease_s, owner=owner
    )


async def is_paused(self: upstream.AsyncLLM) -> bool:
    """Whether decoding is paused, in any mode.

    Returns:
        True or False.

    """
    return bool((await control_of(self).paused())["is_paused"])


async def continue_generation(
    self: upstream.AsyncLLM, owner: str | None = None
) -> Reply:
    """End a pause; without a pause nothing changes.

    Args:
        self: the engine.
        owner: the owner of the pause; None ends the pause of any owner.

    Returns:
        The reply of `POST /continue_generation`.

    Raises:
        OwnedByAnother: another owner holds the pause.

    """
    return await control_of(self).resume(owner)


async def resume_generation(self: upstream.AsyncLLM) -> None:
    """Upstream's name for `continue_generation`."""
    await control_of(self).resume()
