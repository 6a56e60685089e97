"""The coordinator: a two-phase commit over several engines, from the trainer.

Every engine serves the new version, or none does. All engines stage and prepare it
before the first one commits. A failure before that aborts the update everywhere. If one
engine cannot commit, the engines that have committed are rolled back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from vllm.inflight.background import in_background
from vllm.inflight.errors import (
    EngineUnreachable,
    Forbidden,
    InflightError,
    Unauthorized,
    UnknownUpdate,
    UpdateBusy,
    VersionConflict,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.trainer.bodies import bodies
from vllm.inflight.trainer.engine_clients import Engine, blamed, with_message
from vllm.inflight.trainer.http_client import NotReached, Reply
from vllm.inflight.trainer.retry import FIRST_DELAY_S, RetryBudget
from vllm.inflight.trainer.snapshot import Snapshot
from vllm.inflight.update import Manifest, Phase, difference

Progress = Callable[[str, int, int], None]
"""`progress(phase, done_bytes, total_bytes)`, called again and again during a phase."""

POLL_S = 0.1
GRACE_S = 1.0
"""How long the other engines may still answer after one has failed, in seconds."""

SLACK_S = 0.5
"""How much longer than its retry budget a call may take that does not end by itself."""

UNDO_S = 10.0
"""Longest time to undo an update; shorter for engines that did not answer."""

GIVE_UP_S = 3.0
"""Longest time to undo an update that was given up."""

T = TypeVar("T")


class Coordinator:
    """One update of several engines, under one id.

    Args:
        engines: the engines to update.
        retry_budget: the time for all calls of this update.
        progress: called with the progress of the transfer.

    """

    def __init__(
        self,
        engines: Sequence[Engine],
        retry_budget: RetryBudget,
        progress: Progress | None = None,
    ) -> None:
        self.update_id = uuid.uuid4().hex
        self._engines = engines
        self._retry_budget = retry_budget
        self._progress = progress
        self.is_begun = False
        """Whether all engines have started the update."""
        self._not_started: set[str] = set()
        """Engines that the start did not reach, for lack of a connection."""
        self._unanswered: set[str] = set()
        """Engines that did not answer within the retry budget."""

    def stage(
        self,
        snapshot: Snapshot,
        manifest: Manifest,
        *,
        version: str | None,
        deadline_s: float | None,
        base_version: str | None = None,
        bases: Mapping[str, str] | None = None,
        in_bodies: bool = False,
    ) -> None:
        """Let every engine load the snapshot; on failure, undo it on all engines.

        Args:
            snapshot: the file with the tensors.
            manifest: describes the tensors.
            version: the label of the new version.
            deadline_s: the engines abort the update after this time.
            base_version: the version that the engines must serve now.
            bases: engine name → the digest that a delta starts from there, if that is
                not the base of the manifest everywhere.
            in_bodies: whether the tensors travel in the bodies of requests, and not in
                the file.

        Raises:
            UpdateBusy: an engine is in another update.
            InflightError: an engine rejected the update; the message names the engine.

        """
        opening: Reply = {"update_id": self.update_id}
        opening |= {"weight_version": version} if version is not None else {}
        opening |= {"deadline_s": deadline_s} if deadline_s is not None else {}
        opening |= {"base_version": base_version} if base_version is not None else {}

        def start(engine: Engine) -> Reply:
            base = (bases or {}).get(engine.name, manifest.base)
            announced = replace(manifest, base=base).to_dict()
            return engine.start(opening | {"manifest": announced}, self._retry_budget)

        if len(self._engines) > 1:
            # Checked on all engines first: a start on one engine throws its rollback
            # target away. It may still need it, if its update with others is not over.
            self._all(self._require_free)
        with _Rollback(self):
            self._all(start)
            self.is_begun = True
            for send in self._sends(snapshot, in_bodies):
                self._all(send, meanwhile=lambda: self._report(snapshot.num_bytes))
            if self._progress is not None:
                self._progress("transfer", snapshot.num_bytes, snapshot.num_bytes)

    def _sends(
        self, snapshot: Snapshot, in_bodies: bool
    ) -> Iterator[Callable[[Engine], Reply]]:
        """The calls that bring the tensors, each to be made on every engine."""
        if in_bodies:
            for body in bodies(snapshot, self.update_id):
                yield partial(self._send_body, body)
            return
        chunk: Reply = {"update_id": self.update_id, "chunk": 0}
        chunk["update_info"] = snapshot.update_info
        yield lambda engine: engine.update(chunk, self._retry_budget)

    def _send_body(self, body: bytes, engine: Engine) -> Reply:
        return engine.update_by_body(body, self._retry_budget)

    def commit(self, *, mode: str | None) -> list[Reply]:
        """Commit on every engine; returns their replies, in order.

        With several engines, all must have prepared the same weights before the first
        one commits.

        Args:
            mode: the pause mode of the commit; None for the engines' default.

        Raises:
            WeightsMismatch: the engines staged different weights; none has committed.
            InflightError: an engine rejected a call; the message names the engine.

        """
        body: Reply = {"update_id": self.update_id}
        body |= {} if mode is None else {"mode": mode}
        with _Rollback(self):
            if len(self._engines) > 1:
                self._prepare()
            return self._all(
                lambda engine: engine.finish(body, self._retry_budget), is_commit=True
            )

    def _prepare(self) -> None:
        replies = self._all(lambda e: e.prepare(self.update_id, self._retry_budget))
        names = (engine.name for engine in self._engines)
        if (why := difference(dict(zip(names, replies, strict=True)))) is not None:
            self._retry_budget.end()
            raise WeightsMismatch(why, update_id=self.update_id)

    def undo(self) -> list[str]:
        """Undo the update on every engine; returns a sentence for each failure."""
        self._retry_budget.end()
        whole_s = self._retry_budget.timeout_s
        is_given_up = self._retry_budget.given_up is not None
        retry_budget = RetryBudget(min(GIVE_UP_S if is_given_up else UNDO_S, whole_s))
        # One more try of these engines must not cost the whole retry budget again.
        short = retry_budget.at_most(whole_s / 4)

        def of(engine: Engine) -> RetryBudget:
            return short if engine.name in self._unanswered else retry_budget

        def undo_one(engine: Engine) -> str | None:
            try:
                self._undo_on(engine, of(engine))
            except EngineUnreachable as error:
                if engine.name in self._unanswered:
                    return _unanswered(engine)
                return f"{engine.name} could not be taken back: {error}"
            except Exception as error:
                return f"{engine.name} could not be taken back: {error}"
            return None

        begun = [e for e in self._engines if e.name not in self._not_started]
        # Engines that have committed come first. While the others are still in this
        # update, no new update can start and throw a rollback target away.
        has_committed = dict.fromkeys((engine.name for engine in begun), False)
        if len(self._engines) > 1:
            results = _each(
                begun,
                lambda engine: self._has_committed(engine, of(engine)),
                retry_budget,
                late=lambda _: False,
            )
            has_committed.update(zip(has_committed, results, strict=True))
        left: list[str | None] = []
        for first in (True, False):
            some = [engine for engine in begun if has_committed[engine.name] is first]
            left += _each(some, undo_one, retry_budget, late=_unanswered)
        return [sentence for sentence in left if sentence]

    def _undo_on(self, engine: Engine, retry_budget: RetryBudget) -> None:
        try:
            engine.abort(self.update_id, retry_budget)
        except (UnknownUpdate, Unauthorized, Forbidden):
            return  # the engine has not started the update
        except WrongPhase:
            report = engine.status(self.update_id, retry_budget)
            epoch = (report.get("result") or {}).get("epoch")
            if report["phase"] != Phase.COMMITTED:
                return
            # Only while this update is live: it may be rolled back already, or another
            # version may have been published since.
            while (served := engine.info(retry_budget))["epoch"] == epoch:
                before = (served["previous"] or {}).get("weight_version")
                try:
                    engine.rollback(before, retry_budget)
                except VersionConflict:
                    return  # the live version changed after `info`
                except EngineUnreachable:
                    if not retry_budget.pause(FIRST_DELAY_S):
                        raise

    def _require_free(self, engine: Engine) -> Reply:
        """Raise `UpdateBusy` if an update is under way on the engine."""
        reply = engine.status(None, self._retry_budget)
        for each in reply.get("engines", [reply]):
            if (active := each["active"]) is not None:
                update_id, phase = active["update_id"], active["phase"]
                raise UpdateBusy(
                    f"update {update_id!r} is {phase}", update_id=update_id, phase=phase
                )
        return reply

    def _has_committed(self, engine: Engine, retry_budget: RetryBudget) -> bool:
        """Whether the engine reports the update as committed."""
        with suppress(InflightError):
            report = engine.status(self.update_id, retry_budget.at_most(GRACE_S))
            return bool(report["phase"] == Phase.COMMITTED)
        return False

    def _all(
        self,
        call: Callable[[Engine], Reply],
        meanwhile: Callable[[], None] | None = None,
        *,
        is_commit: bool = False,
    ) -> list[Reply]:
        """`call_all` on all engines, with the retry budget of this update."""
        return call_all(
            self._engines,
            call,
            self._retry_budget,
            meanwhile=meanwhile,
            noted=self._note,
            is_commit=is_commit,
        )

    def _note(self, futures: Sequence[Future[Reply]]) -> None:
        """Record which engines did not answer."""
        for engine, future in zip(self._engines, futures, strict=True):
            error = future.exception() if future.done() else None
            if isinstance(error, EngineUnreachable) or not future.done():
                self._unanswered.add(engine.name)
            if isinstance(error, NotReached) and not self.is_begun:
                self._not_started.add(engine.name)

    def _report(self, total_bytes: int) -> None:
        """Report the progress of the slowest rank of the slowest engine."""
        if self._progress is None:
            return
        retry_budget = self._retry_budget.at_most(GRACE_S)
        try:
            reports = [e.status(self.update_id, retry_budget) for e in self._engines]
        except InflightError:
            return  # an engine does not answer; the next report may succeed
        done = min(total_bytes, *map(received_bytes, reports))
        self._progress("transfer", done, total_bytes)


def call_all(
    engines: Sequence[Engine],
    call: Callable[[Engine], Reply],
    retry_budget: RetryBudget,
    *,
    meanwhile: Callable[[], None] | None = None,
    noted: Callable[[Sequence[Future[Reply]]], None] | None = None,
    is_commit: bool = False,
) -> list[Reply]:
    """Run `call` on all engines in parallel; raises the first failure.

    This returns within the retry budget even if a call does not end. When the budget is
    given up, it returns at once. A commit under way may then still succeed.

    Args:
        engines: the engines to call.
        call: the call on one engine.
        retry_budget: the time for all calls.
        meanwhile: called again and again while the calls run.
        noted: called with the futures of the calls when the wait has ended.
        is_commit: whether `call` commits.

    Raises:
        EngineUnreachable: an engine does not answer in time.
        Cancelled: the retry budget was given up.
        InflightError: an engine rejected the call; the message names the engine.

    """
    retry_budget.require()
    futures = [_begin(call, engine) for engine in engines]
    while not _settled(futures, POLL_S):
        if retry_budget.given_up is not None:
            if is_commit:
                wait(futures, GRACE_S)
            break
        if retry_budget.overdue_s() > SLACK_S:
            break
        if meanwhile is not None:
            meanwhile()
    if noted is not None:
        noted(futures)
    for engine, future in zip(engines, futures, strict=True):
        if future.done() and (error := future.exception()) is not None:
            retry_budget.end()
            # Late calls are awaited, or an engine could start the update after its
            # abort.
            wait(futures, GRACE_S)
            retry_budget.require()
            raise blamed(error, engine)
    for engine, future in zip(engines, futures, strict=True):
        if not future.done():
            retry_budget.require()
            raise blamed(
                EngineUnreachable(
                    f"no answer within {round(retry_budget.timeout_s, 1):g} s"
                ),
                engine,
            )
    return [future.result() for future in futures]


class _Rollback:
    """A context that undoes the update on all engines if its body fails."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        left = self._coordinator.undo()
        if left and isinstance(error, InflightError):
            with_message(error, "; ".join([error.message, *left]))
        elif left:
            error.add_note("; ".join(left))


def _begin(call: Callable[[Engine], T], engine: Engine) -> Future[T]:
    return in_background(partial(call, engine), "inflight-call")


def _each(
    engines: Sequence[Engine],
    call: Callable[[Engine], T],
    retry_budget: RetryBudget,
    *,
    late: Callable[[Engine], T],
) -> list[T]:
    """The result of `call` for each engine, or of `late` if `call` is too slow.

    `call` must not raise.
    """
    futures = [_begin(call, engine) for engine in engines]
    wait(futures, retry_budget.left() + SLACK_S)
    return [
        future.result() if future.done() else late(engine)
        for engine, future in zip(engines, futures, strict=True)
    ]


def _unanswered(engine: Engine) -> str | None:
    return (
        f"{engine.name} did not answer when the update was to be taken back; "
        "GET /weight_info tells what it serves"
    )


def received_bytes(report: Reply) -> int:
    """The bytes of the slowest rank, from a reply of `/weight_update`."""
    ranks = [
        rank
        for engine in report.get("engines", [report])
        for rank in engine.get("ranks", [])
    ]
    return min((rank.get("bytes", 0) for rank in ranks), default=0)


def _settled(futures: Sequence[Future[Reply]], timeout_s: float | None) -> bool:
    done, others = wait(futures, timeout_s, FIRST_EXCEPTION)
    return not others or any(future.exception() for future in done)
