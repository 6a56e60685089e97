"""A delivery: one version brought to every engine, or to none.

All engines stage it before the first commits it. What fails before that is
aborted everywhere; if one engine cannot commit, those that did go back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

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
from vllm.inflight.trainer.engines import Engine, blamed, retold
from vllm.inflight.trainer.parcel import Parcel
from vllm.inflight.trainer.patience import FIRST_DELAY_S, Patience
from vllm.inflight.trainer.server import Reply
from vllm.inflight.update import Manifest, Phase, difference

Progress = Callable[[str, int, int], None]
"""`progress(phase, done_bytes, total_bytes)`, as it goes on."""

POLL_S = 0.1
GRACE_S = 1.0
"""How long the other engines may still answer once one has failed."""

RETREAT_S = 10.0


class Delivery:
    """One update of several engines, under one id."""

    def __init__(
        self,
        engines: Sequence[Engine],
        patience: Patience,
        progress: Progress | None = None,
    ) -> None:
        self.update_id = uuid.uuid4().hex
        self._engines = engines
        self._patience = patience
        self._progress = progress

    def stage(
        self,
        parcel: Parcel,
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
        with _Retreat(self):
            self._all(lambda engine: engine.start(opening, self._patience))
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
        with _Retreat(self):
            if len(self._engines) > 1:
                self._prepare()
            replies = self._all(lambda engine: engine.finish(body, self._patience))
        return replies

    def _prepare(self) -> None:
        replies = self._all(lambda e: e.prepare(self.update_id, self._patience))
        names = (engine.name for engine in self._engines)
        if (why := difference(dict(zip(names, replies, strict=True)))) is not None:
            self._patience.end()
            raise WeightsMismatch(why, update_id=self.update_id)

    def retreat(self) -> list[str]:
        """Leave every engine as it was; what could not be undone, in sentences."""
        self._patience.end()  # its calls may be under way, and an exit waits for them
        patience = Patience(min(RETREAT_S, self._patience.timeout_s))

        def step_back(engine: Engine) -> str | None:
            try:
                self._step_back(engine, patience)
            except Exception as error:
                return f"{engine.name} could not be taken back: {error}"
            return None

        with ThreadPoolExecutor(len(self._engines)) as pool:
            # First those that have switched: no update begins that would end their way
            # back as long as the others are busy.
            has_switched = list(pool.map(self._has_switched, self._engines))
            left: list[str | None] = []
            for first in (True, False):
                pairs = zip(self._engines, has_switched, strict=True)
                left += pool.map(step_back, [e for e, has in pairs if has is first])
            return [told for told in left if told]

    def _step_back(self, engine: Engine, patience: Patience) -> None:
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

    def _has_switched(self, engine: Engine) -> bool:
        """Whether it serves the update, as far as it tells."""
        if len(self._engines) > 1:
            with suppress(InflightError):
                report = engine.status(self.update_id, Patience(GRACE_S))
                return bool(report["phase"] == Phase.COMMITTED)
        return False

    def _all(
        self,
        call: Callable[[Engine], Reply],
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Reply]:
        """`call` on every engine at once; raises the first failure."""
        pool = ThreadPoolExecutor(len(self._engines))
        try:
            futures = [pool.submit(call, engine) for engine in self._engines]
            while not _settled(futures, POLL_S if meanwhile else None):
                assert meanwhile is not None
                meanwhile()
            for engine, future in zip(self._engines, futures, strict=True):
                if future.done() and (error := future.exception()) is not None:
                    self._patience.end()
                    # Who answers late must not begin after it was aborted.
                    wait(futures, GRACE_S)
                    raise blamed(error, engine)
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False)

    def _report(self, total_bytes: int) -> None:
        """Tell how far the slowest rank of the slowest engine is."""
        if self._progress is None:
            return
        done = total_bytes
        for engine in self._engines:
            with suppress(InflightError):
                report = engine.status(self.update_id, Patience(GRACE_S))
                done = min(done, received_bytes(report))
        self._progress("transfer", done, total_bytes)


class _Retreat:
    """Around what must happen on all engines or on none."""

    def __init__(self, delivery: Delivery) -> None:
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
