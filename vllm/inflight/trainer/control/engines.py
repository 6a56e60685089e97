"""The control calls on one or more engines, each within one retry budget.

The clients for servers and the `Publisher` offer these calls to users.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from vllm.inflight.errors import (
    Conflict,
    DeadlineExceeded,
    EngineUnreachable,
    InflightError,
    UnknownUpdate,
    VersionConflict,
    WrongPhase,
)
from vllm.inflight.trainer.control.pause import Ask, Pause
from vllm.inflight.trainer.engine_clients import Engine, blamed
from vllm.inflight.trainer.http_client import NotReached, Reply
from vllm.inflight.trainer.retry import FIRST_DELAY_S, LAST_DELAY_S, RetryBudget
from vllm.inflight.update import PauseMode

Replies = dict[str, Reply]
"""Name of the engine → its reply."""

LIVE_FACTS = "weight_version", "epoch", "digest", "step", "committed_at"
"""What a rollback and `/weight_info` both say of the live version."""
TARGET_FACTS = "weight_version", "digest"
"""What the rollback targets of several engines have in common."""


class WaitTimeout(DeadlineExceeded, TimeoutError):
    """A version did not become live in the time that it was waited for."""

    remedy = (
        "status() has the last updates and their errors. Or give a larger timeout_s."
    )


def one_by_one(
    engines: Sequence[Engine], call: Callable[[Engine], Reply], budget: RetryBudget
) -> list[Reply]:
    """`call` on each engine; the error of one names that engine."""
    replies = []
    for engine in engines:
        budget.require()
        try:
            replies.append(call(engine))
        except InflightError as error:
            blamed(error, engine)
            raise
    return replies


class Controls:
    """Control calls on `engines`; several engines are asked by `ask`."""

    def __init__(self, engines: Sequence[Engine], ask: Ask = one_by_one) -> None:
        self._engines = engines
        self._ask = ask

    def status(self, update_id: str | None, budget: RetryBudget) -> Replies:
        """`GET /weight_update`, or of one update."""
        return self._all(lambda engine: engine.status(update_id, budget), budget)

    def weight_info(self, budget: RetryBudget) -> Replies:
        """`GET /weight_info`."""
        return self._all(lambda engine: engine.info(budget), budget)

    def pause_state(self, budget: RetryBudget) -> Replies:
        """`GET /is_paused`."""
        return self._all(lambda engine: engine.pause_state(budget), budget)

    def is_paused(self, budget: RetryBudget) -> bool:
        """Whether decoding is paused on one engine at least."""
        states = self.pause_state(budget).values()
        return any(
            each["is_paused"]
            for state in states
            for each in state.get("engines", [state])
        )

    def pause(self, timeout_s: float, **options: Any) -> Pause:
        """A pause that has not begun."""
        return Pause(self._engines, self._ask, timeout_s, **options)

    def continue_(self, owner: str | None, budget: RetryBudget) -> Replies:
        """Continue every engine, also when one of them rejects that."""
        replies: Replies = {}
        failures: list[InflightError] = []
        for engine in self._engines:
            try:
                replies[engine.name] = engine.resume(owner, budget)
            except InflightError as error:
                blamed(error, engine)
                failures.append(error)
        if failures:
            raise failures[0]
        return replies

    def abort(self, update_id: str | None, budget: RetryBudget) -> Replies:
        """Abort an update on every engine that has it.

        Raises:
            WrongPhase: no engine has an update to abort, or it is committed.
            UnknownUpdate: no engine knows the update.

        """
        replies: Replies = {}
        failures: list[InflightError] = []
        for engine in self._engines:
            try:
                replies[engine.name] = self._aborted(engine, update_id, budget)
            except InflightError as error:
                blamed(error, engine)
                failures.append(error)
        # An engine without the update has nothing to abort.
        serious = [e for e in failures if not isinstance(e, WrongPhase | UnknownUpdate)]
        if serious or (failures and not replies):
            raise (serious or failures)[0]
        return replies

    def _aborted(
        self, engine: Engine, update_id: str | None, budget: RetryBudget
    ) -> Reply:
        if update_id is None:
            # By its id the call can be repeated when a reply is lost. Without an id a
            # repetition could abort the next update.
            state = engine.status(None, budget)
            states = state.get("engines", [state])
            ids = [each["active"]["update_id"] for each in states if each["active"]]
            update_id = ids[0] if ids else None
        # None: a rollback that waits is aborted, or the call is rejected.
        return engine.abort(update_id, budget)  # type: ignore[arg-type]

    def rollback(
        self, to_version: str | None, mode: str | None, budget: RetryBudget
    ) -> Replies:
        """Roll every engine back, or none."""
        mode = None if mode is None else PauseMode.parse(mode).value
        if len(self._engines) == 1:
            return self._all(lambda e: rolled_back(e, to_version, mode, budget), budget)
        before = self.weight_info(budget)
        targets = {
            name: tuple((info["previous"] or {}).get(fact) for fact in TARGET_FACTS)
            for name, info in before.items()
        }
        if len(set(targets.values())) > 1:
            told = ", ".join(f"{name}: {of[0]!r}" for name, of in targets.items())
            raise VersionConflict(
                f"the engines have different rollback targets ({told}), so none rolls "
                "back; publish the version that is wanted"
            )
        replies: Replies = {}
        try:
            for engine in self._engines:
                (replies[engine.name],) = one_by_one(
                    [engine], lambda e: rolled_back(e, to_version, mode, budget), budget
                )
        except InflightError as error:
            for engine in self._engines:
                if engine.name in replies:
                    self._forward_again(engine, before[engine.name], error)
            raise
        return replies

    def _forward_again(self, engine: Engine, before: Reply, error: Exception) -> None:
        label, budget = before["weight_version"], RetryBudget(5 * LAST_DELAY_S)
        try:
            rolled_back(engine, label, None, budget)
        except InflightError as failure:
            error.add_note(f"{engine.name} has rolled back: {failure}")

    def update_from_disk(self, body: Reply, budget: RetryBudget) -> Replies:
        """`POST /update_weights_from_disk` of the only engine, a server."""
        # With an id the call can be repeated when its reply is lost.
        body = {"update_id": uuid.uuid4().hex} | body
        return self._all(lambda e: e.update_from_disk(body, budget), budget)  # type: ignore[attr-defined]

    def wait_for(self, version: str, budget: RetryBudget) -> Replies:
        """Ask what is live until every engine serves `version`."""
        delay, told = FIRST_DELAY_S, "no engine has answered"
        while True:
            try:
                infos = self.weight_info(budget.shared())
                told = ", ".join(
                    f"{name}: {each['weight_version']!r}"
                    for name, info in infos.items()
                    for each in info.get("engines", [info])
                    if each["weight_version"] != version
                )
                if not told:
                    return infos
            except EngineUnreachable as error:
                told = error.message
            if not budget.pause(delay):
                budget.require()
                raise WaitTimeout(
                    f"version {version!r} is not live after "
                    f"{round(budget.timeout_s, 1):g} s; live are {told}"
                )
            delay = min(2 * delay, 1.0)

    def _all(self, call: Callable[[Engine], Reply], budget: RetryBudget) -> Replies:
        replies = self._ask(self._engines, call, budget)
        names = (engine.name for engine in self._engines)
        return dict(zip(names, replies, strict=True))


def rolled_back(
    engine: Engine, to_version: str | None, mode: str | None, budget: RetryBudget
) -> Reply:
    """Roll back one engine, once, also when a reply is lost.

    A second rollback would return to the version that was left. So the call names its
    target, and `/weight_info` tells what became of a call without a reply.
    """
    before = engine.info(budget)
    target = (before["previous"] or {}).get("weight_version")
    # Two versions of one label: the label does not guard a repeated call.
    is_guarded = target not in (None, before["weight_version"])
    was_sent = False
    while True:
        try:
            return engine.rollback(to_version or target, budget, mode)
        except EngineUnreachable as error:
            was_sent = was_sent or not isinstance(error, NotReached)
            if was_sent and (live := _made(before, engine.info(budget))) is not None:
                return live
            if (was_sent and not is_guarded) or not budget.pause(FIRST_DELAY_S):
                raise
        except Conflict:
            live = _made(before, engine.info(budget)) if was_sent else None
            if live is None:
                raise
            return live


def _made(before: Reply, after: Reply) -> Reply | None:
    """The live version after a rollback that was made; None if it was not."""
    target = before["previous"] or {}
    is_made = (after["epoch"], after["weight_version"]) == (
        before["epoch"] + 1,
        target.get("weight_version"),
    )
    return {name: after.get(name) for name in LIVE_FACTS} if is_made else None
