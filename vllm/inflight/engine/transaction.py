"""One update of an engine: what it is, whose, how far, and what became of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.inflight.calls import StartUpdate
from vllm.inflight.errors import InflightError, WeightsMismatch
from vllm.inflight.update import ACTIVE, Phase

SPENT = "wire", "cpu"
"""Of staging: waiting for the transport, if it tells; work of the staging thread."""


@dataclass(slots=True)
class Update:
    """One update of one engine."""

    update_id: str
    serial: int
    """Counts updates of this engine; ranks know an update by it."""
    fingerprint: str
    """Of the request that began it, to tell a repeated call from another one."""
    label: str | None
    step: int | None
    deadline: float
    """On the monotonic clock, in seconds."""
    phase: Phase = Phase.OPEN
    began: float = field(default_factory=time.monotonic)
    staged: float | None = None
    ended: float | None = None
    moved: float = field(default_factory=time.monotonic)
    """When a rank, its trainer or its phase last got on."""
    num_commands: int = 0
    num_chunks: int = 0
    is_preparing: bool = False
    digest: str | None = None
    """Of the whole version that every rank staged, once they agree; None: not known."""
    sent: str | None = None
    """Digest of the tensors that every rank was sent."""
    is_whole: bool = True
    """Whether it brings all of the model, and not a subset or the drafter alone."""
    base: str = ""
    """What was served when it began, as this engine knows it; see `Served`."""
    num_bytes: int = 0
    """Staged on all ranks together."""
    num_replayed: int = 0
    """Tensors that ranks load by their records, not by their loaders; see plan.py."""
    spent: dict[str, float] = field(default_factory=dict)
    """Of staging, the most seconds that a rank spent on each of `SPENT`."""
    drift: dict[str, Any] | None = None
    """How far its weights moved from the live ones of then; see verify/drift.py."""
    error: InflightError | None = None
    is_told: bool = False
    """Whether somebody who asked for it has been told that error."""
    source: str | None = None
    """The path its files were read from, if it came whole and from files."""
    files: dict[str, Any] | None = None
    """What it takes to read the same files in the same way, if it comes from files."""
    owner: str | None = None
    """Whose it is: nobody who names another may receive, finish or abort it."""
    is_held: bool = False
    """Whether it is being switched to."""
    pending: Future[dict[str, Any]] | None = None
    """Its commit, while that waits for running requests."""
    result: dict[str, Any] | None = None
    """The reply of its commit, given again to whoever asks again."""

    @property
    def is_active(self) -> bool:
        """Whether it holds the shadow weights."""
        return self.phase in ACTIVE

    @property
    def left_s(self) -> float:
        """Seconds until its deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def stalled_s(self) -> float:
        """For how long nothing has moved; 0 once it has ended."""
        return round(time.monotonic() - self.moved, 3) if self.is_active else 0.0

    def state(self) -> dict[str, Any]:
        """`update_id` and `phase`, which every reply about it has."""
        return {"update_id": self.update_id, "phase": self.phase.value}

    def vote(self) -> dict[str, Any]:
        """`state`, and the `STAGED_FACTS`: equal on engines that may commit together.

        A digest says it all. Where the digest is not known, what was sent does not:
        the result depends on what is served below it.
        """
        base = self.base if self.digest is None else None
        facts = {"digest": self.digest, "sent": self.sent, "base": base}
        return self.state() | facts

    def expect(self, digest: object) -> None:
        """Raise `WeightsMismatch` unless `digest` is None or what was staged."""
        if digest is not None and digest != self.digest:
            raise WeightsMismatch(
                f"expect_digest is {digest!r:.80}, staged is {self.digest!r}",
                update_id=self.update_id,
                remedy="Publish the weights that have the digest, or expect this one.",
            )

    def seconds(self) -> dict[str, float]:
        """How long each part took, in seconds."""
        end = self.ended or time.monotonic()
        parts = {"total": end - self.began}
        if self.staged is not None:
            parts["staging"] = self.staged - self.began
        parts |= self.spent
        return {name: round(value, 6) for name, value in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """As `/weight_update` reports it."""
        report: dict[str, Any] = {
            "update_id": self.update_id,
            "phase": self.phase.value,
            "weight_version": self.label,
            "seconds": self.seconds(),
        }
        if self.is_active:
            report["deadline_left_s"] = round(self.left_s, 3)
            report["stalled_s"] = self.stalled_s
        if self.owner is not None:
            report["owner"] = self.owner
        if self.step is not None:
            report["step"] = self.step
        if self.error is not None:
            report["error"] = self.error.to_dict()
        if self.result is not None:
            report["result"] = self.result
        return report


def files_of(
    call: StartUpdate, manifest: dict[str, Any] | None
) -> dict[str, Any] | None:
    """What it takes to read the files of an update again; None if it has none.

    Args:
        call: that began it.
        manifest: its manifest, packed; the `name_map` of it stays so.

    """
    paths = {"path": call.source, "draft_path": call.draft_source}
    if not any(paths.values()):
        return None
    stated = manifest or {"subset": [], "name_map": {}}
    return paths | {name: stated[name] for name in ("subset", "name_map")}
