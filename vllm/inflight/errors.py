"""Every error a caller can meet, with its code, its HTTP status and its remedy.

InflightError
 ├─ ConfigError          a knob has a value it cannot have      (start-up)
 ├─ UpstreamChanged      this vLLM is not the one we patch      (start-up)
 ├─ Malformed       400  the request cannot be read
 ├─ Unauthorized    401  no key where one is needed
 ├─ Forbidden       403  wrong key, host or file
 ├─ UnknownUpdate   404  no update with that id
 ├─ Conflict        409  the engine is not in a state for this call
 │   ├─ WrongPhase           the update is in another phase
 │   ├─ UpdateBusy           another update is under way
 │   ├─ VersionConflict      not the version the caller expected
 │   ├─ NoTransport          no weight transfer configured
 │   ├─ StagingUnavailable   this model's weights cannot be staged
 │   │   └─ OutOfDeviceMemory    the device lacks memory for a second set
 │   ├─ NothingToRollBack    no earlier version is held
 │   ├─ PauseConflict        a pause forbids it, or needs another mode
 │   ├─ EngineAsleep         the memory it needs has been given back
 │   └─ Cancelled            it was given up while it was waited for
 ├─ OwnedByAnother  423  the pause or the update is somebody else's
 ├─ TooManyUpdates  429  begun more often than --inflight-begin-rate
 ├─ EnginePaused    503  requests are refused during this pause
 ├─ WeightsMismatch 422  the weights are incomplete or not as announced
 ├─ EngineFault     500  a rank failed where none may
 │   ├─ ArenaFault           a call of the GPU's driver failed
 │   │   └─ ArenaTorn            a flip or a sleep failed and could not be undone
 │   └─ TransferFault        the bytes of an update stopped coming
 ├─ DeadlineExceeded 504 the update took longer than it was given
 └─ EngineUnreachable 504 no answer from an engine     (trainer's side)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

OWN_FACTS = "retry_after_s", "missing_bytes", "call", "driver_code", "causes"
FACTS = "phase", "update_id", *OWN_FACTS
MAX_TENSORS_LISTED, MAX_NAME_CHARS, MAX_MESSAGE_CHARS = 64, 256, 8192
"""Of an error that crosses processes: what it names may come from anybody."""


class Cause(StrEnum):
    """Why a tensor, or a whole version, cannot be accepted."""

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
        "Send it under the model's name, which name_map can do, or leave it out; "
        "GET /weight_names lists the names.",
    ),
    Cause.UNUSED: (
        "The model's loader took the tensor and filled no parameter with it.",
        "Send it in the form that a checkpoint of this model has, or leave it out.",
    ),
    Cause.NOT_FINITE: (
        "Values are NaN or Inf, as they came or in the dtype they are served in.",
        "Find out where the training made them; allow_nonfinite serves them all the "
        "same.",
    ),
    Cause.SHAPE: (
        "The tensor has another shape than the model's.",
        "Send the whole tensor in the shape that the message states.",
    ),
    Cause.DTYPE: (
        "The tensor has a dtype that the model cannot take.",
        "Send the tensor in the dtype that the message states.",
    ),
    Cause.DIGEST: (
        "The bytes that arrived are not those that were announced.",
        "Announce the digests of what is sent, and change nothing while it is sent.",
    ),
    Cause.DUPLICATE: (
        "The tensor, or what it fills, came twice.",
        "Send each tensor once, under one name.",
    ),
    Cause.REFUSED: (
        "The model's loader refused the tensor; the message quotes it.",
        "Send the tensor as a checkpoint of this model has it.",
    ),
    Cause.TIED: (
        "The head differs from the embedding that it is tied to.",
        "Leave the head out, or start an engine from a checkpoint with this head.",
    ),
    Cause.UNANNOUNCED: (
        "The manifest does not announce the tensor, or announces another.",
        "Announce every tensor as it is sent.",
    ),
    Cause.SUBSET: (
        "The patterns of the subset and the tensors do not fit each other.",
        "Correct the patterns: each has to match a tensor that is sent, and every "
        "tensor that is sent has to match one.",
    ),
    Cause.MISSING: (
        "The tensor did not come, or is not announced.",
        "Send the missing tensors too, or declare what is sent as a subset.",
    ),
    Cause.MODEL: (
        "The weights are of a model that is configured in another way.",
        "Start an engine on the new checkpoint.",
    ),
    Cause.RANKS: (
        "The ranks or engines did not receive the same.",
        "Send all ranks and engines the same bytes.",
    ),
}
"""Of each cause: what happened, and what to do."""


class InflightError(Exception):
    """Base of all errors of vLLM in-flight.

    Attributes:
        message: what happened, in words.
        remedy: what to do about it.
        tensors: names of the tensors it is about; of an error that crossed processes
            the first ones.
        num_tensors: how many tensors it is about.
        phase: of the update; None if that is not known.
        update_id: of the update; None if that is not known.

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
        **facts: Any,
    ) -> None:
        super().__init__(message)
        assert all(hasattr(type(self), name) for name in facts), facts
        vars(self).update(facts)
        self.message = message
        self.tensors = list(tensors)
        self.num_tensors = max(num_tensors, len(self.tensors))
        self.phase, self.update_id = phase, update_id

    def __str__(self) -> str:
        return self.message  # which others add to on its way

    def to_dict(self) -> dict[str, Any]:
        """Plain data: `code`, `message`, `remedy` and the facts that are known."""
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
        """The error that `to_dict` described; an unknown code stays readable."""
        kind = BY_CODE.get(body.get("code", ""), EngineFault)
        own = (name for name in OWN_FACTS if hasattr(kind, name))
        told = ("remedy", "tensors", "num_tensors", *FACTS[:2], *own)
        facts = {k: body[k] for k in told if k in body}
        return kind(body.get("message", "unknown error"), **facts)


class ConfigError(InflightError, ValueError):
    """A knob has a value outside its range."""

    code = "config_error"
    remedy = "Give the named field a value in the range the message states."


class UpstreamChanged(InflightError):
    """The vLLM found here is not the one these patches were written for."""

    code = "upstream_changed"
    remedy = "Install the vLLM release that the message names."


class Malformed(InflightError):
    """The request's body cannot be read."""

    code = "malformed"
    status = 400
    remedy = "Correct the field that the message names."


class Unauthorized(InflightError):
    """A control route was called without a key."""

    code = "unauthorized"
    status = 401
    remedy = "Send 'Authorization: Bearer <admin key, or API key if none is set>'."


class Forbidden(InflightError):
    """A wrong key, another host, or a file that updates may not read."""

    code = "forbidden"
    status = 403
    remedy = "Use the right key, this host, or a folder of --inflight-allowed-paths."


class UnknownUpdate(InflightError):
    """No update with that id is under way or remembered."""

    code = "unknown_update"
    status = 404
    remedy = "GET /weight_update lists the ids that are known."


class Conflict(InflightError):
    """The engine is not in a state in which this call makes sense."""

    code = "conflict"
    status = 409
    remedy = "GET /weight_update tells the state; call again from there."


class WrongPhase(Conflict):
    """The update is in a phase from which this call cannot go on."""

    code = "wrong_phase"
    remedy = "Follow start, update, finish; after a failure start a new update."


class UpdateBusy(Conflict):
    """Another update is under way; there is one at a time."""

    code = "update_in_progress"
    remedy = "Wait for it, or abort it with POST /abort_weight_update."


class VersionConflict(Conflict):
    """The engine does not serve, or is not asked to serve, the version named."""

    code = "version_conflict"
    remedy = "GET /weight_info tells what is served; rebase on that."


class NoTransport(Conflict):
    """No weight transfer backend was configured for this engine."""

    code = "no_transport"
    remedy = (
        'Start with --weight-transfer-config \'{"backend": "local"}\', or use files.'
    )


class StagingUnavailable(Conflict):
    """This engine cannot hold a second set of this model's weights."""

    code = "staging_unavailable"
    remedy = "The message names the layer or option in the way."


class OutOfDeviceMemory(StagingUnavailable):
    """The device lacks `missing_bytes` for a second set of weights."""

    code = "out_of_device_memory"
    remedy = "Lower --gpu-memory-utilization, or stage in host memory."
    missing_bytes = 0


class NothingToRollBack(Conflict):
    """The version served before is not held any more, or there was none."""

    code = "nothing_to_roll_back"
    remedy = "Publish the wanted version again."


class PauseConflict(Conflict):
    """The pause that is in force, or the one asked for, forbids this."""

    code = "pause_conflict"
    remedy = "Continue first, or use the mode that the message names."


class EngineAsleep(Conflict):
    """The weights are asleep, or lost to a sleep of level 2 or a write that failed."""

    code = "engine_asleep"
    remedy = 'Wake up with tags ["weights"]; where they are lost, publish whole ones.'


class OwnedByAnother(InflightError):
    """The pause or the update is another owner's than the one that asks."""

    code = "owned_by_another"
    status = 423
    remedy = "Wait for that owner, its lease or deadline, or call without an owner."


class EnginePaused(InflightError):
    """The engine is paused, and is configured to take no requests meanwhile."""

    code = "engine_paused"
    status = 503
    remedy = "Send the request again after the seconds that Retry-After names."
    retry_after_s = 1


class TooManyUpdates(InflightError):
    """This caller has begun as many updates as it may for now."""

    code = "too_many_updates"
    status = 429
    remedy = "Begin it again after the seconds that Retry-After names."


class WeightsMismatch(InflightError):
    """What arrived is not a complete, well-formed version of this model."""

    code = "weights_mismatch"
    status = 422
    remedy = "Correct what the message says of each tensor, and send the version again."
    causes: Mapping[str, int] = {}
    """Cause → how many tensors have it."""
    named: Mapping[str, Sequence[str]] = {}
    """Cause → all tensors that have it; known where the error was made."""

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
    """A rank failed in a way that is not the caller's doing."""

    code = "engine_fault"
    remedy = "See the server's log; the weights served are unchanged."


class ArenaFault(EngineFault):
    """A call of the driver failed; `call` and `driver_code` tell which and how."""

    code = "arena_fault"
    call = ""
    driver_code = 0


class ArenaTorn(ArenaFault):
    """A flip or a sleep failed, and undoing it: the weights are of no version."""

    code = "arena_torn"
    remedy = "Restart the engine; what it would decode now means nothing."


class TransferFault(EngineFault):
    """The bytes stopped coming: a peer died, stalled, left or was never there."""

    code = "transfer_fault"
    remedy = "Connect again as at first; the weights served are unchanged."


class Cancelled(Conflict):
    """Whoever waited for the bytes of an update does not want them any more."""

    code = "cancelled"
    remedy = "Connect again as at first before the next update over a wire."


class DeadlineExceeded(InflightError):
    """The update was not committed within its deadline and was aborted."""

    code = "deadline_exceeded"
    status = 504
    remedy = "Give a larger deadline_s, or find out why the transfer is slow."


class EngineUnreachable(InflightError):
    """An engine did not answer for as long as the trainer was told to try."""

    code = "engine_unreachable"
    status = 504
    remedy = "See whether the engine runs; GET /weight_info tells what each serves."


def _leaves(kind: type[InflightError]) -> list[type[InflightError]]:
    return [kind, *(leaf for sub in kind.__subclasses__() for leaf in _leaves(sub))]


BY_CODE: dict[str, type[InflightError]] = {k.code: k for k in _leaves(InflightError)}
