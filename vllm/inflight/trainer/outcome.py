"""What became of a publish."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from vllm.inflight.errors import Cancelled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One version published, or skipped."""

    version: str | None
    """The label it is served under; None if it was skipped and had none."""
    step: int | None = None
    """The trainer's step number, as `publish` was given it."""
    skipped: bool = False
    """Whether it gave way, to a busy engine or to a newer publish."""
    update_id: str | None = None
    """Of the update, as `/weight_update/{update_id}` knows it; None if skipped."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """By engine: the epoch in which it serves this version."""
    digest: str | None = None
    """Of the version: 32 hex digits; None if skipped, or not known."""
    num_bytes: int = 0
    """Of all tensors that were sent."""
    gap_ms: float | None = None
    """Longest time an engine spent on the switch between two steps, in milliseconds."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """`snapshot`, `transfer`, `commit`, and `total` since `publish` was called."""
    mapped: Mapping[str, str] = field(default_factory=dict)
    """With `name_map="auto"`: from names of the source to those of the model that they
    were found to mean, where the two differ."""

    @property
    def epoch(self) -> int | None:
        """The epoch of the first engine."""
        return next(iter(self.epochs.values()), None)


class PublishFuture(Future[Outcome]):
    """The future of a publish, which knows whether its user has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = False
        """Whether result(), exception(), cancel() or a callback has the outcome."""

    def result(self, timeout: float | None = None) -> Outcome:
        """The outcome; raises the error of the publish."""
        self.is_read |= timeout is None or self.done()
        try:
            return super().result(timeout)
        finally:
            self.is_read |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the publish; None if it has none."""
        self.is_read |= timeout is None or self.done()
        try:
            return super().exception(timeout)
        finally:
            self.is_read |= self.done()

    def cancel(self) -> bool:
        """Cancel the publish if it has not begun."""
        self.is_read = True
        return super().cancel()

    def add_done_callback(self, call: Callable[[Future[Outcome]], object]) -> None:
        """Have `call` called with this future when it is done."""
        self.is_read = True
        super().add_done_callback(call)

    def note_failure(self, version: str | None) -> None:
        """Log the error of the publish, if it fails: nobody may ever read it."""
        super().add_done_callback(partial(_note_failure, version))

    @property
    def unread_error(self) -> BaseException | None:
        """The error of a publish that failed, if its user has not read it."""
        if self.is_read or not self.done():
            return None
        return _error_of(self)


def _error_of(future: Future[Outcome]) -> BaseException | None:
    return None if future.cancelled() else Future.exception(future)


def _note_failure(version: str | None, future: Future[Outcome]) -> None:
    error = _error_of(future)
    if isinstance(error, Cancelled):
        logger.error("publish of %r was given up: %s", version, error)
    elif error is not None:
        remedy = getattr(error, "remedy", "")
        logger.error("publish of %r failed: %r. %s", version, error, remedy)


def note_unheard(version: str, error: Exception) -> None:
    """Log what a progress callback raised too late to give the publish up."""
    logger.error(
        "%r is served; progress raised %r after that", version, error, exc_info=error
    )
