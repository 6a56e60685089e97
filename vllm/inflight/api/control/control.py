"""The control calls of an engine, or of all engines of a data-parallel group.

HTTP, `AsyncLLM` and `LLM` share this code. A call goes to every engine behind the core
client. An update is prepared on all engines before it is committed on any. If one
engine cannot commit, the engines that did are taken back.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from vllm.inflight import calls
from vllm.inflight.api.control.core_client import CoreClient, Reply
from vllm.inflight.api.request import rate_limit
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    Malformed,
    VersionConflict,
    WeightsMismatch,
)
from vllm.inflight.packed import Work, pack
from vllm.inflight.update import (
    ACTIVE,
    Manifest,
    Phase,
    difference,
    fingerprinted,
)

Call = TypeVar("Call", bound=Callable[..., Coroutine[Any, Any, Any]])

_going_on: set[asyncio.Task[Any]] = set()
"""Calls whose caller is gone. An event loop holds tasks by weak references only."""


def shielded(call: Call) -> Call:
    """Let this method of a `Control` finish when its caller is cancelled."""

    @wraps(call)
    async def to_its_end(self: Any, *args: object, **kwargs: object) -> Any:
        asking = call(self, *args, **kwargs)
        if self.num_engines == 1:  # one engine needs no undo, and may block
            return await asking
        task = asyncio.create_task(asking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _going_on.add(task)
            task.add_done_callback(_ended)
            raise

    return cast(Call, to_its_end)


def _ended(task: asyncio.Task[Any]) -> None:
    _going_on.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio logs no warning


ADDED = (
    *("num_running", "num_waiting", "num_aborted", "num_retracted"),
    *("bytes", "parameters", "dropped"),
    *("num_tensors", "num_parameters", "num_unknown", "num_different"),
)
"""Fields with counts. A reply of several engines has the sum of their counts.

Numbers that are equal on all engines, such as the epoch, are not in this list.
"""


def is_partial(envelopes: list[Reply]) -> bool:
    """Whether the call failed on some engines and not on others."""
    return len({"error" in envelope for envelope in envelopes}) > 1


def merged(envelopes: list[Reply]) -> Reply:
    """The reply of one engine; for several, the first reply with all under `engines`.

    Counts are added up. Raises the error of the first engine that has one.
    """
    errors = {
        index: InflightError.from_dict(envelope["error"])
        for index, envelope in enumerate(envelopes)
        if "error" in envelope
    }
    for index, error in errors.items():
        if len(envelopes) > 1:
            error.message = f"engine {index} of {len(envelopes)}: {error.message}"
            _add_refused(error, [e for n, e in errors.items() if n != index])
        raise error
    replies: list[Reply] = [envelope["ok"] for envelope in envelopes]
    if len(replies) == 1:
        return replies[0]
    sums = {
        name: _added([reply[name] for reply in replies])
        for name in ADDED
        if all(name in reply for reply in replies)
    }
    return replies[0] | sums | {"engines": replies}


def _add_refused(error: InflightError, others: list[InflightError]) -> None:
    """Add the tensors that only other engines have rejected to `error`."""
    if not isinstance(error, WeightsMismatch):
        return
    for other in others:
        more = [name for name in other.tensors if name not in error.tensors]
        if isinstance(other, WeightsMismatch) and more:
            error.tensors += more
            error.num_tensors = max(
                error.num_tensors, other.num_tensors, len(error.tensors)
            )
            error.message += f"; another engine: {other.message}"


def _added(found: list[Any]) -> Any:
    """The sum of counts, or of each count in an object; the first of other values.

    None if one value is None.
    """
    first = found[0]
    if None in found:
        return None
    if isinstance(first, dict):
        return {n: _added([each[n] for each in found if n in each]) for n in first}
    is_count = isinstance(first, int) and not isinstance(first, bool)
    return sum(found) if is_count else first


def _with_id(start: calls.StartUpdate) -> calls.StartUpdate:
    """`start` with an id; a new one if it has none."""
    if start.update_id is not None:
        return start
    return replace(start, update_id=uuid.uuid4().hex)


T = TypeVar("T")


class Control:
    """The control calls to the engines behind one core client."""

    def __init__(self, client: CoreClient) -> None:
        self._client = client

    @property
    def num_engines(self) -> int:
        """How many engines answer a call."""
        return self._client.num_engines

    async def start(self, start: calls.StartUpdate) -> Reply:
        """Open an update on every engine, or on none."""
        return await self._open(await self._ready(start))

    async def _ready(self, start: calls.StartUpdate) -> calls.StartUpdate:
        """`start` as the engines take it, with an id; a new one spends the allowance.

        A manifest is checked and packed here, in slices. After this only the staging
        threads of the ranks read it.
        """
        if start.manifest is not None:
            manifest = await self._done(Manifest.packed(start.manifest))
            start = replace(start, manifest=manifest)
        fingerprint = await self._done(fingerprinted(start.said()))
        start = replace(start, fingerprint=fingerprint)
        if not await self._was_started(start.update_id, fingerprint):
            rate_limit.spend()
        # One id for all engines, so that each can be asked about it.
        return _with_id(start)

    async def _open(self, start: calls.StartUpdate) -> Reply:
        if self.num_engines > 1:
            # First: a start overwrites the rollback target, which another commit that
            # is still under way may need.
            await self.ask(calls.MayStart(start.update_id))
        return await self._start(start)

    async def _was_started(self, update_id: str | None, fingerprint: str) -> bool:
        """Whether a start is a repetition, which costs no allowance.

        Every engine has to know the update.
        """
        if not rate_limit.is_limited() or update_id is None:
            return False
        # Not the whole start: it is sent again if the update is new.
        replies = await self.ask(calls.WasStarted(update_id, fingerprint))
        return all(reply["was_started"] for reply in replies)

    @shielded
    async def _start(self, start: calls.StartUpdate) -> Reply:
        reply = await self._all_or_none(start)
        phases = {each["phase"] for each in reply.get("engines", ())}
        if phases & ACTIVE and phases - ACTIVE:
            # Some engines have started an update that has ended on others.
            await self._client.call(calls.AbortUpdate(start.update_id))
            reply = await self._all_or_none(start)
        return reply

    async def update(
        self,
        update_info: object,
        update_id: str | None = None,
        chunk: int | None = None,
        owner: str | None = None,
    ) -> Reply:
        """Receive a chunk; return when every rank has loaded it.

        A caller that numbers its chunks may repeat a call.
        """
        received = await self._chunk(update_info, update_id, chunk, owner)
        return await self._all_or_none(received)

    async def _chunk(
        self,
        update_info: object,
        update_id: str | None,
        chunk: int | None,
        owner: str | None,
    ) -> calls.ReceiveChunk:
        """The call to receive a chunk; `update_info` is packed in slices."""
        if not isinstance(update_info, dict | list):
            raise Malformed("update_info must be an object, or a list of them")
        info = await self._done(pack(update_info))
        return calls.ReceiveChunk(info, update_id, chunk, owner)

    @shielded
    async def prepare(
        self, update_id: str | None = None, owner: str | None = None
    ) -> Reply:
        """Prepare the commit on every engine, and check that all staged the same.

        Raises:
            WeightsMismatch: the engines staged different weights; all abort.

        """
        return await self._prepare(update_id, owner)

    async def _prepare(self, update_id: str | None, owner: str | None) -> Reply:
        prepared = await self._all_or_none(calls.PrepareUpdate(update_id, owner))
        staged = {f"engine {i}": r for i, r in enumerate(prepared.get("engines", ()))}
        if (why := difference(staged)) is not None:
            facts = {"update_id": prepared["update_id"], "phase": Phase.ABORTED.value}
            error = WeightsMismatch(why, **facts)
            abort = calls.AbortUpdate(error.update_id, error=error.to_dict())
            await self._client.call(abort)
            raise error
        return prepared

    @shielded
    async def finish(
        self,
        weight_version: str | None = None,
        *,
        mode: str | None = None,
        flush_cache: bool = False,
        expect_version: str | None = None,
        expect_digest: str | None = None,
        update_id: str | None = None,
        owner: str | None = None,
    ) -> Reply:
        """Prepare on every engine, then commit between two steps.

        Raises:
            WeightsMismatch: the engines staged different weights; none commits.

        """
        prepared = await self._prepare(update_id, owner)
        return await self._commit(
            calls.CommitUpdate(
                prepared["update_id"],
                weight_version,
                mode,
                flush_cache,
                expect_version=expect_version,
                expect_digest=expect_digest,
            )
        )

    async def _commit(self, commit: calls.CommitUpdate) -> Reply:
        update_id = commit.update_id
        envelopes = await self._client.call(commit)
        if is_partial(envelopes):
            undo = calls.UndoSwitch(update_id)
            try:
                await self._take_back(envelopes, undo, "the new version")
            finally:  # nothing stays staged
                await self._client.call(calls.AbortUpdate(update_id))
        return merged(envelopes)

    async def finish_or_abort(
        self, update_id: str, weight_version: str | None = None, **options: Any
    ) -> Reply:
        """Finish the update, or abort it if that fails."""
        try:
            return await self.finish(weight_version, update_id=update_id, **options)
        except BaseException:
            await self._client.call(calls.AbortUpdate(update_id))
            raise

    @asynccontextmanager
    async def in_one_call(self, start: calls.StartUpdate) -> AsyncIterator[Reply]:
        """An update that is aborted when this block ends with an error.

        Its caller could not know that the update is still under way.
        """
        start = await self._ready(start)
        async with self._or_aborted(start):
            yield await self._open(start)

    @asynccontextmanager
    async def _or_aborted(self, start: calls.StartUpdate) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            # The fingerprint spares another caller's update of the same id, which may
            # be why the start was rejected.
            abort = calls.AbortUpdate(start.update_id, fingerprint=start.fingerprint)
            await self._client.call(abort)
            raise

    async def update_in_one_call(
        self,
        chunks: Sequence[object],
        *,
        start: calls.StartUpdate | None = None,
        finish: dict[str, Any] | None = None,
        update_id: str | None = None,
        chunk: int | None = None,
        owner: str | None = None,
    ) -> Reply:
        """Open an update, receive chunks and commit, or a part of that.

        Args:
            chunks: the `update_info` of each chunk.
            start: opens the update, which is aborted if this call fails; None: the
                update is open.
            finish: options of `finish`, to commit the update; None: it stays open.
            update_id: the id of the update; None for that of `start`, or for the update
                under way.
            chunk: the number of the first chunk, which several chunks need; 0 by
                default with `start`.
            owner: the owner of the update; None for that of `start`.

        Returns:
            The reply of `finish` if there is a `finish`, else that of `update`.

        """
        if start is not None:
            start = _with_id(start)
            update_id, owner = start.update_id, start.owner
        first: Any = 0 if chunk is None and start is not None else chunk
        received = [
            # The engine checks the number that a caller gives.
            await self._chunk(info, update_id, first + n if n else first, owner)
            for n, info in enumerate(chunks)
        ]
        prepare = None if finish is None else calls.PrepareUpdate(update_id, owner)
        if start is None:
            return await self._advance(None, received, prepare, finish or {})
        start = await self._ready(start)
        async with self._or_aborted(start):
            return await self._advance(start, received, prepare, finish or {})

    async def _advance(
        self,
        start: calls.StartUpdate | None,
        received: list[calls.ReceiveChunk],
        prepare: calls.PrepareUpdate | None,
        finish: dict[str, Any],
    ) -> Reply:
        """Make the calls of one update, and commit it if it is to be prepared.

        A single engine gets all of them at once, up to the commit, and waits for no
        reply in between. Several engines must all have accepted a call before the next:
        a trainer would wait for ever if only some of them received its tensors.
        """
        if self.num_engines > 1:
            reply: Reply = {}
            if start is not None:
                await self._open(start)
            for each in received:
                reply = await self._all_or_none(each)
            if prepare is None:
                return reply
            return await self.finish(
                **finish, update_id=prepare.update_id, owner=prepare.owner
            )
        made = [each for each in (start, *received, prepare) if each is not None]
        reply = await self._call(
            calls.AdvanceUpdate([[e.name, calls.call_to_dict(e)] for e in made])
        )
        if prepare is None:
            return reply
        return await self._commit(calls.CommitUpdate(reply["update_id"], **finish))

    async def abort(
        self, update_id: str | None = None, owner: str | None = None
    ) -> Reply:
        """Abort an update; the live weights do not change."""
        return await self._call(calls.AbortUpdate(update_id, owner))

    @shielded
    async def rollback(
        self, to_version: str | None = None, *, mode: str | None = None
    ) -> Reply:
        """Flip back to the rollback target, on every engine or on none."""
        if self.num_engines > 1:
            held = await self.ask(calls.ReadRollbackTarget())
            if any(each != held[0] for each in held):
                labels = ", ".join(repr(each["weight_version"]) for each in held)
                raise VersionConflict(
                    f"the engines would go back to different weights ({labels}, in "
                    "their order), so none does; publish the version that is wanted"
                )
        rollback_id = uuid.uuid4().hex
        envelopes = await self._client.call(
            calls.RollBack(to_version, mode, rollback_id)
        )
        if is_partial(envelopes):
            undo = calls.UndoSwitch(rollback_id=rollback_id)
            await self._take_back(envelopes, undo, "the version before")
        return merged(envelopes)

    async def status(self, update_id: str | None = None) -> Reply:
        """State of one update, or of all known updates."""
        return await self._call(calls.ReadUpdates(update_id))

    async def info(self) -> Reply:
        """The live version."""
        return await self._call(calls.ReadVersion())

    async def verify(self) -> Reply:
        """Whether the live weights of every engine match the digest of their label."""
        replies = await self.ask(calls.VerifyWeights())
        found = {reply["result"] for reply in replies}
        # The worst result of all engines counts.
        result = next(r for r in ("different", "unknown", "equal") if r in found)
        reply = merged([{"ok": reply} for reply in replies]) | {"result": result}
        names = sorted({name for each in replies for name in each["different"]})
        return reply | {"different": names}

    async def paused(self) -> Reply:
        """Whether decoding is paused, and in which mode."""
        return await self._call(calls.ReadPause())

    async def rename(
        self, weight_version: str, expect_version: str | None = None
    ) -> Reply:
        """Give the live weights another label; this is a version without bytes."""
        return await self._call(calls.RenameVersion(weight_version, expect_version))

    async def init_transport(self, init_info: object) -> Reply:
        """Connect the configured transport to its trainer."""
        return await self._call(calls.InitTransport(init_info))

    async def shutdown_transport(self) -> Reply:
        """Close the connection to the trainer."""
        return await self._call(calls.ShutdownTransport())

    async def join_group(self, init_info: dict[str, Any]) -> Reply:
        """Let every worker join a group that a trainer opens with torch alone."""
        return await self._call(calls.JoinGroup(init_info))

    async def leave_group(self, name: str) -> Reply:
        """Let every worker leave the group `name`."""
        return await self._call(calls.LeaveGroup(name))

    async def compare(self, transport: str, update_info: object) -> Reply:
        """Let every worker receive tensors that fill no parameter.

        Raises:
            WeightsMismatch: a tensor differs from the live one that it is tied to.
            UpdateBusy: an update is under way.

        """
        return await self._call(calls.CompareTensors(transport, update_info))

    @asynccontextmanager
    async def announced(self, group_name: str) -> AsyncIterator[str]:
        """The scope of one announced broadcast; yields an id of the announcement.

        If the announcement is rejected, workers that have not received the broadcast
        leave the group. They would take it for the next broadcast.
        """
        announcement, began = uuid.uuid4().hex, time.monotonic()
        try:
            yield announcement
        except InflightError as error:
            # An age, not a time: an engine may be on a host with another clock.
            age_s = time.monotonic() - began
            missed = calls.MissBroadcast(group_name, announcement, age_s)
            await self._client.call(missed)
            error.message += (
                "; unless all that it announced was received, the workers have left "
                f"group {group_name!r}"
            )
            raise

    async def ask(self, call: calls.Call) -> list[Reply]:
        """The reply of every engine; raises the first error, if any has one."""
        envelopes = await self._client.call(call)
        merged(envelopes)
        return [envelope["ok"] for envelope in envelopes]

    @shielded
    async def pause(
        self,
        mode: str = "abort",
        *,
        flush_cache: bool = False,
        lease_s: float | None = None,
        owner: str | None = None,
    ) -> Reply:
        """Stop decoding between two steps, or renew the lease on that."""
        pause = calls.PauseDecoding(mode, flush_cache, lease_s, owner)
        if self.num_engines == 1:
            return await self._call(pause)
        # First as a trial: engines that step together pause together, so one engine
        # that rejects the pause would block the others.
        before = await self.ask(replace(pause, is_trial=True))
        envelopes = await self._client.call(pause)
        is_new = not any(reply["paused"] for reply in before)
        if is_new and any("error" in envelope for envelope in envelopes):
            await self._client.call(calls.ResumeDecoding(owner))
        return merged(envelopes)

    async def flush(self) -> Reply:
        """Drop the caches; rejected while requests hold KV."""
        return await self._call(calls.FlushCaches())

    async def resume(self, owner: str | None = None) -> Reply:
        """End a pause."""
        return await self._call(calls.ResumeDecoding(owner))

    async def _done(self, work: Work[T]) -> T:
        """The result of some work; other work runs between its slices."""
        while True:
            try:
                next(work)
            except StopIteration as stop:
                value: T = stop.value
                return value
            await self._client.rest()

    async def _call(self, call: calls.Call) -> Reply:
        return merged(await self._client.call(call))

    async def _all_or_none(self, call: calls.Call) -> Reply:
        envelopes = await self._client.call(call)
        if is_partial(envelopes):
            # The caller may have named no id.
            update_id = next(e["ok"]["update_id"] for e in envelopes if "ok" in e)
            await self._client.call(calls.AbortUpdate(update_id))
        return merged(envelopes)

    async def _take_back(
        self, envelopes: list[Reply], undo: calls.UndoSwitch, what: str
    ) -> None:
        """Undo a commit or a rollback that not every engine could make.

        Raises:
            EngineFault: engines could not undo it.

        """
        undone = await self._client.call(undo)
        # Engines that did not flip answer that there is nothing to undo.
        stuck = [
            i for i, e in enumerate(envelopes) if "ok" in e and "error" in undone[i]
        ]
        if stuck:
            reasons = "; ".join(undone[i]["error"]["message"] for i in stuck)
            raise EngineFault(
                f"engines {stuck} of {len(envelopes)} serve {what} and could not be "
                f"taken back ({reasons}), the others could not switch to it"
            )
