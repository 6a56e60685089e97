"""What was done to the engine, and what it must have been serving.

Clients and the judge ask here whether what they see is right for what was done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Served:
    """What one epoch served."""

    label: str
    content: str
    """Two letters: the checkpoint of everything, and that of the MLPs."""


class History:
    """Epochs, stops and aborts of one run."""

    def __init__(self, content: str) -> None:
        self.epochs = {0: Served("default", content)}
        self.wrong: list[str] = []
        """What an engine must not do, in words; lost requests and torn tokens too."""
        self.num_lost = self.num_torn = 0
        self.num_updates = self.num_rollbacks = self.num_renames = self.num_pauses = 0
        self.num_audits = 0
        """Comparisons of what is served with a fresh load of its files."""
        self.faults: dict[str, int] = {}
        """Survived, by name."""
        self.can_go_back: Served | None = None
        """What a rollback returns to, while it is held."""
        self._digests: dict[str, str] = {}
        self._aborting = self._num_aborts = 0
        self._stopping = self._num_stops = 0

    @property
    def now(self) -> Served:
        """What is served."""
        return self.epochs[max(self.epochs)]

    def serves(self, reply: dict[str, Any], label: str, content: str) -> None:
        """An engine said that it serves a new epoch; note it and check the rest."""
        before = max(self.epochs)
        if reply["epoch"] != before + 1:
            self.wrong.append(f"epoch {reply['epoch']} follows {before}")
        if reply["weight_version"] != label:
            self.wrong.append(f"{reply['weight_version']!r} is served, not {label!r}")
        self.epochs[reply["epoch"]] = Served(label, content)
        digest = reply.get("digest")
        if digest and self._digests.setdefault(content, digest) != digest:
            self.wrong.append(f"{content} has two digests in epoch {reply['epoch']}")

    # ------------------------------------------------------ reasons of an end
    @contextmanager
    def aborting(self) -> Iterator[None]:
        """While requests may be ended by what is asked of the engine."""
        self._aborting += 1
        try:
            yield
        finally:
            self._aborting -= 1
            self._num_aborts += 1

    @property
    def aborts_over(self) -> int:
        """To be kept when a request begins, for `was_aborted`."""
        return self._num_aborts

    def was_aborted(self, since: int) -> bool:
        """Whether something may have ended a request that began at `since`."""
        return self._aborting > 0 or self._num_aborts > since

    # ------------------------------------------------------------------- gaps
    @contextmanager
    def stopping(self) -> Iterator[None]:
        """While decoding, or the admission of requests, is meant to stand still."""
        self._stopping += 1
        try:
            yield
        finally:
            self._stopping -= 1
            self._num_stops += 1

    @property
    def stops(self) -> int:
        """Changes while something stands still, and stays while nothing does."""
        return 2 * self._num_stops + 1 if self._stopping else 2 * self._num_stops

    @property
    def is_stopping(self) -> bool:
        """Whether something is meant to stand still now."""
        return self._stopping > 0
