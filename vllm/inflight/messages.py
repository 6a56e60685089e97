"""Messages between an engine core and its ranks, each declared once.

| message | from → to | travels as |
|---|---|---|
| a command, as `Start` | engine core → staging thread | a non-blocking RPC |
| `Status` | staging thread → engine core | an entry on the status board |

Both travel as plain data, whose keys are declared here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

State = Literal["", "open", "staging", "staged", "failed"]

FlipTo = Literal["next", "before", "undo"]
"""What a flip serves: the version that is staged; the rollback target, although an
aborted update may be staged; or the version that was served before the last flip, as if
there had been none."""

NOT_REPORTED = frozenset({"unfilled", "drift", "opened", "shares", "written"})
"""Keys of a status that the engine core reads and no report contains."""

STAGED_KEYS = frozenset({"digest", "drift"})
"""Keys that a staged rank always posts, with None for a value that is not known."""


TRANSPORTS = "groups", "local", "exported", "checkpoint_engine", "extension"
"""The transports that every worker has, besides the configured one: groups that a
trainer opens with torch, files, GPU memory that a trainer has exported, the buffers of
a checkpoint-engine, and the worker's own extension. The attributes of a `StagingWorker`
have the same names."""


@dataclass(frozen=True, slots=True)
class Status:
    """What one rank posts about one update; `Status()` before its first post."""

    serial: int = 0
    """Number of the update, see `Update.serial`; 0 before the first post."""
    state: State = ""
    orders: int = 0
    """Commands of this update that the rank has carried out."""
    bytes: int = 0
    """Bytes received."""
    tensors: int = 0
    """Tensors received."""
    opened: bool = False
    """Whether the rank has begun to write over the rollback target."""
    parameters: dict[str, int] | None = None
    """Number of parameters: `total`, `begun` and `complete`."""
    carried: int | None = None
    """Tensors that were copied from the live weights, since none was sent."""
    sent: str | None = None
    """Digest of the tensors that the rank was sent."""
    digest: str | None = None
    """Digest of the whole version that the rank has staged; None: not known."""
    written: str | None = None
    """Digest of the parameters that a method of a worker extension has written itself,
    which are this rank's own; None if there are none."""
    shares: list[int] | None = None
    """Of a delta: what the rank's parts of cut tensors add to their digests, what the
    shares of all ranks have to add up to, and what was found of parts that several
    ranks hold; see worker/delta/shares.py."""
    drift: dict[str, Any] | None = None
    """Distance from the live weights, see worker/verify/drift.py; None: not known."""
    unfilled: list[str] | None = None
    """Names of tensors that filled no parameter of this rank; None: not told."""
    replayed: int | None = None
    """Tensors that are loaded by the replay plan."""
    unproved: int | None = None
    """Tensors that the plan has, and that wait for the replay check."""
    in_place: int | None = None
    """Tensors that were received straight into shadow parameters."""
    error: dict[str, Any] | None = None
    """Why the update failed on this rank, as `InflightError.to_dict` gives it."""
    named: dict[str, list[str]] | None = None
    """Cause → all tensors rejected for it; None: they do not fit the board."""
    window: int | None = None
    """Buckets of the transport."""
    window_bytes: int | None = None
    """Bytes of these buckets."""
    bucket_wait_ms: float | None = None
    """Milliseconds that the rank waited for full buckets."""
    wire_s: float | None = None
    """Seconds that the rank waited for the transport."""
    cpu_s: float | None = None
    """Processor seconds of the staging thread."""
    held_by: str | None = None
    """The thread for which the rank waits, and where it is: that of an aborted update,
    or one of a method of a worker extension that still loads."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Status:
        """The status that `data` says; keys of another release are ignored."""
        return cls(**{key: data[key] for key in _STATUS_KEYS if key in data})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the status board."""
        always = STAGED_KEYS if self.state == "staged" else frozenset()
        values = {key: getattr(self, key) for key in _STATUS_KEYS}
        return {k: v for k, v in values.items() if v is not None or k in always}

    def report(self) -> dict[str, Any]:
        """What `GET /weight_update` says about this rank."""
        return {k: v for k, v in self.to_dict().items() if k not in NOT_REPORTED}

    def spent_s(self, part: str) -> float | None:
        """Seconds of `wire` or `cpu`; None if the rank has not told them."""
        seconds: float | None = getattr(self, f"{part}_s")
        return seconds


_STATUS_KEYS = tuple(field.name for field in fields(Status))


@dataclass(frozen=True, slots=True)
class Start:
    """Start an update: choose the transport, prepare the shadow weights."""

    name: ClassVar = "start"
    is_last: ClassVar = False
    manifest: dict[str, Any] | None
    """As `Manifest.packed` makes it."""
    transport: str
    """`configured`, or one of `TRANSPORTS`."""
    allow_nonfinite: bool
    deadline_s: float
    """Seconds from now until the update is aborted."""
    are_lost: bool = False
    """Whether the live weights are lost, so that nothing decodes with them."""
    path: str | None = None
    """Folder that all tensors of the model are read from; None: another source."""
    draft_path: str | None = None
    """Folder that all tensors of the drafter are read from."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive one chunk of the update."""

    name: ClassVar = "receive"
    is_last: ClassVar = False
    update_info: Any
    """What the transport's `parse_update_info` takes, or a list of it, one per worker;
    it may be packed."""


@dataclass(frozen=True, slots=True)
class CallExtension:
    """Call a method of the worker's extension on the shadow weights."""

    name: ClassVar = "call_extension"
    is_last: ClassVar = False
    number: int
    """The number of the call within the update, from 0."""
    method: str | None
    """None: `load_weights` of the model."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Verify what was received, and post a digest: the first phase of the commit."""

    name: ClassVar = "prepare"
    is_last: ClassVar = True
    may_lack: str | None = None
    """The framework whose versions may leave out tensors, see `KnownCall.may_lack`;
    None: no tensor may be missing."""
    may_be_first: bool = False
    """Whether the version may decide which tensors these are, if none has before."""


@dataclass(frozen=True, slots=True)
class Init:
    """Connect the configured transport to its trainer."""

    name: ClassVar = "init"
    is_last: ClassVar = True
    init_info: Any


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Disconnect the configured transport."""

    name: ClassVar = "shutdown"
    is_last: ClassVar = True


@dataclass(frozen=True, slots=True)
class Join:
    """Join a group that a trainer opens with torch alone."""

    name: ClassVar = "join"
    is_last: ClassVar = True
    init_info: Any


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave such a group."""

    name: ClassVar = "leave"
    is_last: ClassVar = True
    group_name: Any


@dataclass(frozen=True, slots=True)
class Compare:
    """Receive tensors that fill no parameter, and compare them with the live ones."""

    name: ClassVar = "compare"
    is_last: ClassVar = True
    transport: str
    update_info: Any


@dataclass(frozen=True, slots=True)
class Miss:
    """Leave a group whose trainer broadcasts an update that was rejected.

    The command belongs to no update.
    """

    name: ClassVar = "miss"
    is_last: ClassVar = False
    group_name: str
    announcement: str
    age_s: float
    """Seconds since the rejection."""


Command = (
    Start
    | Receive
    | CallExtension
    | Prepare
    | Init
    | Shutdown
    | Join
    | Leave
    | Compare
    | Miss
)

COMMANDS: dict[str, type[Command]] = {kind.name: kind for kind in get_args(Command)}
"""Name → class of each command."""


def command_to_dict(command: Command) -> dict[str, Any]:
    """The fields of a command as plain data, not copied."""
    return {field.name: getattr(command, field.name) for field in fields(command)}


def command_from_dict(name: str, values: dict[str, Any]) -> Command:
    """The command that `command_to_dict` has made `values` of."""
    return COMMANDS[name](**values)
