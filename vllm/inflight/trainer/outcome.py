"""The result of a publish."""

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
    """The result of one publish: published or skipped."""

    version: str | None
    """The label of the version; None if it was skipped without a label."""
    step: int | None = None
    """The trainer's step number, from the call of `publish`."""
    skipped: bool = False
    """Whether it was skipped, for a busy engine or a newer publish."""
    update_id: str | None = None
    """The id of the update in `/weight_update/{update_id}`; None if skipped."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Engine name -> the epoch in which the engine serves this version."""
    digest: str | None = None
    """The digest of the version, 32 hex digits; None if skipped or not known."""
    num_bytes: int = 0
    """The bytes of all tensors that were sent."""
    is_delta: bool = False
    """Whether only what has changed since the version before was sent."""
    gap_ms: float | None = None
    """The longest flip of an engine between two steps, in milliseconds."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds of the phases `snapshot`, `transfer` and `commit`, and of `total`
    since the call of `publish`."""
    mapped: Mapping[str, str] = field(default_factory=dict)
    """With `name_map="auto"`: name in the source -> matched name of the model, where
    the two differ."""

    @property
    def epoch(self) -> int | None:
        """The epoch of the first engine; None if skipped."""
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
    """Log an error of a progress callback that came after the commit."""
    logger.error(
        "%r is served; progress raised %r after that", version, error, exc_info=error
    )
