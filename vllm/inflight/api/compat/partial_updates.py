"""Partial updates: versions that arrive over several calls without start and finish.

SGLang's calls bring some tensors at a time and write them at once. Here the first call
opens an update, every call loads into the shadow weights, and the call that completes
the model commits. The live weights change once.

A client may mark where a version begins and ends (`/begin_weight_update`,
`/end_weight_update`). Then the end commits.

These end an incomplete update: another label, a new group, a new pause, its deadline,
or `continue_generation`, which reports what is missing.

A trainer may send tensors that fill no parameter, such as a head that is tied to the
embedding. If such a tensor comes after its version was complete, it is compared with
the live weights, and no update is opened.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from vllm.inflight import calls, upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.errors import (
    InflightError,
    UpdateBusy,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.update import Phase

PREFIX = "pieces-"
UNUSED = "no parameter of this model is filled by these tensors"


@dataclass
class PartialUpdate:
    """The partial update of one front end of an engine.

    Attributes:
        update_id: the id of the update under way, or of the last one; None before both.
        names: the tensors that it has brought.
        label: the label of the version, if the client gave one.
        epochs: the epoch of the version on each engine; None until it is committed.
        has_begun: whether the client has marked the beginning, and not yet the end.
        commit: `mode` and `flush_cache` of the commit, from the last call.

    """

    update_id: str | None = None
    names: frozenset[str] = frozenset()
    label: str | None = None
    epochs: tuple[int, ...] | None = None
    has_begun: bool = False
    commit: dict[str, Any] = field(default_factory=dict)

    def forget(self, *, has_begun: bool = False) -> None:
        """Become empty."""
        vars(self).update(vars(PartialUpdate(has_begun=has_begun)))

    def may_end_with(self, label: str | None) -> bool:
        """Whether tensors with this label may belong to the committed version."""
        return self.epochs is not None and self.label == label


_memories: WeakKeyDictionary[Any, PartialUpdate] = WeakKeyDictionary()


def memory_of(engine: upstream.EngineClient) -> PartialUpdate:
    """The partial update of one `AsyncLLM`; a process may have several."""
    return _memories.setdefault(engine, PartialUpdate())


async def take(
    control: Control,
    transport: str,
    update_info: object,
    *,
    label: str | None,
    commit: dict[str, Any],
    memory: PartialUpdate | None = None,
    begin: dict[str, Any] | None = None,
    names: Collection[str] = (),
    is_broadcast: bool = False,
    is_whole: bool = False,
) -> Reply:
    """Stage the tensors of one call; commit if they complete the model.

    Args:
        control: of the engines.
        transport: the transport of the tensors.
        update_info: where the tensors are; the transport defines its fields.
        label: the label of their version, if the client gives one.
        commit: `mode` and `flush_cache` of the commit.
        memory: the calls before; see `memory_of`.
        begin: more fields of the start of the update.
        names: the names of the tensors.
        is_broadcast: whether a trainer broadcasts the tensors to a group. Otherwise a
            tensor that has come before begins a new version.
        is_whole: whether the call brings a whole version, which lacks no tensor.

    Raises:
        UpdateBusy: a version with a label is under way, and these tensors have none.
        WrongPhase: another caller has ended the version that the client has begun.
        WeightsMismatch: a tensor of a complete version differs from the live weights.

    """
    memory = PartialUpdate() if memory is None else memory
    came = frozenset(names)
    active = await _open(control, transport, label, memory)
    if active and not is_broadcast and came & _names_of(active, memory):
        await _give_up(control, active, memory)
        active = None
    if active is None and came and not memory.has_begun:
        unused = await _unused(control, came, memory)
        is_last = memory.may_end_with(label) and await _is_served(control, memory)
        if unused and (is_last or not unused["tied"]):
            return await _compare(control, transport, update_info, memory)
    if active is None:
        await _require_open(control, memory)
        active = await _start(control, transport, label, begin)
    if memory.update_id != active:
        memory.forget(has_begun=memory.has_begun)
    memory.update_id, memory.names = active, memory.names | came
    memory.label, memory.commit = memory.label or label, commit
    progress = await control.update(update_info, active)
    replies = progress.get("engines", [progress])
    if any(reply["phase"] != Phase.STAGING for reply in replies):
        # Another caller is finishing it. Finishing twice is allowed.
        return await _finish(control, active, memory)
    every, parts = progress["parameters"], [reply["parameters"] for reply in replies]
    is_complete = all(part["complete"] >= part["total"] for part in parts)
    if (is_complete or is_whole) and not memory.has_begun:
        return await _finish(control, active, memory)
    when = "at POST /end_weight_update" if memory.has_begun else "when all are"
    return {
        "message": f"staged: {every['complete']} of {every['total']} parameters are "
        f"complete, and the version is committed {when}",
        "update_id": active,
        "parameters": every,
    }


async def begin(control: Control, memory: PartialUpdate) -> None:
    """Begin a version; abort an incomplete one before it."""
    if (update_id := await unfinished(control)) is not None:
        await control.abort(update_id)
    memory.forget(has_begun=True)


async def end(control: Control, memory: PartialUpdate) -> Reply | None:
    """End a version; the reply of its commit, or None if no update is open.

    Raises:
        WeightsMismatch: the version lacks tensors, which are named; it is aborted.
        InflightError: the update has failed.

    """
    update_id = memory.update_id if memory.has_begun else None
    memory.has_begun = False
    if update_id is None and (update_id := await unfinished(control)) is None:
        return None
    return await _finish(control, update_id, memory)


async def drop(control: Control, memory: PartialUpdate) -> None:
    """Abort a version whose other tensors will not come."""
    update_id = await unfinished(control)
    if update_id is not None:
        await control.abort(update_id)
    if update_id is not None or memory.update_id is not None:
        memory.forget()


async def close(control: Control, memory: PartialUpdate) -> InflightError | None:
    """Finish an open version; the error if it is incomplete."""
    update_id = await unfinished(control)
    if update_id is None:
        return None
    if memory.has_begun:
        await _give_up(control, update_id, memory)
        memory.forget()
        return WrongPhase(
            "the version that POST /begin_weight_update began has not ended. It is "
            "aborted; call POST /end_weight_update before this call",
            update_id=update_id,
        )
    try:
        await _finish(control, update_id, memory)
    except InflightError as error:
        return error
    return None


async def unfinished(control: Control) -> str | None:
    """The id of the open partial update, if there is one."""
    active = (await control.status())["active"]
    if active is None or not active["update_id"].startswith(PREFIX):
        return None
    return str(active["update_id"])


def _names_of(update_id: str, memory: PartialUpdate) -> frozenset[str]:
    """The tensors of this update that came through this front end."""
    return memory.names if memory.update_id == update_id else frozenset()


async def _open(
    control: Control, transport: str, label: str | None, memory: PartialUpdate
) -> str | None:
    active = (await control.status())["active"]
    if active is None or not active["update_id"].startswith(PREFIX):
        return None
    if not active["update_id"].startswith(f"{PREFIX}{transport}-"):
        raise UpdateBusy(
            "the tensors of the open version came in another way (as bytes, as GPU "
            "memory, or from a group). Send all tensors of a version in one way, or "
            "abort the open version with POST /begin_weight_update",
            update_id=active["update_id"],
        )
    known = active["weight_version"]
    if label is None and known is not None:
        raise UpdateBusy(
            f"a partial update of version {known!r} is under way, and this call has no "
            "label. Send the weight_version of these tensors, or abort the other "
            "version with POST /begin_weight_update",
            update_id=active["update_id"],
        )
    if known not in (None, label):
        await _give_up(control, active["update_id"], memory)
        return None
    return str(active["update_id"])


async def _give_up(control: Control, update_id: str, memory: PartialUpdate) -> None:
    """Abort a version because its client begins another one."""
    await control.abort(update_id)
    memory.forget(has_begun=memory.has_begun)


async def _require_open(control: Control, memory: PartialUpdate) -> None:
    """Raise if a version that the client has begun, and not ended, has ended.

    Its first tensors are gone; the rest would be another version.
    """
    if not memory.has_begun or memory.update_id is None:
        return
    ended = await control.status(memory.update_id)
    memory.forget()
    if (error := ended.get("error")) is not None:
        raise InflightError.from_dict(error)
    raise WrongPhase(
        f"the version that POST /begin_weight_update began is {ended['phase']}, so "
        "these tensors cannot belong to it; begin the version again",
        phase=ended["phase"],
        update_id=ended["update_id"],
    )


async def _start(
    control: Control, transport: str, label: str | None, begin: dict[str, Any] | None
) -> str:
    start = calls.StartUpdate(
        update_id=f"{PREFIX}{transport}-{uuid.uuid4().hex}",
        transport=transport,
        weight_version=label,
        **(begin or {}),
    )
    started = await control.start(start)
    return str(started["update_id"])


async def _finish(control: Control, update_id: str, memory: PartialUpdate) -> Reply:
    """Commit a version with the options of its last call, or abort it."""
    if memory.update_id != update_id:  # its tensors came through another front end
        memory.forget()
        memory.update_id = update_id
    label, commit = memory.label, memory.commit
    try:
        reply = await control.finish_or_abort(update_id, label, **commit)
    except BaseException:
        if memory.update_id == update_id:
            memory.forget()
        raise
    if memory.update_id == update_id:
        engines = reply.get("engines", [reply])
        memory.epochs = tuple(each["epoch"] for each in engines)
    return reply | {"message": "weights updated"}


async def _unused(
    control: Control, came: frozenset[str], memory: PartialUpdate
) -> dict[str, Any] | None:
    """Which tensors are tied to a parameter, if none of them fills one.

    None if one fills a parameter, or has come before and so begins a version.
    """
    if came & memory.names:
        return None
    tied: set[str] = set()
    for reply in await control.ask(calls.FindUnused(sorted(came))):
        if set(reply["unused"]) != came:
            return None
        tied.update(reply["tied"])
    return {"tied": tied}


async def _is_served(control: Control, memory: PartialUpdate) -> bool:
    """Whether the last version of `memory` is live on every engine."""
    served = await control.ask(calls.ReadVersion())
    return tuple(each["epoch"] for each in served) == memory.epochs


async def _compare(
    control: Control, transport: str, update_info: object, memory: PartialUpdate
) -> Reply:
    """Receive tensors that fill no parameter, and compare those that are tied to one.

    Raises:
        WeightsMismatch: a tensor differs from the live weights. Its version is rolled
            back if there is a rollback target.

    """
    try:
        await control.compare(transport, update_info)
    except WeightsMismatch as error:
        info = await control.info()
        version, before = info["weight_version"], info["previous"] or {}
        try:
            # Not what somebody else commits meanwhile.
            reply = await control.rollback(before.get("weight_version"))
        except InflightError as refused:
            error.message += f"; version {version!r} stays served: {refused.message}"
        else:
            error.message += (
                f"; version {version!r}, which was complete without it, is taken back, "
                f"and {reply['weight_version']!r} is served again"
            )
        memory.forget()
        raise
    return {"message": UNUSED}
