"""A delivery: one version brought to every engine, or to none.

All engines stage it before the first commits it. What fails before that is
aborted everywhere; if one engine cannot commit, those that did go back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

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
from vllm.inflight.trainer.engine_clients import Engine, blamed, retold
from vllm.inflight.trainer.http_client import NotReached, Reply
from vllm.inflight.trainer.retry import FIRST_DELAY_S, RetryBudget
from vllm.inflight.trainer.snapshot import Snapshot
from vllm.inflight.update import Manifest, Phase, difference

Progress = Callable[[str, int, int], None]
"""`progress(phase, done_bytes, total_bytes)`, as it goes on."""

POLL_S = 0.1
GRACE_S = 1.0
"""How long the other engines may still answer once one has failed."""

SLACK_S = 0.5
"""How much longer than its patience a call may take that does not end by itself."""

RETREAT_S = 10.0
"""Longest time for taking an update back; less for engines that did not answer."""

GIVE_UP_S = 3.0
"""The same, if nobody wants the update any more."""

T = TypeVar("T")


class Coordinator:
    """One update of several engines, under one id."""

    def __init__(
        self,
        engines: Sequence[Engine],
        patience: RetryBudget,
        progress: Progress | None = None,
    ) -> None:
        self.update_id = uuid.uuid4().hex
        self._engines = engines
        self._patience = patience
        self._progress = progress
        self.is_begun = False
        """Whether all engines have begun the update."""
        self._untouched: set[str] = set()
        """Engines that were never asked to begin it: there was no connection."""
        self._silent: set[str] = set()
        """Engines that did not answer for as long as they were asked."""

    def stage(
        self,
        parcel: Snapshot,
        manifest: Manifest,
        *,
        version: str | None,
        deadline_s: float | None,
        base_version: str | None = None,
    ) -> None:
        """Have every engine load the parcel; on failure none keeps it.

        Raises:
            UpdateBusy: an engine is in another update.
            InflightError: what an engine refused; the message names the engine.

        """
        opening: Reply = {"update_id": self.update_id, "manifest": manifest.to_dict()}
        opening |= {"weight_version": version} if version is not None else {}
        opening |= {"deadline_s": deadline_s} if deadline_s is not None else {}
        opening |= {"base_version": base_version} if base_version is not None else {}
        chunk: Reply = {"update_id": self.update_id, "chunk": 0}
        chunk["update_info"] = parcel.update_info
        if len(self._engines) > 1:
            # First: those that have switched already would lose their way back, and
            # need it if one of the others, which this one would refuse, cannot switch.
            self._all(self._require_free)
        with _Rollback(self):
            self._all(lambda engine: engine.start(opening, self._patience))
            self.is_begun = True
            self._all(
                lambda engine: engine.update(chunk, self._patience),
                meanwhile=lambda: self._report(parcel.num_bytes),
            )
            if self._progress is not None:
                self._progress("transfer", parcel.num_bytes, parcel.num_bytes)

    def commit(self, *, mode: str | None) -> list[Reply]:
        """Switch every engine; returns their replies, in order.

        Of several engines, all have staged the version and the same one before any
        of them switches.

        Raises:
            WeightsMismatch: the engines staged different weights; none has switched.
            InflightError: what an engine refused; the message names the engine.

        """
        body: Reply = {"update_id": self.update_id}
        body |= {} if mode is None else {"mode": mode}
        with _Rollback(self):
            if len(self._engines) > 1:
                self._prepare()
            return self._all(
                lambda engine: engine.finish(body, self._patience), is_commit=True
            )

    def _prepare(self) -> None:
        replies = self._all(lambda e: e.prepare(self.update_id, self._patience))
        names = (engine.name for engine in self._engines)
        if (why := difference(dict(zip(names, replies, strict=True)))) is not None:
            self._patience.end()
            raise WeightsMismatch(why, update_id=self.update_id)

    def retreat(self) -> list[str]:
        """Leave every engine as it was; what could not be undone, in sentences."""
        self._patience.end()
        whole_s = self._patience.timeout_s
        is_given_up = self._patience.given_up is not None
        patience = RetryBudget(min(GIVE_UP_S if is_given_up else RETREAT_S, whole_s))
        # The one try that is left for them must not cost the whole patience again.
        short = patience.at_most(whole_s / 4)

        def of(engine: Engine) -> RetryBudget:
            return short if engine.name in self._silent else patience

        def step_back(engine: Engine) -> str | None:
            try:
                self._step_back(engine, of(engine))
            except EngineUnreachable as error:
                if engine.name in self._silent:
                    return _silent(engine)
                return f"{engine.name} could not be taken back: {error}"
            except Exception as error:
                return f"{engine.name} could not be taken back: {error}"
            return None

        begun = [e for e in self._engines if e.name not in self._untouched]
        # First those that have switched: no update begins that would end their way
        # back as long as the others are busy.
        has_switched = dict.fromkeys((engine.name for engine in begun), False)
        if len(self._engines) > 1:
            told = _each(
                begun,
                lambda engine: self._has_switched(engine, of(engine)),
                patience,
                late=lambda _: False,
            )
            has_switched.update(zip(has_switched, told, strict=True))
        left: list[str | None] = []
        for first in (True, False):
            some = [engine for engine in begun if has_switched[engine.name] is first]
            left += _each(some, step_back, patience, late=_silent)
        return [sentence for sentence in left if sentence]

    def _step_back(self, engine: Engine, patience: RetryBudget) -> None:
        try:
            engine.abort(self.update_id, patience)
        except (UnknownUpdate, Unauthorized, Forbidden):
            return  # whom an engine does not let in, it has begun nothing for
        except WrongPhase:
            report = engine.status(self.update_id, patience)
            epoch = (report.get("result") or {}).get("epoch")
            if report["phase"] != Phase.COMMITTED:
                return
            # Not if somebody else has published since, nor if it is done already.
            while (served := engine.info(patience))["epoch"] == epoch:
                before = (served["previous"] or {}).get("weight_version")
                try:
                    engine.rollback(before, patience)
                except VersionConflict:
                    return  # somebody has, after it was looked at
                except EngineUnreachable:
                    if not patience.pause(FIRST_DELAY_S):
                        raise

    def _require_free(self, engine: Engine) -> Reply:
        """Raise `UpdateBusy` while an update is under way there."""
        reply = engine.status(None, self._patience)
        for each in reply.get("engines", [reply]):
            if (active := each["active"]) is not None:
                update_id, phase = active["update_id"], active["phase"]
                raise UpdateBusy(
                    f"update {update_id!r} is {phase}", update_id=update_id, phase=phase
                )
        return reply

    def _has_switched(self, engine: Engine, patience: RetryBudget) -> bool:
        """Whether it serves the update, as far as it tells."""
        with suppress(InflightError):
            report = engine.status(self.update_id, patience.at_most(GRACE_S))
            return bool(report["phase"] == Phase.COMMITTED)
        return False

    def _all(
        self,
        call: Callable[[Engine], Reply],
        meanwhile: Callable[[], None] | None = None,
        *,
        is_commit: bool = False,
    ) -> list[Reply]:
        """`call` on every engine at once; raises the first failure.

        Returns within the patience also if a call does not, and at once when the
        update is given up. A commit that is under way then may still succeed.
        """
        return asked(
            self._engines,
            call,
            self._patience,
            meanwhile=meanwhile,
            noted=self._note,
            is_commit=is_commit,
        )

    def _note(self, futures: Sequence[Future[Reply]]) -> None:
        """Note which engines did not answer."""
        for engine, future in zip(self._engines, futures, strict=True):
            error = future.exception() if future.done() else None
            if isinstance(error, EngineUnreachable) or not future.done():
                self._silent.add(engine.name)
            if isinstance(error, NotReached) and not self.is_begun:
                self._untouched.add(engine.name)

    def _report(self, total_bytes: int) -> None:
        """Tell how far the slowest rank of the slowest engine is."""
        if self._progress is None:
            return
        patience = self._patience.at_most(GRACE_S)
        try:
            reports = [e.status(self.update_id, patience) for e in self._engines]
        except InflightError:
            return  # one does not say how far it is
        done = min(total_bytes, *map(received_bytes, reports))
        self._progress("transfer", done, total_bytes)


def asked(
    engines: Sequence[Engine],
    call: Callable[[Engine], Reply],
    patience: RetryBudget,
    *,
    meanwhile: Callable[[], None] | None = None,
    noted: Callable[[Sequence[Future[Reply]]], None] | None = None,
    is_commit: bool = False,
) -> list[Reply]:
    """`call` on every engine at once; raises the first failure.

    Returns within the patience also if a call does not, and at once when the patience
    is given up. A commit that is under way then may still succeed.

    Args:
        engines: that are asked.
        call: what each is asked.
        patience: how long.
        meanwhile: called while they are waited for.
        noted: told of the calls when no more is waited for them.
        is_commit: whether `call` commits.

    Raises:
        EngineUnreachable: an engine does not answer in time.
        Cancelled: the patience was given up.
        InflightError: what an engine refused; the message names the engine.

    """
    patience.require()
    futures = [_begin(call, engine) for engine in engines]
    while not _settled(futures, POLL_S):
        if patience.given_up is not None:
            if is_commit:
                wait(futures, GRACE_S)
            break
        if patience.overdue_s() > SLACK_S:
            break
        if meanwhile is not None:
            meanwhile()
    if noted is not None:
        noted(futures)
    for engine, future in zip(engines, futures, strict=True):
        if future.done() and (error := future.exception()) is not None:
            patience.end()
            # Who answers late must not begin after it was aborted.
            wait(futures, GRACE_S)
            patience.require()
            raise blamed(error, engine)
    for engine, future in zip(engines, futures, strict=True):
        if not future.done():
            patience.require()
            raise blamed(
                EngineUnreachable(
                    f"no answer within {round(patience.timeout_s, 1):g} s"
                ),
                engine,
            )
    return [future.result() for future in futures]


class _Rollback:
    """Around what must happen on all engines or on none."""

    def __init__(self, delivery: Coordinator) -> None:
        self._delivery = delivery

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        left = self._delivery.retreat()
        if left and isinstance(error, InflightError):
            retold(error, "; ".join([error.message, *left]))
        elif left:
            error.add_note("; ".join(left))


def _begin(call: Callable[[Engine], T], engine: Engine) -> Future[T]:
    return in_background(partial(call, engine), "inflight-call")


def _each(
    engines: Sequence[Engine],
    call: Callable[[Engine], T],
    patience: RetryBudget,
    *,
    late: Callable[[Engine], T],
) -> list[T]:
    """What `call`, which raises nothing, says of each; `late` says it if that is."""
    futures = [_begin(call, engine) for engine in engines]
    wait(futures, patience.left() + SLACK_S)
    return [
        future.result() if future.done() else late(engine)
        for engine, future in zip(engines, futures, strict=True)
    ]


def _silent(engine: Engine) -> str | None:
    return (
        f"{engine.name} did not answer when the update was to be taken back; "
        "GET /weight_info tells what it serves"
    )


def received_bytes(report: Reply) -> int:
    """Bytes that the slowest rank has received, by a report of `/weight_update`."""
    ranks = [
        rank
        for engine in report.get("engines", [report])
        for rank in engine.get("ranks", [])
    ]
    return min((rank.get("bytes", 0) for rank in ranks), default=0)


def _settled(futures: Sequence[Future[Reply]], timeout_s: float | None) -> bool:
    done, others = wait(futures, timeout_s, FIRST_EXCEPTION)
    return not others or any(future.exception() for future in done)
