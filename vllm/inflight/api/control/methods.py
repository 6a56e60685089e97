"""The methods that `AsyncLLM` and `LLM` gain, and those of upstream's that become
transactional. Each asks the engine through `Control`; the blocking ones drive
the same coroutines.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.inflight import release_fields
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import (
    AsyncCoreClient,
    Reply,
    SyncCoreClient,
    run_sync,
)
from vllm.inflight.api.control.from_disk import from_disk
from vllm.inflight.api.control.restore import restore
from vllm.inflight.api.request.fields import opening
from vllm.inflight.errors import Malformed
from vllm.inflight.worker.catalogue import unpacked


def control_of(engine: Any) -> Control:
    """The control of an `AsyncLLM` or an `LLM`."""
    llm_engine = getattr(engine, "llm_engine", None)
    if llm_engine is not None:
        return Control(SyncCoreClient(llm_engine.engine_core))
    return Control(AsyncCoreClient(engine.engine_core))


def _field(request: Any, name: str) -> Any:
    """`name` of a request given as upstream's class, as its dict, or bare."""
    if isinstance(request, dict):
        return request.get(name, request)
    found = getattr(request, name, None)
    if found is None:
        raise Malformed(f"the request has no {name}")
    return found


# Methods of AsyncLLM. Those of LLM are made from them, in `blocking`.


async def init_weight_transfer_engine(self: Any, request: Any) -> None:
    """Connect the configured transport; in the staging thread, tokens flow on.

    Args:
        self: the engine.
        request: `{"init_info": …}` of the backend, or upstream's request.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.
        NoTransport: no backend is configured.
        UpdateBusy: an update is under way, or another trainer is being joined.
        TransferFault: the trainer did not come.

    """
    await control_of(self).init_transport(_field(request, "init_info"))


async def shutdown_weight_transfer_engine(self: Any) -> None:
    """Release the trainer's connection.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.
        UpdateBusy: an update is under way.

    """
    await control_of(self).shutdown_transport()


async def start_weight_update(
    self: Any, is_checkpoint_format: bool | None = None, **options: Any
) -> Reply:
    """Open an update.

    Args:
        self: the engine.
        is_checkpoint_format: of vLLM 0.21 to 0.24. True and None mean what happens
            here: tensors have the names and shapes of the checkpoint.
        **options: `update_id`, `weight_version`, `base_version`, `manifest`,
            `deadline_s`, `allow_nonfinite` and `owner` of
            `POST /start_weight_update`.

    Returns:
        `{"update_id", "phase"}`.

    Raises:
        Malformed: an option is unknown, or `is_checkpoint_format` is False.
        UpdateBusy: another update is under way.
        VersionConflict: `base_version` is not what is served.
        NoTransport: no backend is configured.
        StagingUnavailable: this model has no second set of weights.

    """
    release_fields.settled(
        {"is_checkpoint_format": is_checkpoint_format}, release_fields.START
    )
    return await control_of(self).start(**opening(options))


async def start_draft_weight_update(self: Any, **options: Any) -> Reply:
    """Open an update of the drafter alone; see `start_weight_update`.

    Tensors come under the names of the drafter's own checkpoint.

    Args:
        self: the engine.
        **options: those of `start_weight_update`.

    Returns:
        `{"update_id", "phase"}`.

    Raises:
        Conflict: there is no drafter, or it is MTP layers of the model.

    """
    manifest = opening(options).pop("manifest", None)
    if manifest is None:
        manifest = {"format": 1}
    if not isinstance(manifest, dict):
        raise Malformed(f"manifest must be an object, got {manifest!r:.80}")
    return await control_of(self).start(manifest=manifest | {"draft": True}, **options)


async def update_weights(
    self: Any,
    request: Any,
    update_id: str | None = None,
    chunk: int | None = None,
    owner: str | None = None,
) -> Reply:
    """Have a chunk received into the second set; returns when every rank has it.

    Args:
        self: the engine.
        request: `{"update_info": …}` of the backend, or upstream's request.
        update_id: of `start_weight_update`; the one under way if None.
        chunk: its number from 0; a chunk with a number is received once.
        owner: the one that `start_weight_update` was given.

    Returns:
        `{"update_id", "phase", "bytes", "parameters"}`.

    Raises:
        WeightsMismatch: tensors are not the model's; `tensors` names them.
        TransferFault: the bytes stopped coming.
        DeadlineExceeded: the update took longer than `deadline_s`.
        WrongPhase: no update is open.

    """
    return await control_of(self).update(
        _field(request, "update_info"), update_id, chunk, owner
    )


async def prepare_weight_update(
    self: Any, update_id: str | None = None, owner: str | None = None
) -> Reply:
    """Verify and vote, and switch nothing yet: the first half of a finish.

    For who has several engines to finish, and compares what they have staged before any
    of them commits. An update stays staged until it is finished, aborted, or late.

    Args:
        self: the engine.
        update_id: of `start_weight_update`; the one under way if None.
        owner: the one that `start_weight_update` was given.

    Returns:
        That of `POST /prepare_weight_update`.

    Raises:
        WeightsMismatch: tensors are missing or not as announced; `tensors` names them.
        WrongPhase: no update is open.

    """
    return await control_of(self).prepare(update_id, owner)


async def finish_weight_update(
    self: Any, weight_version: str | None = None, **options: Any
) -> Reply:
    """Verify, vote and switch.

    Args:
        self: the engine.
        weight_version: the label, if `start_weight_update` gave none.
        **options: `mode`, `flush_cache`, `expect_version`, `expect_digest`,
            `update_id` and `owner` of `POST /finish_weight_update`.

    Returns:
        `weight_version`, `epoch`, `digest` (hex), `gap_ms`, `seconds` and more of
        `POST /finish_weight_update`.

    Raises:
        WeightsMismatch: tensors are missing or not as announced; `tensors` names them.
        VersionConflict: another label was given, or `expect_version` is not served.
        WrongPhase: no update is open.

    """
    return await control_of(self).finish(weight_version, **options)


async def update_weights_from_disk(
    self: Any,
    path: str | None,
    weight_version: str | None = None,
    *,
    mode: str | None = None,
    **options: Any,
) -> Reply:
    """Serve the checkpoint at `path`: stage, verify and commit in one call.

    Args:
        self: the engine.
        path: of a safetensors file, or of a directory of them; None if only
            `draft_path` is given.
        weight_version: the label to serve it under.
        mode: what happens to running requests at the commit.
        **options: those of `start_weight_update`, and `subset`, patterns of the
            names that are at `path` if these are not all: the others keep what is
            served. `draft_path` is where a drafter's checkpoint is, for the same
            update. `expect_digest` is the digest of the version that it has to make.
            `flush_cache` drops the caches at the commit.

    Returns:
        That of `finish_weight_update`.

    Raises:
        Forbidden: it is outside of `--inflight-allowed-paths`.
        WeightsMismatch: it is not a whole checkpoint of this model.
        UpdateBusy: another update is under way.

    """
    options = opening(options, "flush_cache", "subset", "draft_path", "expect_digest")
    control = control_of(self)
    return await from_disk(control, path, weight_version, mode=mode, **options)


async def abort_weight_update(
    self: Any, update_id: str | None = None, owner: str | None = None
) -> Reply:
    """Give an update up; what is served does not change.

    Args:
        self: the engine.
        update_id: which; the one under way if None.
        owner: the one that `start_weight_update` was given.

    Returns:
        `{"update_id", "phase"}`.

    Raises:
        WrongPhase: it is committed, or there is none.
        UnknownUpdate: it is not remembered.

    """
    return await control_of(self).abort(update_id, owner)


async def rollback_weights(
    self: Any, to_version: str | None = None, *, mode: str | None = None
) -> Reply:
    """Serve the version served before again, as fast as a commit.

    Args:
        self: the engine.
        to_version: refuse unless this is the label of the version before.
        mode: what happens to running requests; by default nothing (`in_place`).

    Returns:
        That of `POST /rollback_weights`.

    Raises:
        NothingToRollBack: the version before is not held any more.
        VersionConflict: `to_version` is not that version.
        UpdateBusy: an update is under way.

    """
    return await control_of(self).rollback(to_version, mode=mode)


async def restore_weights(self: Any) -> Reply:
    """Serve what was served before the restart, by `--inflight-journal`.

    Returns:
        That of `POST /restore_weights`.

    Raises:
        Conflict: there is no journal, no file, or something was committed meanwhile.

    """
    return await restore(control_of(self))


async def weight_update_status(self: Any, update_id: str | None = None) -> Reply:
    """Phase, bytes staged and outcome of an update, or of all remembered.

    Args:
        self: the engine.
        update_id: which; all that are remembered if None.

    Returns:
        That of `GET /weight_update/{update_id}`; of all, `{"active", "outcomes"}`.

    Raises:
        UnknownUpdate: it is not remembered.

    """
    return await control_of(self).status(update_id)


async def verify_weights(self: Any) -> Reply:
    """Compare what is served with the digest of its label, beside decoding.

    Returns:
        `result` (`equal`, `different` or `unknown`), the names of what is `different`,
        and more of `POST /weights_checker` with the action `verify`.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.
        EngineAsleep: there are no weights to read.

    """
    return await control_of(self).verify()


async def weight_info(self: Any) -> Reply:
    """Version, digest and epoch that are served, and the version before.

    Returns:
        `weight_version`, `epoch`, `digest`, `step`, `previous` and more of
        `GET /weight_info`.

    """
    return await control_of(self).info()


async def weight_names(self: Any) -> Reply:
    """Name, shape and dtype of every tensor that an update may bring.

    They are those of the checkpoint that the engine started from. Of an engine that
    loaded none they are what its parameters are called in one; the shape of a fused or
    sharded parameter is then None.

    Args:
        self: the engine.

    Returns:
        That of `GET /weight_names`: `of`, `num_tensors`, `tensors`.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.

    """
    first, *_ = await control_of(self).ask("names")
    if hasattr(self, "llm_engine"):
        return unpacked(first["catalogues"])
    # A hundred thousand names would hold the event loop up.
    return await asyncio.to_thread(unpacked, first["catalogues"])


def blocking(method: Any) -> Any:
    """The same method for `LLM`: it returns when the answer is there."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_sync(method(self, *args, **kwargs))

    call.__name__, call.__qualname__ = method.__name__, method.__qualname__
    call.__doc__ = method.__doc__
    return call


OUR_MODES = ("in_place", "retract")
"""Pauses that upstream has not: no caller of its expects them to drop the caches."""


async def pause_generation(
    self: Any,
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
        mode: what becomes of running requests; `keep` is upstream's `in_place`.
        wait_for_inflight_requests: of vLLM 0.15 to 0.31. True means the mode `wait`,
            whatever `mode` says; with False and None `mode` counts.
        clear_cache: upstream's argument, with upstream's effect: `keep` with it
            retracts and flushes. None: true for upstream's modes, as there, and
            false for `in_place` and `retract`, as on the route.
        flush_cache: drops the caches, or not, in every mode; where it is given,
            `clear_cache` does not count. None: as `clear_cache` says.
        lease_s: seconds after which decoding goes on unless the same call is made
            again; 0 for never, None for `--inflight-pause-lease-s`.
        owner: whose pause it is; another owner can then neither change nor end it.

    Returns:
        That of `POST /pause_generation`.

    Raises:
        Malformed: there is no such mode, or an argument has the wrong type.
        PauseConflict: the pause that is in force forbids this mode.
        OwnedByAnother: the pause is another owner's.

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


async def is_paused(self: Any) -> bool:
    """Whether decoding stands still, in whatever mode.

    Returns:
        True or False.

    """
    return bool((await control_of(self).paused())["is_paused"])


async def continue_generation(self: Any, owner: str | None = None) -> Reply:
    """Go on after a pause; going on twice is going on once.

    Args:
        self: the engine.
        owner: whose pause it is; None ends everybody's.

    Returns:
        That of `POST /continue_generation`.

    Raises:
        OwnedByAnother: the pause is another owner's.

    """
    return await control_of(self).resume(owner)


async def resume_generation(self: Any) -> None:
    """Upstream's name for `continue_generation`."""
    await control_of(self).resume()
