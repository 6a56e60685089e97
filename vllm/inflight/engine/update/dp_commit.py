"""Lockstep: engines that take every step together change weights at one of them.

Data-parallel engines of a mixture-of-experts model exchange tokens in every layer, so a
step in which two of them had different weights would be of no version. Upstream has
them meet every `dp_sync_interval` steps, to agree on whether anybody has work. There
each also tells what it is armed with. When all name the same, all switch at once and
tell whether it worked; if one could not, the others take it back before the next step.
Until then everybody goes on stepping.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.engine.transaction import Update
from vllm.inflight.errors import EngineFault, InflightError, UpdateBusy, WrongPhase

Reply = dict[str, Any]
NOTHING = 0
PATIENCE_S = 30.0
"""How long one engine waits, stepping, for the others to be asked for the same."""


@dataclass
class _Armed:
    key: int
    switch: Callable[[], Reply]
    update: Update | None = None
    answer: Future[Reply] = field(default_factory=Future)
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE_S)


class DpCommit:
    """One engine core's part in it; engines that step alone have none."""

    def __init__(
        self, core: upstream.EngineCore, can_switch: Callable[[], bool]
    ) -> None:
        self._core = core
        self._can_switch = can_switch
        self._known: tuple[Any, bool] = (None, False)
        """A group, and whether every engine of it can be updated."""
        self._armed: _Armed | None = None
        self._owes_vote = self._is_meeting = False
        self.num_pauses_left = 0
        """Pauses asked of this engine while it still waited to agree on an earlier."""

    @property
    def _group(self) -> Any:
        # Asked for each time: elastic expert parallelism makes a new one.
        return getattr(self._core, "dp_group", None)

    @property
    def is_kept(self) -> bool:
        """Whether this engine steps together with others."""
        return self._group is not None

    @property
    def is_armed(self) -> bool:
        """Whether a switch waits for the other engines."""
        return self._armed is not None

    def is_armed_for(self, update: Update | None) -> bool:
        """Whether the commit of `update`, or a rollback if None, waits for others."""
        return self._armed is not None and self._armed.update is update

    def require_unarmed(self, active: Update | None) -> None:
        """Raise `UpdateBusy` while a switch but that of `active` waits for others."""
        if self._armed is not None and self._armed.update is not active:
            raise UpdateBusy(
                "a rollback waits for the other data-parallel engines, at most "
                f"{PATIENCE_S:g} s; call again after that"
            )

    def arm(
        self, what: object, switch: Callable[[], Reply], update: Update | None = None
    ) -> Future[Reply]:
        """Call `switch` where all engines meet, once all are armed with `what`.

        It checks for itself whether it can: so that all engines come to the meeting.
        Waits for `PATIENCE_S`, and no longer than the `update` that it commits.
        """
        key = _key(what)
        if self._armed is not None:
            if self._armed.key == key:
                return self._armed.answer
            raise WrongPhase("another switch waits for the other engines already")
        self._armed = _Armed(key, switch, update)
        core = self._core
        if not core.engines_running:
            # As with a request that comes while all are idle: the others have to be
            # woken, or this one would wait for them at the meeting.
            core.engines_running = True
            if core.has_coordinator:
                wake = upstream.EngineCoreOutputs(start_wave=core.current_wave)
                core.output_queue.put_nowait((-1, wake))
        return self._armed.answer

    def disarm(self, error: Exception) -> None:
        """What this engine was armed with is not wanted any more."""
        if self._armed is not None:
            armed, self._armed = self._armed, None
            armed.answer.set_exception(error)

    def meet(self) -> bool:
        """Meet the others; whether somebody waits for somebody else, or has work now.

        Every engine calls it after the same step.

        Raises:
            SystemExit: it is not known any more what the others serve.

        """
        if self._known[0] is not self._group:
            # Once for each group: where one cannot be updated, nobody needs to meet.
            self._known = (self._group, self._extent(int(self._can_switch()))[0] == 1)
        if not self._known[1]:
            self.disarm(EngineFault("another engine cannot be updated in flight"))
            return False
        self._lose_patience()
        key = NOTHING if self._armed is None else self._armed.key
        lowest, highest = self._extent(key)
        if highest == NOTHING:
            return False
        if lowest == NOTHING:
            return True
        assert self._armed is not None
        if lowest != highest:
            self.disarm(EngineFault("the engines were told to switch differently"))
            return False
        armed, self._armed = self._armed, None
        self._owes_vote = self._is_meeting = True
        try:
            armed.answer.set_result(armed.switch())
        except Exception as error:
            armed.answer.set_exception(error)
            if self._owes_vote:
                self.all_could(False)
            elif not isinstance(error, InflightError):
                raise SystemExit(
                    "vllm-inflight: a switch of engines that step together broke off "
                    f"after they had agreed on it: {error}"
                ) from error
        finally:
            self._is_meeting = False
        # The switch may let requests go on; upstream's count was before it.
        is_busy = self._core.scheduler.has_unfinished_requests()
        return self._extent(int(is_busy))[1] == 1

    def have_agreed(self) -> bool:
        """All have agreed on a pause; whether any of them is to agree on another.

        Upstream keeps one flag for all pauses. One engine may hear two pauses before
        the engines meet, and another may hear the second after it. The first would
        then take both for agreed on and stand still, and the other would wait for it
        at its next step. Every engine calls this.
        """
        if is_left := self.num_pauses_left > 0:
            self.num_pauses_left -= 1
            self._core.pending_pause = True
        return self._extent(int(is_left))[1] == 1

    def resume(self) -> None:
        """Have the scheduler go on, also while the engines step.

        Upstream takes those that step for engines that nobody has paused, or not yet.
        They step under a pause to commit, and where they switch all go on at once.
        """
        core = self._core
        is_going = self._is_meeting
        if self.is_kept and core.engines_running and not is_going:
            is_going = not (core.pending_pause or core.ignore_start_dp_wave)
        if is_going:
            core.ignore_start_dp_wave = False
            core.scheduler.set_pause_state(upstream.PauseState.UNPAUSED)
        else:
            core.resume_scheduler()

    def settle(self, is_held: bool) -> None:
        """After waking up together: step if any engine has to, else stand still.

        Upstream ends every pause with it. Where one goes on, a request would wake the
        other engines, and they would wait for a step of this one. Every engine that
        stood still calls it.

        Args:
            is_held: whether this engine may not take new requests yet.

        """
        core = self._core
        has_work = core.scheduler.has_unfinished_requests()
        core.engines_running = self._extent(int(has_work))[1] == 1
        core.ignore_start_dp_wave = self._extent(int(is_held))[0] == 1

    def together(
        self, flip: Callable[[], Reply], take_back: Callable[[], Any]
    ) -> Reply:
        """`flip` on every engine or on none, before the next step of any.

        Raises:
            EngineFault: another engine could not; it is taken back here.
            SystemExit: it could not be taken back.

        """
        if self._group is None:
            return flip()
        facts: Reply = {}
        failure: InflightError | None = None
        try:
            facts = flip()
        except InflightError as error:
            failure = error
        if self.all_could(failure is None):
            return facts
        if failure is not None:
            raise failure
        try:
            take_back()
        except Exception as error:
            raise SystemExit(
                "vllm-inflight: another engine could not switch, and this one could "
                f"not take its switch back, so they would mix versions: {error}"
            ) from error
        raise EngineFault("another engine could not switch; it was taken back here")

    def all_could(self, could: bool) -> bool:
        """Whether all engines could; each calls it as often as the others."""
        self._owes_vote = False
        return self._extent(int(could))[0] == 1

    # ---------------------------------------------------------------- helpers
    def _lose_patience(self) -> None:
        if self._armed is None:
            return
        if not self._core.is_running():
            self.disarm(EngineFault("the engine is shutting down"))
        elif time.monotonic() > self._armed.until:
            waited = f"not every engine was asked to switch within {PATIENCE_S:g} s"
            self.disarm(EngineFault(f"{waited}; nothing has changed"))

    def _extent(self, value: int) -> tuple[int, int]:
        """The lowest and the highest `value` of all engines."""
        extent = torch.tensor([value, -value], dtype=torch.int64)
        torch.distributed.all_reduce(
            extent, op=torch.distributed.ReduceOp.MIN, group=self._group
        )
        lowest, highest = extent.tolist()
        return lowest, -highest


def _key(what: object) -> int:
    """A positive number of 62 bits that stands for `what` on every engine."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 | 1
