"""One update of an engine: its request, its owner, its progress and its outcome."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.inflight.calls import StartUpdate
from vllm.inflight.errors import InflightError, WeightsMismatch
from vllm.inflight.update import ACTIVE, Phase

SPENT = "wire", "cpu"
"""Parts of the staging time: waiting for the transport, and work of the thread."""


@dataclass(slots=True)
class Update:
    """One update of one engine."""

    update_id: str
    serial: int
    """The number by which the ranks know the update."""
    fingerprint: str
    """The hash of the request that started it, to recognise a repeated call."""
    label: str | None
    step: int | None
    deadline: float
    """Seconds on the monotonic clock."""
    phase: Phase = Phase.OPEN
    began: float = field(default_factory=time.monotonic)
    staged: float | None = None
    ended: float | None = None
    moved: float = field(default_factory=time.monotonic)
    """When a rank, its trainer or its phase last made progress."""
    num_commands: int = 0
    num_chunks: int = 0
    is_preparing: bool = False
    may_lack: str | None = None
    """The framework whose versions may leave out tensors, see `KnownCall.may_lack`."""
    may_be_first: bool = False
    """Whether it may decide which tensors these are, if no version has before."""
    digest: str | None = None
    """The digest of the staged version, once all ranks agree; None if unknown."""
    sent: str | None = None
    """The digest of the tensors that every rank has received."""
    is_whole: bool = True
    """Whether it has all tensors of the model, not a subset or only the drafter."""
    base: str = ""
    """The lineage of the live version at its start; see `WeightSet.lineage`."""
    num_bytes: int = 0
    """Bytes staged on all ranks together."""
    num_replayed: int = 0
    """Tensors that ranks load by a replay plan; see worker/replay_plan.py."""
    spent: dict[str, float] = field(default_factory=dict)
    """For each of `SPENT`, the seconds of the slowest rank."""
    drift: dict[str, Any] | None = None
    """The drift of its weights from the live weights; see worker/verify/drift.py."""
    error: InflightError | None = None
    is_told: bool = False
    """Whether a caller has got that error."""
    source: str | None = None
    """The path of its files, if it has all tensors and comes from files."""
    files: dict[str, Any] | None = None
    """What is needed to load the same files again, if it comes from files."""
    owner: str | None = None
    """Its owner. A call that names another owner may not receive, finish or abort."""
    took_target: bool = False
    """Whether it has taken the memory of the rollback target."""
    is_held: bool = False
    """Whether its commit is happening now."""
    pending: Future[dict[str, Any]] | None = None
    """The Future of its commit, while that waits for running requests."""
    result: dict[str, Any] | None = None
    """The reply of its commit, for repeated calls."""

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
        """Seconds since the last progress; 0 once the update has ended."""
        return round(time.monotonic() - self.moved, 3) if self.is_active else 0.0

    def state(self) -> dict[str, Any]:
        """`update_id` and `phase`, which every reply about an update has."""
        return {"update_id": self.update_id, "phase": self.phase.value}

    def vote(self) -> dict[str, Any]:
        """`state`, and the `STAGED_FACTS`: equal on engines that may commit together.

        A digest identifies the result. Without a digest, the result depends on the sent
        tensors and on the live weights below them.
        """
        base = self.base if self.digest is None else None
        facts = {"digest": self.digest, "sent": self.sent, "base": base}
        return self.state() | facts

    def expect(self, digest: object) -> None:
        """Raise `WeightsMismatch` unless `digest` is None or the staged digest."""
        if digest is not None and digest != self.digest:
            raise WeightsMismatch(
                f"expect_digest is {digest!r:.80}, the staged version has "
                f"{self.digest!r}",
                update_id=self.update_id,
                remedy="Publish the weights with that digest, or expect this one.",
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
        if self.took_target and self.phase is Phase.ABORTED:
            report["rollback_target"] = "lost"
        if self.error is not None:
            report["error"] = self.error.to_dict()
        if self.result is not None:
            report["result"] = self.result
        return report


def files_of(
    call: StartUpdate, manifest: dict[str, Any] | None
) -> dict[str, Any] | None:
    """What is needed to load the files of an update again; None if it has no files.

    Args:
        call: that started it.
        manifest: its packed manifest; the result keeps its `name_map` packed.

    """
    paths = {"path": call.source, "draft_path": call.draft_source}
    if not any(paths.values()):
        return None
    if manifest is not None and manifest["base"] is not None:
        return None  # a delta says nothing without its base
    stated = manifest or {"subset": [], "name_map": {}}
    return paths | {name: stated[name] for name in ("subset", "name_map")}
