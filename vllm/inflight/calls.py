"""Control calls, from an API process to its engine cores, each declared once.

`Control` in api/control/control.py and the routes make them. `Controller.handle` in
engine/controller.py has one case for each. Between processes a call travels as its name
and its fields. A field holds what the caller gave; the handler checks it.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_args

from vllm.inflight.errors import Malformed


# --------------------------------------------------------------- updates
@dataclass(frozen=True, slots=True)
class MayStart:
    """Raise `UpdateBusy` if an update cannot start now."""

    name: ClassVar = "may_start"
    update_id: str | None = None
    """The update that would start."""


@dataclass(frozen=True, slots=True)
class WasStarted:
    """Whether a start with this id and fingerprint would be a repetition."""

    name: ClassVar = "was_started"
    update_id: str
    fingerprint: str
    """Hash of `StartUpdate.said`."""


@dataclass(frozen=True, slots=True)
class StartUpdate:
    """Open an update."""

    name: ClassVar = "start"
    update_id: str | None = None
    """None: the engine chooses one."""
    weight_version: str | None = None
    base_version: str | None = None
    """The label that the live version must have; None: any."""
    manifest: dict[str, Any] | None = None
    """As a trainer sends it, or as `Manifest.packed` makes it."""
    deadline_s: float | None = None
    """Seconds until the update is aborted; None: `--inflight-update-deadline-s`."""
    allow_nonfinite: bool | None = None
    """Whether NaN and Inf are accepted; None: no."""
    owner: str | None = None
    transport: str = "configured"
    """`configured`, or one of `messages.TRANSPORTS`."""
    source: str | None = None
    """Folder that all tensors of the model are read from; None: another source."""
    draft_source: str | None = None
    """Folder that all tensors of the drafter are read from."""
    fingerprint: str | None = None
    """Hash of `said`; None: the engine computes it."""

    def said(self) -> dict[str, Any]:
        """The fields that were given; two starts with equal ones are one update."""
        given = {k: v for k, v in call_to_dict(self).items() if v is not None}
        given.pop("fingerprint", None)
        return given


@dataclass(frozen=True, slots=True)
class ReceiveChunk:
    """Receive one chunk of an update; the reply comes when every rank has it."""

    name: ClassVar = "receive"
    update_info: object = None
    """What the transport's `parse_update_info` takes, or a list of it, one per worker;
    it may be packed."""
    update_id: str | None = None
    """None: the update under way."""
    chunk: int | None = None
    """Its number, from 0; a chunk with a number is received once."""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class PrepareUpdate:
    """Verify what was received: the first phase of the commit."""

    name: ClassVar = "prepare"
    update_id: str | None = None
    """None: the update under way."""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class CommitUpdate:
    """Switch to the staged version between two steps."""

    name: ClassVar = "commit"
    update_id: str | None = None
    """None: the update under way."""
    weight_version: str | None = None
    """Label of the version, if the start gave none."""
    mode: str | None = None
    """What happens to running requests, see `PauseMode`; None: the usual mode."""
    flush_cache: bool | None = None
    """Whether to drop the caches; None: no."""
    expect_version: str | None = None
    """The label that the live version must have; None: any."""
    expect_digest: str | None = None
    """The digest that the staged version must have; None: any."""


@dataclass(frozen=True, slots=True)
class AdvanceUpdate:
    """Make several calls of one update, none of which waits for the one before.

    The reply is that of the last call. If a call is rejected, those after it are not
    made. If the update fails later, the last call gets the error.
    """

    name: ClassVar = "advance"
    calls: list[Any]
    """The name and the fields of each call."""


@dataclass(frozen=True, slots=True)
class AbortUpdate:
    """Abort an update, a rollback that waits, or a reload that others have begun."""

    name: ClassVar = "abort"
    update_id: str | None = None
    """None: the update under way."""
    owner: str | None = None
    error: dict[str, Any] | None = None
    """Why it is aborted, as `InflightError.to_dict` gives it; None: a caller asked."""
    fingerprint: str | None = None
    """Abort the update only if a start with this hash of `said` has opened it."""


@dataclass(frozen=True, slots=True)
class ReadUpdates:
    """Where an update stands, or all known updates."""

    name: ClassVar = "status"
    update_id: str | None = None
    """None: all known updates."""


# -------------------------------------------------------------- versions
@dataclass(frozen=True, slots=True)
class ReadVersion:
    """The live version, and the rollback target."""

    name: ClassVar = "info"


@dataclass(frozen=True, slots=True)
class RenameVersion:
    """Give the live weights another label: a version without bytes."""

    name: ClassVar = "rename"
    weight_version: str | None = None
    expect_version: str | None = None
    """The label that the live version must have; None: any."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """Flip back to the rollback target."""

    name: ClassVar = "rollback"
    to_version: str | None = None
    """The label that the rollback target must have; None: any."""
    mode: str | None = None
    """What happens to running requests, see `PauseMode`; None: the usual mode."""
    rollback_id: str | None = None
    """Id by which `UndoSwitch` names this rollback."""


@dataclass(frozen=True, slots=True)
class ReadRollbackTarget:
    """What a rollback would return to."""

    name: ClassVar = "held"


@dataclass(frozen=True, slots=True)
class UndoSwitch:
    """Take back a commit or a rollback that other engines could not make."""

    name: ClassVar = "undo"
    update_id: str | None = None
    """The update that was committed."""
    rollback_id: str | None = None
    """The rollback; None: a commit is taken back."""


@dataclass(frozen=True, slots=True)
class VerifyWeights:
    """Compare the live weights with the digest of their label."""

    name: ClassVar = "verify"


@dataclass(frozen=True, slots=True)
class ReadJournal:
    """What the journal says of the time before the start."""

    name: ClassVar = "journal"
    tried: bool = False
    """Whether that version has been restored by now, or could not be."""


# ------------------------------------------------------------ transports
@dataclass(frozen=True, slots=True)
class InitTransport:
    """Connect the configured transport to its trainer."""

    name: ClassVar = "init_transport"
    init_info: object = None
    """What the transport's `parse_init_info` takes."""


@dataclass(frozen=True, slots=True)
class ShutdownTransport:
    """Disconnect the configured transport."""

    name: ClassVar = "shutdown_transport"


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Join a group that a trainer opens with torch alone."""

    name: ClassVar = "join_group"
    init_info: object = None


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Leave such a group."""

    name: ClassVar = "leave_group"
    group_name: str


@dataclass(frozen=True, slots=True)
class CompareTensors:
    """Receive tensors that fill no parameter, and compare them with the live ones."""

    name: ClassVar = "compare"
    transport: str
    update_info: object


@dataclass(frozen=True, slots=True)
class MissBroadcast:
    """Leave a group whose trainer broadcasts what was rejected."""

    name: ClassVar = "miss"
    group_name: str
    announcement: str
    age_s: float
    """Seconds since the rejected call began."""


# ---------------------------------------------------------------- pauses
@dataclass(frozen=True, slots=True)
class PauseDecoding:
    """Stop decoding between two steps, or renew the lease on that."""

    name: ClassVar = "pause"
    mode: str | None = None
    """What happens to running requests, see `PauseMode`; None: `abort`."""
    flush_cache: bool | None = None
    """Whether to drop the caches; None: no."""
    lease_s: float | None = None
    """Seconds until the pause ends; 0: never; None: `--inflight-pause-lease-s`."""
    owner: str | None = None
    is_trial: bool = False
    """Whether the engine only says if it would reject this pause."""


@dataclass(frozen=True, slots=True)
class ResumeDecoding:
    """End a pause."""

    name: ClassVar = "resume"
    owner: str | None = None
    """The owner of the pause; None ends the pause of any owner."""


@dataclass(frozen=True, slots=True)
class ReadPause:
    """Whether decoding is paused, and in which mode."""

    name: ClassVar = "paused"


# --------------------------------------------------- requests and caches
@dataclass(frozen=True, slots=True)
class CountRequests:
    """How many requests run and wait."""

    name: ClassVar = "requests"


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End requests now, with the tokens that they have."""

    name: ClassVar = "abort_requests"
    ids: list[str] | None = None
    """As their users know them; None: all requests."""


@dataclass(frozen=True, slots=True)
class FlushCaches:
    """Drop the caches; rejected while requests hold KV."""

    name: ClassVar = "flush"


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Release the memory of weights or KV cache, until it is woken up."""

    name: ClassVar = "release"
    tags: list[str]
    """`weights`, `kv_cache`."""
    mode: str | None = None
    """What happens to requests: `abort`, `retract` or `in_place`; None: the mode of a
    pause `in_place` or `retract`, else `abort`."""
    is_trial: bool = False
    """Whether the engine only says if it would reject this release."""
    release_id: str | None = None
    """Id by which `UndoRelease` names this release."""


@dataclass(frozen=True, slots=True)
class UndoRelease:
    """Wake up memory that was released, because another engine failed to release."""

    name: ClassVar = "undo_release"
    release_id: str | None = None


# ----------------------------------------------------- weights and state
@dataclass(frozen=True, slots=True)
class ReadChecksums:
    """Digests of every parameter of every rank."""

    name: ClassVar = "checksums"
    skip: list[str] | None = None
    """Parts of the names that are left out."""
    is_target: bool = False
    """Whether the drafter is left out."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The first rows of one tensor."""

    name: ClassVar = "rows"
    tensor: str | None = None
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class ReadNames:
    """Every tensor that an update may contain."""

    name: ClassVar = "names"


@dataclass(frozen=True, slots=True)
class FindUnused:
    """Which of these tensors fill no parameter of any rank."""

    name: ClassVar = "unused"
    names: list[str] | None = None
    """As a checkpoint has them."""


@dataclass(frozen=True, slots=True)
class ReadSource:
    """The path that the live version was read from."""

    name: ClassVar = "source"


@dataclass(frozen=True, slots=True)
class ReadStaging:
    """Bytes of the shadow weights, or why there are none."""

    name: ClassVar = "staging"


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """All that `/metrics` says of an engine."""

    name: ClassVar = "metrics"


@dataclass(frozen=True, slots=True)
class ReadHealth:
    """Why nothing is decoded with the weights, if so."""

    name: ClassVar = "health"


TransportCall = (
    InitTransport | ShutdownTransport | JoinGroup | LeaveGroup | CompareTensors
)

Call = (
    TransportCall
    | MayStart
    | WasStarted
    | StartUpdate
    | ReceiveChunk
    | PrepareUpdate
    | CommitUpdate
    | AdvanceUpdate
    | AbortUpdate
    | ReadUpdates
    | ReadVersion
    | RenameVersion
    | RollBack
    | ReadRollbackTarget
    | UndoSwitch
    | VerifyWeights
    | ReadJournal
    | MissBroadcast
    | PauseDecoding
    | ResumeDecoding
    | ReadPause
    | CountRequests
    | AbortRequests
    | FlushCaches
    | ReleaseMemory
    | UndoRelease
    | ReadChecksums
    | ReadRows
    | ReadNames
    | FindUnused
    | ReadSource
    | ReadStaging
    | ReadMetrics
    | ReadHealth
)

CALLS: dict[str, type[Call]] = {kind.name: kind for kind in get_args(Call)}
"""Name → class of each control call."""


def call_to_dict(call: Call) -> dict[str, Any]:
    """The fields of a call as plain data, not copied."""
    return {field.name: getattr(call, field.name) for field in fields(call)}


def call_from_dict(name: str, values: dict[str, Any]) -> Call:
    """The call of that name with these fields; a field may be left out.

    Raises:
        Malformed: no call has that name, it has no such field, or it needs another one.

    """
    if (kind := CALLS.get(name)) is None:
        raise Malformed(f"no control call named {name!r}")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    for field in values:
        if field not in known:
            raise Malformed(
                f"the control call {name!r} has no field {field!r}; it takes "
                + (", ".join(known) or "none")
            )
    for field, is_needed in known.items():
        if is_needed and field not in values:
            raise Malformed(f"the control call {name!r} needs the field {field!r}")
    return kind(**values)
