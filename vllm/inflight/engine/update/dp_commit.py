"""DP-synchronous commit: data-parallel engines commit at the same step.

Data-parallel engines of a mixture-of-experts model exchange tokens in every layer. So a
step with different weights on two engines would mix two versions. Upstream synchronises
these engines every `dp_sync_interval` steps, to agree on whether any of them has work.

At each of these points the engines all-reduce the id of their pending switch. If all
ids are equal, every engine switches, and they all-reduce its success. If one failed,
the others undo the switch before the next step. Decoding goes on until then.

The end of a pause is such a switch too. Upstream's resume would wait for every engine,
and one whose pause was renewed meanwhile never comes to it.
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
CONTINUE = ("continue",)
"""What engines are armed with to continue after a pause."""
PATIENCE_S = 30.0
"""How long an engine waits for the same call to reach the others; it decodes on."""


@dataclass
class _Armed:
    key: int
    switch: Callable[[], Reply]
    update: Update | None = None
    answer: Future[Reply] = field(default_factory=Future)
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE_S)


class DpCommit:
    """One engine core's part in a DP-synchronous commit; unused if it steps alone."""

    def __init__(
        self, core: upstream.EngineCore, can_switch: Callable[[], bool]
    ) -> None:
        self._core = core
        self._can_switch = can_switch
        self._known: tuple[Any, bool] = (None, False)
        """A group, and whether all of its engines can be updated."""
        self._armed: _Armed | None = None
        self._owes_vote = self._is_meeting = False
        self.num_pauses_left = 0
        """Pause calls that came while an earlier pause was not yet agreed on."""

    @property
    def _group(self) -> Any:
        # Read each time, since elastic expert parallelism makes a new group.
        return getattr(self._core, "dp_group", None)

    @property
    def is_kept(self) -> bool:
        """Whether this engine steps together with others."""
        return self._group is not None

    @property
    def is_armed(self) -> bool:
        """Whether a switch waits for the other engines."""
        return self._armed is not None

    @property
    def is_to_continue(self) -> bool:
        """Whether the end of a pause waits for the other engines."""
        return self._armed is not None and self._armed.key == _key(CONTINUE)

    def is_armed_for(self, update: Update | None) -> bool:
        """Whether the commit of `update`, or a rollback if None, waits for others."""
        armed = None if self.is_to_continue else self._armed
        return armed is not None and armed.update is update

    def require_unarmed(self, active: Update | None) -> None:
        """Raise `UpdateBusy` while a switch waits that is not of `active`."""
        if self.is_to_continue:
            return  # it needs no rollback target
        if self._armed is not None and self._armed.update is not active:
            raise UpdateBusy(
                "a rollback waits for the other data-parallel engines, at most "
                f"{PATIENCE_S:g} s; call again after that"
            )

    def arm(
        self, what: object, switch: Callable[[], Reply], update: Update | None = None
    ) -> Future[Reply]:
        """Call `switch` at a sync point, once all engines are armed with `what`.

        `switch` makes its own checks, so that every engine reaches the sync point. The
        wait ends after `PATIENCE_S`, or with the deadline of `update`.
        """
        key = _key(what)
        if self._armed is not None:
            if self._armed.key == key:
                return self._armed.answer
            if self.is_to_continue:
                raise WrongPhase(
                    "the data-parallel engines are about to continue; call again"
                )
            raise WrongPhase(
                "another commit or rollback waits for the other data-parallel engines"
            )
        self._armed = _Armed(key, switch, update)
        core = self._core
        if not core.engines_running:
            # Wake the other engines, as a new request does. Otherwise this engine
            # would wait for them at the sync point.
            core.engines_running = True
            if core.has_coordinator:
                wake = upstream.EngineCoreOutputs(start_wave=core.current_wave)
                core.output_queue.put_nowait((-1, wake))
        return self._armed.answer

    def disarm(self, error: Exception) -> None:
        """Cancel the pending switch with `error`."""
        if self._armed is not None:
            armed, self._armed = self._armed, None
            armed.answer.set_exception(error)

    def meet(self) -> bool:
        """Synchronise with the other engines, and switch if all are armed.

        Every engine calls this after the same step. Returns whether the engines have to
        go on stepping, because one waits for another or has work.

        Raises:
            SystemExit: the live versions of the other engines are unknown.

        """
        if self._known[0] is not self._group:
            # Once per group. If one engine cannot be updated, none needs sync points.
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
            self.disarm(EngineFault("the data-parallel engines got different calls"))
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
                    "vllm-inflight: a commit or rollback failed after all "
                    f"data-parallel engines had agreed on it: {error}"
                ) from error
        finally:
            self._is_meeting = False
        # The switch may resume requests that upstream has not counted.
        is_busy = self._core.scheduler.has_unfinished_requests()
        return self._extent(int(is_busy))[1] == 1

    def have_agreed(self) -> bool:
        """After the engines agreed on a pause, return whether another pause is open.

        Upstream keeps one flag for all pauses. One engine may get two pause calls
        before a sync point, and another engine the second call after it. The first one
        would then stop, and the other would wait for it. Every engine calls this.
        """
        if is_left := self.num_pauses_left > 0:
            self.num_pauses_left -= 1
            self._core.pending_pause = True
        return self._extent(int(is_left))[1] == 1

    def continue_together(self, act: Callable[[], Reply]) -> Any:
        """Call `act`, which ends a pause, at a sync point of all engines.

        Returns a Future, or the result of `act` if this engine steps alone or the
        engines have no sync points.
        """
        if not (self.is_kept and self._known[0] is self._group and self._known[1]):
            return act()

        def switch() -> Reply:
            self.all_could(True)  # nothing in it can fail
            return act()

        return self.arm(CONTINUE, switch)

    def resume(self) -> None:
        """Resume the scheduler, also while the engines step.

        Upstream's resume expects that paused engines do not step. Here they step during
        a pause to commit, and at the commit all of them resume together. Engines that
        are not paused do not meet for it: a request may have woken some of them.
        """
        core = self._core
        if self.is_kept and not (
            core.is_scheduler_paused() or core.ignore_start_dp_wave
        ):
            return
        is_going = self._is_meeting
        if self.is_kept and core.engines_running and not is_going:
            is_going = not (core.pending_pause or core.ignore_start_dp_wave)
        if is_going:
            core.ignore_start_dp_wave = False
            if hasattr(core, "reject_new_requests"):
                core.reject_new_requests = False
            core.scheduler.set_pause_state(upstream.PauseState.UNPAUSED)
        else:
            core.resume_scheduler()

    def settle(self, is_held: bool) -> None:
        """After waking up, step if any engine has work, else stop all engines.

        Upstream's waking ends every pause. If a pause stays in force on this engine, a
        request would wake the others, and they would wait for it. Every engine that was
        stopped calls this.

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
        """Flip on all engines or on none, before their next step.

        Raises:
            EngineFault: another engine could not flip; this engine has undone its flip.
            SystemExit: this engine could not undo its flip.

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
                "vllm-inflight: another data-parallel engine could not flip, and this "
                f"one could not undo its flip, so they would mix versions: {error}"
            ) from error
        raise EngineFault(
            "another data-parallel engine could not flip; this one has undone its flip"
        )

    def all_could(self, could: bool) -> bool:
        """Whether all engines succeeded; every engine calls this equally often."""
        self._owes_vote = False
        return self._extent(int(could))[0] == 1

    # ---------------------------------------------------------------- helpers
    def _lose_patience(self) -> None:
        if self._armed is None:
            return
        if not self._core.is_running():
            self.disarm(EngineFault("the engine is shutting down"))
        elif time.monotonic() > self._armed.until:
            self.disarm(
                EngineFault(
                    "the call did not reach every data-parallel engine within "
                    f"{PATIENCE_S:g} s; nothing has changed"
                )
            )

    def _extent(self, value: int) -> tuple[int, int]:
        """The lowest and the highest `value` over all engines."""
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
