"""Updates that come in pieces, with neither a beginning nor an end of their own.

SGLang's calls bring some tensors at a time and write them at once. Here the first piece
opens an update, every piece goes into the second set, and the one that completes the
model commits it: what is served changes once, and never in parts.

What ends an update that stays incomplete: another label, a new group, a new pause, its
deadline, or `continue_generation`, which says what is missing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from safetensors import safe_open

from vllm.inflight.api.control import Control
from vllm.inflight.api.door import Reply
from vllm.inflight.errors import InflightError, UpdateBusy
from vllm.inflight.update import Phase
from vllm.inflight.wire.local import SHARED_MEMORY

PREFIX = "pieces-"

_came: dict[str, frozenset[str]] = {}
"""By the id of the last version that came by way of this API server, the tensors of its
pieces: an engine tells only at the end that one came twice."""


async def take(
    control: Control,
    transport: str,
    update_info: Any,
    *,
    label: str | None,
    commit: dict[str, Any],
    begin: dict[str, Any] | None = None,
    files: Sequence[str] = (),
) -> Reply:
    """Stage a piece; commit if the model is complete with it.

    Args:
        control: of the engines.
        transport: what brings it.
        update_info: the piece, as that transport is told of it.
        label: the version it belongs to, if its sender says.
        commit: `mode` and `flush_cache` of the commit.
        begin: what else is said when the update begins.
        files: those in shared memory that the piece is, unless it is broadcast. A
            tensor that came before then begins a new version: its sender begins anew.

    Raises:
        UpdateBusy: a version with a label is under way, and the piece has none.

    """
    names = await asyncio.to_thread(_names, files) if files else frozenset()
    active = await _open(control, transport, label)
    if active and names & _came.get(active, frozenset()):
        await control.abort(active)
        active = None
    update_id = active or await _start(control, transport, label, begin)
    before = _came.get(update_id, frozenset())
    _came.clear()
    _came[update_id] = before | names
    progress = await control.update(update_info, update_id)
    replies = progress.get("engines", [progress])
    if any(reply["phase"] != Phase.STAGING for reply in replies):
        # Somebody else finishes it meanwhile; to finish twice is to finish.
        reply = await control.finish_or_abort(update_id, label, **commit)
        return reply | {"message": "weights updated"}
    parts = [reply["parameters"] for reply in replies]
    if all(part["begun"] == 0 for part in parts):
        await control.abort(update_id)
        return {"message": "no parameter of this model is filled by these tensors"}
    if any(part["complete"] < part["total"] for part in parts):
        every = progress["parameters"]
        done, total = every["complete"], every["total"]
        return {
            "message": f"staged: {done} of {total} parameters are complete, and the "
            "version is served when all are",
            "update_id": update_id,
            "parameters": every,
        }
    reply = await control.finish_or_abort(update_id, label, **commit)
    return reply | {"message": "weights updated"}


async def drop(control: Control) -> None:
    """Give up a version whose pieces will not come any more."""
    if (update_id := await unfinished(control)) is not None:
        await control.abort(update_id)


async def close(control: Control) -> InflightError | None:
    """End a version that should be complete by now; what is missing, if it is not."""
    update_id = await unfinished(control)
    if update_id is None:
        return None
    try:
        await control.finish_or_abort(update_id)
    except InflightError as error:
        return error
    return None


async def unfinished(control: Control) -> str | None:
    """The id of the update that waits for pieces, if one does."""
    active = (await control.status())["active"]
    if active is None or not active["update_id"].startswith(PREFIX):
        return None
    return str(active["update_id"])


def _names(files: Sequence[str]) -> frozenset[str]:
    """What the tensors of these files in shared memory are called."""
    names: set[str] = set()
    for file in files:
        with safe_open(SHARED_MEMORY / file, framework="pt") as opened:
            names.update(opened.keys())
    return frozenset(names)


async def _open(control: Control, transport: str, label: str | None) -> str | None:
    active = (await control.status())["active"]
    if active is None or not active["update_id"].startswith(f"{PREFIX}{transport}-"):
        return None
    known = active["weight_version"]
    if label is None and known is not None:
        raise UpdateBusy(
            f"version {known!r} is under way in pieces, and this piece has no label: "
            "give it its weight_version, or end the other one with POST "
            "/begin_weight_update",
            update_id=active["update_id"],
        )
    if known not in (None, label):
        await control.abort(active["update_id"])
        return None
    return str(active["update_id"])


async def _start(
    control: Control, transport: str, label: str | None, begin: dict[str, Any] | None
) -> str:
    started = await control.start(
        update_id=f"{PREFIX}{transport}-{uuid.uuid4().hex}",
        transport=transport,
        weight_version=label,
        **(begin or {}),
    )
    return str(started["update_id"])
