"""What was done to the engine, and what it must have been serving.

Clients and the judge ask here whether what they see is right for what was done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

TENSORS_MIB = 8.0
"""By which the memory of a rank's tensors may vary; buckets come and go."""


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
        self.num_sent = self.num_turns = 0
        """Updates by another process; times that the engine slept for a trainer."""
        self.held: list[dict[str, Any]] = []
        """What the ranks held at each audit: groups, and memory of tensors."""
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

    def note_held(self, ranks: list[dict[str, Any]]) -> None:
        """Keep what the ranks hold; a group that ended must be gone by the next."""
        for rank, held in enumerate(ranks):
            if held["open_groups"] > 1 or held["groups"] > 2:
                self.wrong.append(f"rank {rank} keeps groups: {held}")
        self.held.append(ranks[0])

    def tensors_grow(self) -> str | None:
        """How much more tensors held in the second half of the audits, if too much."""
        told = [held["tensors_mib"] for held in self.held]
        first, second = told[: len(told) // 2], told[len(told) // 2 :]
        if first and max(second) > max(first) + TENSORS_MIB:
            return f"{max(first):.1f} MiB became {max(second):.1f}"
        return None

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
