"""Every error a caller can meet, with its code, its HTTP status and its remedy.

InflightError
 ├─ ConfigError          a configuration value is not allowed   (start-up)
 ├─ UpstreamChanged      the patches do not fit this vLLM       (start-up)
 ├─ Malformed       400  the request cannot be read
 ├─ Unauthorized    401  a needed key is missing
 ├─ Forbidden       403  wrong key, host or file
 ├─ UnknownUpdate   404  no update with that id
 ├─ Conflict        409  the state of the engine does not allow the call
 │   ├─ WrongPhase           the update's phase does not allow the call
 │   ├─ UpdateBusy           another update is under way
 │   ├─ VersionConflict      the caller expected another version
 │   ├─ BaseMismatch         a delta starts from another version
 │   ├─ DeltaUnsupported     a rank cannot apply this delta
 │   ├─ NoTransport          no weight transfer backend is configured
 │   ├─ StagingUnavailable   this engine cannot have shadow weights
 │   │   └─ OutOfDeviceMemory    the device lacks memory for them
 │   ├─ ChangeLogFull        an update changes more than the log has room for
 │   ├─ NothingToRollBack    there is no rollback target
 │   ├─ PauseConflict        a pause forbids the call, or its mode
 │   ├─ EngineAsleep         the weights are asleep or lost
 │   └─ Cancelled            the wait for an update's bytes was cancelled
 ├─ OwnedByAnother  423  another owner has the pause or the update
 ├─ TooManyUpdates  429  more starts than --inflight-begin-rate allows
 ├─ EnginePaused    503  this pause rejects requests
 ├─ WeightsMismatch 422  the weights are incomplete, wrong or not as announced
 ├─ EngineFault     500  a rank failed, without fault of the caller
 │   ├─ ArenaFault           a call of the GPU driver failed
 │   │   └─ ArenaTorn            a flip or a sleep failed and could not be undone
 │   └─ TransferFault        the transfer of an update broke off
 ├─ DeadlineExceeded 504 the update was not committed in time
 └─ EngineUnreachable 504 an engine did not answer     (trainer's side)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

OWN_FACTS = (
    "retry_after_s",
    "missing_bytes",
    "call",
    "driver_code",
    "causes",
    "served",
)
FACTS = "phase", "update_id", *OWN_FACTS
MAX_TENSORS_LISTED, MAX_NAME_CHARS, MAX_MESSAGE_CHARS = 64, 256, 8192
"""Limits of an error that crosses processes; any caller may have chosen its names."""


class Cause(StrEnum):
    """Why a tensor, or a whole version, is rejected."""

    UNKNOWN = "unknown"
    UNUSED = "unused"
    NOT_FINITE = "not_finite"
    SHAPE = "shape"
    DTYPE = "dtype"
    DIGEST = "digest"
    DUPLICATE = "duplicate"
    REFUSED = "refused"
    TIED = "tied"
    UNANNOUNCED = "unannounced"
    SUBSET = "subset"
    MISSING = "missing"
    MODEL = "model"
    RANKS = "ranks"


CAUSES: dict[Cause, tuple[str, str]] = {
    Cause.UNKNOWN: (
        "The model has no tensor of that name.",
        "Send the tensor under the model's name (name_map can translate names), or "
        "leave it out. GET /weight_names lists the names.",
    ),
    Cause.UNUSED: (
        "The model's loader accepted the tensor and wrote no parameter with it.",
        "Send the tensor as a checkpoint of this model has it, or leave it out.",
    ),
    Cause.NOT_FINITE: (
        "The tensor has NaN or Inf, as sent or after the cast to the model's dtype.",
        "Find out where the training made them. allow_nonfinite accepts them.",
    ),
    Cause.SHAPE: (
        "The tensor's shape is not the model's.",
        "Send the whole tensor in the shape that the message states.",
    ),
    Cause.DTYPE: (
        "The model does not accept the tensor's dtype.",
        "Send the tensor in the dtype that the message states.",
    ),
    Cause.DIGEST: (
        "The digest of the received bytes is not the announced one.",
        "Compute the digests of the tensors that you send, and do not change the "
        "tensors while they are sent.",
    ),
    Cause.DUPLICATE: (
        "The tensor was sent twice, or two tensors write the same parameter.",
        "Send each tensor once, under one name.",
    ),
    Cause.REFUSED: (
        "The model's loader rejected the tensor; the message quotes the loader.",
        "Send the tensor as a checkpoint of this model has it.",
    ),
    Cause.TIED: (
        "The output head (lm_head) is tied to the embedding and differs from it.",
        "Leave the head out, or start an engine from a checkpoint with this head.",
    ),
    Cause.UNANNOUNCED: (
        "The tensor is not in the manifest, or differs from its entry there.",
        "List every tensor in the manifest with the name, shape and dtype that you "
        "send.",
    ),
    Cause.SUBSET: (
        "The patterns of the subset do not fit the tensors.",
        "Correct the patterns. Each pattern must match a sent tensor, and each sent "
        "tensor must match a pattern.",
    ),
    Cause.MISSING: (
        "The model needs the tensor, and it was not sent or not announced.",
        "Send the missing tensors too, or declare the sent tensors as a subset.",
    ),
    Cause.MODEL: (
        "The config.json of the weights describes another model than the engine's.",
        "Start an engine from the new checkpoint.",
    ),
    Cause.RANKS: (
        "The ranks or the engines received different bytes.",
        "Send the same bytes to all ranks and engines.",
    ),
}
"""Cause → (what happened, what to do)."""


class InflightError(Exception):
    """Base of all errors of vLLM in-flight.

    Attributes:
        message: what happened, in words.
        remedy: what to do about it.
        tensors: names of the tensors that caused it. An error from another process
            has the first 64 only.
        num_tensors: how many tensors caused it.
        phase: the phase of the update; None if not known.
        update_id: the id of the update; None if not known.

    """

    code: ClassVar[str] = "inflight_error"
    status: ClassVar[int] = 500
    remedy: str = "See the server's log."
    retry_after_s: int | None = None

    def __init__(
        self,
        message: str,
        *,
        tensors: Sequence[str] = (),
        num_tensors: int = 0,
        phase: str | None = None,
        update_id: str | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message)
        assert all(hasattr(type(self), name) for name in facts), facts
        vars(self).update(facts)
        self.message = message
        self.tensors = list(tensors)
        self.num_tensors = max(num_tensors, len(self.tensors))
        self.phase, self.update_id = phase, update_id

    def __str__(self) -> str:
        return self.message  # callers may have extended it

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON data: `code`, `message`, `remedy` and all known facts."""
        message, remedy = self.message[:MAX_MESSAGE_CHARS], self.remedy
        body: dict[str, Any] = {"code": self.code, "message": message, "remedy": remedy}
        if self.tensors:
            named = self.tensors[:MAX_TENSORS_LISTED]
            body["tensors"] = [name[:MAX_NAME_CHARS] for name in named]
            body["num_tensors"] = self.num_tensors
        told = {name: vars(self).get(name) for name in FACTS}
        return body | {name: fact for name, fact in told.items() if fact is not None}

    @staticmethod
    def from_dict(body: dict[str, Any]) -> InflightError:
        """The error of a `to_dict`; an unknown code becomes an `EngineFault`."""
        kind = BY_CODE.get(body.get("code", ""), EngineFault)
        own = (name for name in OWN_FACTS if hasattr(kind, name))
        told = ("remedy", "tensors", "num_tensors", *FACTS[:2], *own)
        facts = {k: body[k] for k in told if k in body}
        return kind(body.get("message", "unknown error"), **facts)


class ConfigError(InflightError, ValueError):
    """A configuration value, an argument, a key or a URL is not allowed."""

    code = "config_error"
    remedy = "Give the field that the message names an allowed value."


class UpstreamChanged(InflightError):
    """The installed vLLM is not the release that the patches are written for."""

    code = "upstream_changed"
    remedy = "Install the vLLM release that the message names."


class Malformed(InflightError):
    """A field of the request is missing, unknown or wrong, or the body is no JSON."""

    code = "malformed"
    status = 400
    remedy = "Correct the field that the message names."


class Unauthorized(InflightError):
    """A control route was called without a key, and needs one."""

    code = "unauthorized"
    status = 401
    remedy = "Send 'Authorization: Bearer KEY': the admin key, or else the API key."


class Forbidden(InflightError):
    """The key is wrong, the caller's host may not call, or the file may not be read."""

    code = "forbidden"
    status = 403
    remedy = (
        "Use the right key, call from the server's host, or use a file in a folder of "
        "--inflight-allowed-paths."
    )


class UnknownUpdate(InflightError):
    """The engine knows no update with that id, neither active nor past."""

    code = "unknown_update"
    status = 404
    remedy = "GET /weight_update lists the known ids."


class Conflict(InflightError):
    """The state of the engine does not allow the call."""

    code = "conflict"
    status = 409
    remedy = "Read the state with GET /weight_update, then make a call that fits it."


class WrongPhase(Conflict):
    """The phase of the update does not allow the call."""

    code = "wrong_phase"
    remedy = "Call start, update, finish in order. After a failure, start a new update."


class UpdateBusy(Conflict):
    """Another update is active; an engine takes one update at a time."""

    code = "update_in_progress"
    remedy = "Wait for the other update, or end it with POST /abort_weight_update."


class VersionConflict(Conflict):
    """The call names another version than the engine has, as in `base_version`."""

    code = "version_conflict"
    remedy = "GET /weight_info returns the live version. Base the update on that one."


class BaseMismatch(Conflict):
    """A delta starts from another version than is served, or the weights are lost.

    `served` is the digest of the live version; None if it is not known.
    """

    code = "base_mismatch"
    remedy = (
        "Send the whole version, or a delta whose base is the digest that "
        "GET /weight_info tells."
    )
    served: str | None = None


class DeltaUnsupported(Conflict):
    """A rank cannot apply a delta to a tensor, because of how it serves it."""

    code = "delta_unsupported"
    remedy = "Send whole versions to this engine."


class NoTransport(Conflict):
    """The engine was started without a weight transfer backend."""

    code = "no_transport"
    remedy = (
        'Start with --weight-transfer-config \'{"backend": "local"}\', or update from '
        "files."
    )


class StagingUnavailable(Conflict):
    """This engine cannot have shadow weights of its model, so it takes no updates."""

    code = "staging_unavailable"
    remedy = (
        "Change the option that the message names. A named layer rules updates out."
    )


class OutOfDeviceMemory(StagingUnavailable):
    """The device lacks `missing_bytes` of memory for the shadow weights."""

    code = "out_of_device_memory"
    remedy = "Lower --gpu-memory-utilization, or start with --inflight-staging host."
    missing_bytes = 0


class ChangeLogFull(Conflict):
    """With delta staging, an update changes more elements than its log has room for.

    `missing_bytes` of the log are missing on one rank.
    """

    code = "change_log_full"
    remedy = (
        "Start the engine with the --inflight-delta-gib that the message names, with a "
        "larger --inflight-delta-host-gib, or with --inflight-staging device or host. "
        "The live weights are unchanged."
    )
    missing_bytes = 0


class NothingToRollBack(Conflict):
    """There is no rollback target: the next update has overwritten it, or none was."""

    code = "nothing_to_roll_back"
    remedy = "Publish the wanted version again."


class PauseConflict(Conflict):
    """A pause forbids the call, or it cannot change to the mode that is asked for."""

    code = "pause_conflict"
    remedy = "End the pause first, or use the mode that the message names."


class EngineAsleep(Conflict):
    """The weights are asleep, or a sleep of level 2 or a failed write has lost them."""

    code = "engine_asleep"
    remedy = (
        'Wake the engine up with tags ["weights"]. Lost weights come back with an '
        "update of all tensors."
    )


class OwnedByAnother(InflightError):
    """The pause or the update belongs to another owner than the caller."""

    code = "owned_by_another"
    status = 423
    remedy = "Wait for that owner, its lease or its deadline, or call without an owner."


class EnginePaused(InflightError):
    """The engine is paused and configured to reject requests during a pause."""

    code = "engine_paused"
    status = 503
    remedy = "Send the request again after the seconds in Retry-After."
    retry_after_s = 1


class TooManyUpdates(InflightError):
    """This caller has started more updates than `--inflight-begin-rate` allows."""

    code = "too_many_updates"
    status = 429
    remedy = "Start the update again after the seconds in Retry-After."


class WeightsMismatch(InflightError):
    """The tensors are not a complete and valid version of this model."""

    code = "weights_mismatch"
    status = 422
    remedy = "Correct the tensors that the message names, and send the version again."
    causes: Mapping[str, int] = {}
    """Cause → number of its tensors."""
    named: Mapping[str, Sequence[str]] = {}
    """Cause → names of its tensors; empty in an error from another process."""

    def __init__(self, message: str, **facts: Any) -> None:
        named = facts.get("named", {})
        if named and "tensors" not in facts:
            facts["tensors"] = [name for names in named.values() for name in names]
        super().__init__(message, **facts)
        if named:
            self.causes = {cause: len(names) for cause, names in named.items()}
        known = [cause for cause in Cause if cause in self.causes]
        if known and "remedy" not in facts:
            told = (CAUSES[cause][1] for cause in known)
            if len(known) > 1:
                words = (cause.replace("_", " ") for cause in known)
                told = (f"{word}: {say}" for word, say in zip(words, told, strict=True))
            self.remedy = " ".join(told)


class EngineFault(InflightError):
    """A rank failed, and not because of the caller."""

    code = "engine_fault"
    remedy = "Read the server's log. The live weights are unchanged."


class ArenaFault(EngineFault):
    """A GPU driver call failed: `call` names it, `driver_code` is its result."""

    code = "arena_fault"
    call = ""
    driver_code = 0


class ArenaTorn(ArenaFault):
    """A flip or a sleep failed halfway, and could not be undone."""

    code = "arena_torn"
    remedy = "Restart the engine. Its weights belong to no version."


class TransferFault(EngineFault):
    """The transfer broke off: the peer died, stalled, left or never connected."""

    code = "transfer_fault"
    remedy = "Initialise the transfer again. The live weights are unchanged."


class Cancelled(Conflict):
    """The update, or the call that waited for it, was cancelled."""

    code = "cancelled"
    remedy = "Initialise the transfer again before the next update."


class DeadlineExceeded(InflightError):
    """The update was not committed before its deadline, and was aborted."""

    code = "deadline_exceeded"
    status = 504
    remedy = "Set a larger deadline_s, or find out why the transfer is slow."


class EngineUnreachable(InflightError):
    """An engine did not answer the trainer within the trainer's timeout."""

    code = "engine_unreachable"
    status = 504
    remedy = "Check that the engine runs. GET /weight_info returns its live version."


def _leaves(kind: type[InflightError]) -> list[type[InflightError]]:
    return [kind, *(leaf for sub in kind.__subclasses__() for leaf in _leaves(sub))]


BY_CODE: dict[str, type[InflightError]] = {k.code: k for k in _leaves(InflightError)}
