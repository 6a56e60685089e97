"""The ledger of an engine's updates: one active at a time, the last ones kept.

Every move of an update goes through `Ledger.move` and so through the table in
update.py. The ledger is plain data behind one lock: the engine core's main
thread and the thread that watches the ranks both use it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.inflight.calls import StartUpdate, WasStarted
from vllm.inflight.engine.transaction import Update, files_of
from vllm.inflight.errors import (
    Conflict,
    InflightError,
    Malformed,
    OwnedByAnother,
    UnknownUpdate,
    UpdateBusy,
    WrongPhase,
)
from vllm.inflight.packed import at_once
from vllm.inflight.update import (
    MOVES,
    Manifest,
    Phase,
    check_label,
    fingerprint,
)

NUM_OUTCOMES_KEPT = 64


class Ledger:
    """All updates of one engine."""

    def __init__(self, moved: Callable[[Update], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._moved = moved
        """Called when an update has moved, on whatever thread that happens."""
        self._updates: OrderedDict[str, Update] = OrderedDict()
        self._serial = 0
        self.ended: Counter[str] = Counter()
        """Updates by outcome: `committed`, `aborted`, or the code of an error."""

    @property
    def active(self) -> Update | None:
        """The update that holds the shadow weights, if any."""
        with self._lock:
            return self._active()

    def next_serial(self) -> int:
        """A number no command to the ranks has carried before."""
        with self._lock:
            self._serial += 1
            return self._serial

    def started(self, call: StartUpdate) -> Update | None:
        """The update that was begun with `call`, if there is one.

        The same id with the same fields is the same update, however it stands.

        Raises:
            Conflict: its id is that of another update.

        """
        if (update_id := call.update_id) is None:
            return None
        if not isinstance(update_id, str) or not 0 < len(update_id) <= 128:
            raise Malformed("update_id must be a string of 1 to 128 characters")
        with self._lock:
            known = self._updates.get(update_id)
        if known is not None and known.fingerprint != _fingerprint(call):
            raise Conflict(
                f"update {update_id!r} was begun with another body; "
                "use a new update_id",
                phase=known.phase.value,
                update_id=update_id,
            )
        return known

    def was_started(self, call: WasStarted) -> bool:
        """Whether `started` would find an update for a call with that fingerprint."""
        if not isinstance(call.update_id, str):
            return False
        with self._lock:
            known = self._updates.get(call.update_id)
        return known is not None and known.fingerprint == call.fingerprint

    def start(self, call: StartUpdate, deadline_s: float) -> tuple[Update, bool]:
        """Open an update; (update, whether it is new: see `started`).

        Args:
            call: its `manifest` as `Manifest.packed` makes it, or as it came.
            deadline_s: seconds from now to its commit.

        """
        if (known := self.started(call)) is not None:
            return known, False
        update_id = call.update_id or uuid.uuid4().hex
        label = check_label(call.weight_version)
        manifest = call.manifest
        packed = None if manifest is None else at_once(Manifest.packed(manifest))
        head = Manifest() if packed is None else Manifest.head(packed)
        with self._lock:
            if (active := self._active()) is not None:
                raise _busy(active)
            self._serial += 1
            update = Update(
                update_id,
                self._serial,
                _fingerprint(call),
                label,
                head.step,
                time.monotonic() + deadline_s,
            )
            if not head.subset:
                update.source = call.source
            update.files = files_of(call, packed)
            update.owner = call.owner
            self._updates[update_id] = update
            while len(self._updates) > NUM_OUTCOMES_KEPT:
                self._updates.popitem(last=False)
            return update, True

    def require_free(self, update_id: object) -> None:
        """Raise `UpdateBusy` while another update than this one is under way."""
        if (active := self.active) is not None and active.update_id != update_id:
            raise _busy(active)

    def find(self, update_id: str | None, owner: str | None = None) -> Update:
        """The update with that id; with no id, the one that is open.

        With no id it is the last one if that has failed and nobody was told: a trainer
        without ids, whose update failed between two of its calls, would not hear why.

        Raises:
            UnknownUpdate: no update of that id is remembered.
            WrongPhase: none is open.
            OwnedByAnother: both it and who asks have an owner, and not the same.

        """
        if update_id is not None and not isinstance(update_id, str):
            raise Malformed(f"update_id must be a string, got {update_id!r:.80}")
        with self._lock:
            if update_id is None:
                last = next(reversed(self._updates.values()), None)
                found = self._active() or last
                if found is None or not (found.is_active or _is_news(found)):
                    raise _nothing_open(last)
            elif (found := self._updates.get(update_id)) is None:
                raise UnknownUpdate(
                    f"no update {update_id!r} is known here", update_id=update_id
                )
        if None not in (owner, found.owner) and owner != found.owner:
            raise OwnedByAnother(
                f"update {found.update_id!r} belongs to {found.owner!r}",
                update_id=found.update_id,
            )
        return found

    def require(
        self, update_id: str | None, *phases: Phase, owner: str | None = None
    ) -> Update:
        """`find`, in one of `phases`; raises `WrongPhase`, or its own failure."""
        update = self.find(update_id, owner)
        self._require(update, phases)
        return update

    def _require(self, update: Update, phases: Sequence[Phase]) -> None:
        if update.phase not in phases:
            if update.error is not None:
                update.is_told = True
                raise update.error
            raise WrongPhase(
                f"update {update.update_id!r} is {update.phase.value}; this call "
                f"needs it {' or '.join(p.value for p in phases)}",
                phase=update.phase.value,
                update_id=update.update_id,
            )

    @contextmanager
    def held(self, update: Update) -> Iterator[None]:
        """While it is switched to: no deadline ends it in the middle of that."""
        with self._lock:
            self._require(update, (Phase.STAGED,))
            update.is_held = True
        try:
            yield
        finally:
            update.is_held = False

    def move(
        self,
        update: Update,
        phase: Phase,
        error: InflightError | None = None,
        first: Callable[[], None] = lambda: None,
    ) -> bool:
        """Make one move of the table; False if it is not legal from here.

        Args:
            update: that moves.
            phase: that it moves to.
            error: why it ends, if it failed.
            first: done before anybody can see that it has moved.

        """
        with self._lock:
            if phase not in MOVES[update.phase]:
                return False
            if phase is Phase.ABORTED and update.is_held:
                return False
            first()
            update.phase = phase
            now = update.moved = time.monotonic()
            if phase is Phase.STAGED:
                update.staged = now
            # One that is served again after two rollbacks had its end before.
            if phase in (Phase.COMMITTED, Phase.ABORTED) and update.ended is None:
                update.ended = now
                update.files = None  # they may have many names
                self.ended[phase.value if error is None else error.code] += 1
            if error is not None:
                error.update_id, error.phase = update.update_id, phase.value
                update.error = error
        self._moved(update)
        return True

    def turn_back(self, left: Update | None, back: Update | None) -> None:
        """A rollback from what `left` brought to what `back` did; None: the start."""
        for update, phase in ((left, Phase.ROLLED_BACK), (back, Phase.COMMITTED)):
            if update is not None:
                self.move(update, phase)

    def outcomes(self) -> list[dict[str, Any]]:
        """All that is remembered, the newest first."""
        with self._lock:
            return [update.to_dict() for update in reversed(self._updates.values())]

    def _active(self) -> Update | None:
        return next((u for u in self._updates.values() if u.is_active), None)


def _is_news(update: Update) -> bool:
    """Whether it has failed and nobody has been told why."""
    return update.error is not None and not update.is_told


def _nothing_open(last: Update | None) -> WrongPhase:
    """What is told who names no update: the failure of the last one is not his."""
    if last is None:
        return WrongPhase("no weight update was started")
    ended = last.phase.value if last.error is None else last.error.code
    return WrongPhase(
        f"no update is open; the last, {last.update_id!r}, ended as {ended} "
        "(GET /weight_update/{update_id} tells more)",
        phase=last.phase.value,
        update_id=last.update_id,
    )


def _fingerprint(call: StartUpdate) -> str:
    return call.fingerprint or fingerprint(call.said())


def _busy(active: Update) -> UpdateBusy:
    return UpdateBusy(
        f"update {active.update_id!r} is {active.phase.value}; it must finish or be "
        "aborted before another begins",
        phase=active.phase.value,
        update_id=active.update_id,
    )
