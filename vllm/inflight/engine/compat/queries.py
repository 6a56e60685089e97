"""Control calls for routes of other frameworks: reads, caches, requests, KV memory.

They are calls of the controller, like those in controller.py. None of them changes the
live weights.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm.inflight import calls, upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.errors import EngineFault, Malformed, PauseConflict
from vllm.inflight.update import PauseMode
from vllm.inflight.worker.catalogue import CHECKPOINT

logger = upstream.init_logger(__name__)

MAX_ROWS = 1 << 16


def flush(controller: EngineContext) -> dict[str, Any]:
    """Drop every cache, and report its size; rejected while requests hold KV."""
    counts = _counts(controller)
    if counts["num_running"]:
        state = "are frozen" if counts["paused"] else "are running"
        raise PauseConflict(
            f"{counts['num_running']} requests {state} and hold KV that cannot be "
            "dropped; pause with mode 'retract' (or 'abort') first"
        )
    return counts | controller.pauses.flush()


def requests(controller: EngineContext) -> dict[str, Any]:
    """How many requests run and wait, and how many tokens the KV cache holds."""
    scheduler = controller.core.scheduler
    cache = controller.core.vllm_config.cache_config
    most = (cache.num_gpu_blocks or 0) * cache.block_size
    used = round(scheduler.kv_cache_manager.usage * most)
    return _counts(controller) | {"kv_tokens": used, "max_kv_tokens": most}


def _counts(controller: EngineContext) -> dict[str, Any]:
    """How many requests run and wait, and whether decoding is paused."""
    running, waiting = controller.core.scheduler.get_request_counts()
    return {
        "num_running": running,
        "num_waiting": waiting,
        "paused": controller.pauses.is_paused,
    }


def release(controller: EngineContext, call: calls.ReleaseMemory) -> Any:
    """Release memory; see `Sleep.release`."""
    return controller.sleep.release(
        set(call.tags),
        None if call.mode is None else PauseMode(call.mode),
        is_trial=bool(call.is_trial),
        release_id=call.release_id,
    )


def undo_release(controller: EngineContext, call: calls.UndoRelease) -> dict[str, Any]:
    """Wake up memory that was released, because another engine failed to release."""
    controller.sleep.undo_release(call.release_id)
    return {}


def checksums(controller: EngineContext, call: calls.ReadChecksums) -> dict[str, Any]:
    """Digests of every parameter of every rank, read from the live weights."""
    ranks = _read(controller, "checksums", call.skip or [], bool(call.is_target))
    return {"ranks": ranks, "epoch": controller.version.epoch}


def rows(controller: EngineContext, call: calls.ReadRows) -> dict[str, Any]:
    """The first rows of one tensor, joined from all ranks."""
    name, count = call.tensor, call.num_rows
    if not isinstance(name, str) or not name:
        raise Malformed("name must be the name of a tensor")
    if type(count) is not int or not 0 < count <= MAX_ROWS:
        raise Malformed(f"truncate_size must be from 1 to {MAX_ROWS}, got {count!r}")
    parts = [
        part for part in _read(controller, "rows", name, count) if part is not None
    ]
    if not parts:
        raise Malformed(f"this model has no parameter {name!r}")
    for part in parts:
        if "refused" in part:
            raise Malformed(part["refused"])
    # The first and the last pipeline stage both have a tied embedding.
    stages = {part["stage"] for part in parts}
    found = [joined([p for p in parts if p["stage"] == s], count) for s in stages]
    if any(whole != found[0] for whole in found):
        raise EngineFault("two pipeline stages have different values of one parameter")
    return {"rows": found[0]}


def names(controller: EngineContext) -> dict[str, Any]:
    """The tensors that a trainer may send, packed by each rank (worker/catalogue.py).

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.

    """
    controller.ranks.require_staging()
    catalogues = _read(controller, "names")
    # All ranks started from one checkpoint, and each reports all of its tensors.
    is_whole = catalogues[0]["of"] == CHECKPOINT
    return {"catalogues": catalogues[:1] if is_whole else catalogues}


def joined(parts: list[dict[str, Any]], count: int) -> list[Any]:
    """Join the parts of a stage's ranks; raises `EngineFault` if copies differ."""
    if parts[0]["dim"] is None:
        if any(part["rows"] != parts[0]["rows"] for part in parts):
            raise EngineFault("two ranks have different values of one parameter")
        return list(parts[0]["rows"][:count])
    own = [part["rows"] for part in parts if not part["is_copy"]]
    if parts[0]["dim"] == 0:
        return [row for part in own for row in part][:count]
    return [list(chain(*pieces)) for pieces in zip(*own, strict=True)][:count]


def unused(controller: EngineContext, call: calls.FindUnused) -> dict[str, Any]:
    """The tensors in `call.names` that fill no parameter of any rank.

    Returns:
        `unused` tensors, and the `tied` ones among them, which equal a parameter.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.

    """
    controller.ranks.require_staging()
    replies = _read(controller, "unused", call.names or [])
    return {
        what: sorted(set.intersection(*(set(reply[what]) for reply in replies)))
        for what in ("unused", "tied")
    }


def source(controller: EngineContext) -> dict[str, Any]:
    """The path that the live weights were loaded from, and their version."""
    update = controller.live_version.update
    return {
        "path": None if update is None else update.source,
        "weight_version": controller.version.label,
        "epoch": controller.version.epoch,
    }


def journal(controller: EngineContext, call: calls.ReadJournal) -> dict[str, Any]:
    """The state of the journal; `call.tried` notes that a restore was tried."""
    kept = controller.live_version.journal
    kept.tried = kept.tried or bool(call.tried)
    told: dict[str, Any] = kept.told()
    return told


def _read(controller: EngineContext, what: str, *args: object) -> list[Any]:
    replies = controller.core.model_executor.collective_rpc(
        "inflight_read", args=(what, *args)
    )
    for rank, reply in enumerate(replies):
        if "error" in reply:
            raise EngineFault(f"rank {rank} cannot be read: {reply['error']}")
    return [reply["ok"] for reply in replies]
