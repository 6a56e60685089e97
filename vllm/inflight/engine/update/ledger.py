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
        """Called when an update changes its phase, on the thread that changes it."""
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
        """A new number for commands to the ranks."""
        with self._lock:
            self._serial += 1
            return self._serial

    def started(self, call: StartUpdate) -> Update | None:
        """The update that was started with `call`; None if there is none.

        The same id with the same fields is the same update, in any phase.

        Raises:
            Conflict: another body has started an update of this id.

        """
        if (update_id := call.update_id) is None:
            return None
        if not isinstance(update_id, str) or not 0 < len(update_id) <= 128:
            raise Malformed("update_id must be a string of 1 to 128 characters")
        with self._lock:
            known = self._updates.get(update_id)
        if known is not None and known.fingerprint != _fingerprint(call):
            raise Conflict(
                f"update {update_id!r} was started with another body; "
                "use a new update_id",
                phase=known.phase.value,
                update_id=update_id,
            )
        return known

    def was_started(self, call: WasStarted) -> bool:
        """Whether `started` would find an update for a call with this fingerprint."""
        if not isinstance(call.update_id, str):
            return False
        with self._lock:
            known = self._updates.get(call.update_id)
        return known is not None and known.fingerprint == call.fingerprint

    def start(self, call: StartUpdate, deadline_s: float) -> tuple[Update, bool]:
        """Open an update; returns it, and whether it is new (see `started`).

        Args:
            call: its `manifest` may be packed (`Manifest.packed`) or not.
            deadline_s: the update has to commit within this many seconds.

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
            if not (head.subset or head.base):
                update.source = call.source
            update.files = files_of(call, packed)
            update.owner = call.owner
            self._updates[update_id] = update
            while len(self._updates) > NUM_OUTCOMES_KEPT:
                self._updates.popitem(last=False)
            return update, True

    def require_free(self, update_id: object) -> None:
        """Raise `UpdateBusy` while another update is under way."""
        if (active := self.active) is not None and active.update_id != update_id:
            raise _busy(active)

    def find(self, update_id: str | None, owner: str | None = None) -> Update:
        """The update with that id; without an id, the open update.

        If none is open and the last one failed unreported, a call without an id gets
        the last one. A trainer without ids thus hears why its update failed.

        Raises:
            UnknownUpdate: no update of that id is remembered.
            WrongPhase: no update is open.
            OwnedByAnother: the call names another owner than the update's.

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
        """Find an update in one of `phases`; else raise its error or `WrongPhase`."""
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
        """During a commit, keep the deadline from aborting the update."""
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
        """Change the phase of an update; False if the table does not allow it.

        Args:
            update: the update.
            phase: its new phase.
            error: why the update ends, if it failed.
            first: runs before other threads can see the new phase.

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
            # After two rollbacks, an update is committed again: it has ended before.
            if phase in (Phase.COMMITTED, Phase.ABORTED) and update.ended is None:
                update.ended = now
                update.files = None  # its name map may be long
                self.ended[phase.value if error is None else error.code] += 1
            if error is not None:
                error.update_id, error.phase = update.update_id, phase.value
                update.error = error
        self._moved(update)
        return True

    def turn_back(self, left: Update | None, back: Update | None) -> None:
        """Note a rollback from update `left` to update `back`; None: start weights."""
        for update, phase in ((left, Phase.ROLLED_BACK), (back, Phase.COMMITTED)):
            if update is not None:
                self.move(update, phase)

    def outcomes(self) -> list[dict[str, Any]]:
        """The reports of all remembered updates, the newest first."""
        with self._lock:
            return [update.to_dict() for update in reversed(self._updates.values())]

    def _active(self) -> Update | None:
        return next((u for u in self._updates.values() if u.is_active), None)


def _is_news(update: Update) -> bool:
    """Whether the update has failed and no caller has got its error."""
    return update.error is not None and not update.is_told


def _nothing_open(last: Update | None) -> WrongPhase:
    """The error of a call without an id, if no update is open."""
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
        "aborted before another one starts",
        phase=active.phase.value,
        update_id=active.update_id,
    )
