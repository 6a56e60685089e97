"""What the doors of other frameworks ask of an engine core, beside its updates.

The controller calls these functions; none changes what is served.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm.inflight import calls, upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.errors import EngineFault, Malformed, PauseConflict
from vllm.inflight.worker.catalogue import CHECKPOINT

logger = upstream.init_logger(__name__)

MAX_ROWS = 1 << 16

KV_CACHE = "kv_cache"
"""Upstream's name of this part of the memory."""

NOT_AT_REST = "requires a completed pause"
"""How upstream refuses a release of the KV cache under an engine that goes on."""


def flush(controller: EngineContext) -> dict[str, Any]:
    """Drop every cache, and tell what was in it; refused while requests hold KV."""
    counts = requests(controller)
    if counts["num_running"]:
        state = "are frozen" if counts["paused"] else "are running"
        raise PauseConflict(
            f"{counts['num_running']} requests {state} and hold KV that cannot be "
            "dropped under them; pause with mode 'retract' (or 'abort') first"
        )
    return counts | controller.pauses.flush()


def requests(controller: EngineContext) -> dict[str, Any]:
    """How many requests run and wait, and whether they stand still."""
    running, waiting = controller.core.scheduler.get_request_counts()
    return {
        "num_running": running,
        "num_waiting": waiting,
        "paused": controller.pauses.is_paused,
    }


def rest(controller: EngineContext) -> dict[str, Any]:
    """Whether decoding stands still, and whether waking up would end that.

    It ends a sleep of level 0, and a pause of upstream's own that nobody here knows of.
    """
    pauses, sleep = controller.pauses, controller.sleep
    is_held = pauses.asked or pauses.commit is not None or sleep.weights == "gone"
    return {
        "is_paused": pauses.is_paused,
        "ends_on_waking": sleep.is_paused_by_sleep
        or (pauses.is_paused and not is_held),
    }


def release_kv_cache(controller: EngineContext) -> dict[str, Any]:
    """Give the KV cache's memory back, under a pause that is complete.

    Raises:
        PauseConflict: there is none.
        EngineFault: the memory could not be given back.

    """
    core = controller.core
    is_asleep = KV_CACHE in core.model_executor.sleeping_tags
    if not is_asleep:
        try:
            core.release_kv_cache_memory()
        except Exception as error:
            if NOT_AT_REST in str(error):
                raise PauseConflict(
                    "the KV cache was not released: somebody has continued meanwhile, "
                    "or a request came and was given up"
                ) from error
            logger.exception("the KV cache could not be released")
            raise EngineFault(
                f"the KV cache could not be released: {type(error).__name__}: {error}"
            ) from error
    return {"released": not is_asleep}


def checksums(controller: EngineContext, call: calls.ReadChecksums) -> dict[str, Any]:
    """Digests of every parameter of every rank, read from what decoding uses."""
    ranks = _read(controller, "checksums", call.skip or [], bool(call.is_target))
    return {"ranks": ranks, "epoch": controller.version.epoch}


def rows(controller: EngineContext, call: calls.ReadRows) -> dict[str, Any]:
    """The first rows of one tensor, put together from all ranks."""
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
    # An embedding that the head is tied to is in the first stage and in the last.
    stages = {part["stage"] for part in parts}
    found = [joined([p for p in parts if p["stage"] == s], count) for s in stages]
    if any(whole != found[0] for whole in found):
        raise EngineFault("the stages serve different values of one parameter")
    return {"rows": found[0]}


def names(controller: EngineContext) -> dict[str, Any]:
    """What a trainer may send, packed by each rank; see worker/catalogue.py.

    Raises:
        StagingUnavailable: weights of this engine cannot be updated in flight.

    """
    controller.ranks.require_staging()
    catalogues = _read(controller, "names")
    # All ranks of an engine started from one checkpoint, and tell all of it.
    is_whole = catalogues[0]["of"] == CHECKPOINT
    return {"catalogues": catalogues[:1] if is_whole else catalogues}


def joined(parts: list[dict[str, Any]], count: int) -> list[Any]:
    """The parts of a stage's ranks as one; raises `EngineFault` if copies differ."""
    if parts[0]["dim"] is None:
        if any(part["rows"] != parts[0]["rows"] for part in parts):
            raise EngineFault("the ranks serve different values of one parameter")
        return list(parts[0]["rows"][:count])
    own = [part["rows"] for part in parts if not part["is_copy"]]
    if parts[0]["dim"] == 0:
        return [row for part in own for row in part][:count]
    return [list(chain(*pieces)) for pieces in zip(*own, strict=True)][:count]


def unused(controller: EngineContext, call: calls.FindUnused) -> dict[str, Any]:
    """Of the tensors in `call.names`, those that fill no parameter of any rank.

    Returns:
        `unused`, and those of them that are `tied` to a parameter.

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
    """The path that what is served was read from, and its version."""
    update = controller.live_version.update
    return {
        "path": None if update is None else update.source,
        "weight_version": controller.version.label,
        "epoch": controller.version.epoch,
    }


def journal(controller: EngineContext, call: calls.ReadJournal) -> dict[str, Any]:
    """What the journal tells; with `tried`, what was found there has been tried."""
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
