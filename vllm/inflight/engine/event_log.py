"""The event log: one log line for each update, rollback and pause of an engine.

The log shows what was started, staged, rejected, aborted, committed and rolled back. It
also shows when decoding was paused and continued, and how long each took. Each engine
core writes its own lines. The ranks write none of them.
"""

from __future__ import annotations

import logging

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.transaction import Update
from vllm.inflight.errors import (
    Conflict,
    Forbidden,
    InflightError,
    Malformed,
    WeightsMismatch,
)
from vllm.inflight.update import PauseMode, Phase, Version

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "off": None,
}
"""Log level for each value of `--inflight-log-level`; None: no lines are written."""

REFUSALS = (Malformed, Forbidden, Conflict, WeightsMismatch)
"""Errors of an update's content: the log calls it refused, otherwise aborted."""

MOST_CHARS = 1000
"""The longest line, since an error may name many tensors."""

logger = upstream.init_logger(__name__)


class EventLog:
    """The event log of one engine core."""

    def __init__(self, vllm_config: upstream.VllmConfig) -> None:
        self._level = LEVELS[InflightConfig.of(vllm_config).log_level]

    def began(self, update: Update, transport: str, seconds: float) -> None:
        """Log that an update has started on all ranks."""
        whose = "" if update.owner is None else f" by {update.owner!r}"
        self._say(
            f"{_named(update)} begun{whose}: transport {transport}, deadline in "
            f"{update.deadline - update.began:.0f} s",
            seconds,
        )

    def moved(self, update: Update) -> None:
        """Log that an update is staged on every rank, or that it was aborted."""
        if update.phase is Phase.STAGED:
            self._say(
                f"{_named(update)} staged: digest {update.digest}, "
                f"{update.num_bytes / 1e6:.1f} MB on all ranks",
                update.seconds()["staging"],
            )
        elif update.phase is Phase.ABORTED:
            error = update.error
            end = "refused" if isinstance(error, REFUSALS) else "aborted"
            why = "" if error is None else f": {error.code}: {error.message}"
            self._say(
                f"{_named(update)} {end}{why}",
                update.seconds()["total"],
                is_trouble=True,
            )

    def not_committed(self, update: Update, error: InflightError) -> None:
        """Log that a commit was rejected; the update stays staged."""
        self._say(
            f"{_named(update)} not committed, it stays {update.phase.value}: "
            f"{error.code}: {error.message}",
            update.seconds()["total"],
            is_trouble=True,
        )

    def committed(self, update: Update, version: Version, gap_ms: float) -> None:
        """Log that an update is live."""
        self._say(
            f"{_named(update)} committed: epoch {version.epoch}, digest "
            f"{version.digest}, gap {gap_ms:.2f} ms",
            update.seconds()["total"],
        )

    def rolled_back(
        self, left: Version, version: Version, gap_ms: float, seconds: float
    ) -> None:
        """Log a rollback."""
        self._say(
            f"rolled back from version {left.label!r} to {version.label!r}: epoch "
            f"{version.epoch}, gap {gap_ms:.2f} ms",
            seconds,
        )

    def not_rolled_back(self, what: str, error: InflightError) -> None:
        """Log that a rollback failed; the live version has not changed."""
        self._say(f"{what} not made: {error.code}: {error.message}", is_trouble=True)

    def paused(
        self, mode: PauseMode, owner: str | None, counts: str, seconds: float
    ) -> None:
        """Log a pause, which may still wait for running requests."""
        whose = "" if owner is None else f" by {owner!r}"
        self._say(f"paused{whose} in mode {mode.value}: {counts}", seconds)

    def absorbed(self, mode: PauseMode, owner: str | None, counts: str) -> None:
        """Log that a pause is absorbed."""
        whose = "" if owner is None else f" by {owner!r}"
        self._say(
            f"a pause{whose} in mode {mode.value} is absorbed, and decoding goes on: "
            f"{counts}"
        )

    def enforced(self, mode: PauseMode, need: str) -> None:
        """Log that an absorbed pause takes force."""
        self._say(f"the absorbed pause takes force in mode {mode.value}: {need}")

    def absorbed_ended(self, mode: PauseMode) -> None:
        """Log that an absorbed pause has ended and never stopped decoding."""
        self._say(f"the absorbed pause in mode {mode.value} has ended")

    def continued(self, mode: PauseMode, seconds: float) -> None:
        """Log that decoding goes on, with the length of the pause."""
        self._say(f"continued, after a pause in mode {mode.value}", seconds)

    def _say(
        self, what: str, seconds: float | None = None, *, is_trouble: bool = False
    ) -> None:
        if self._level is None:
            return
        level = max(self._level, logging.WARNING) if is_trouble else self._level
        took = "" if seconds is None else f" ({seconds:.3f} s)"
        logger.log(level, "%s%s", what[:MOST_CHARS], took)


def _named(update: Update) -> str:
    label = "" if update.label is None else f" (version {update.label!r})"
    return f"update {update.update_id!r}{label}"
