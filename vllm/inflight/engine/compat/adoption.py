"""Adoption: worker calls of other frameworks that write weights become updates.

A framework's worker extension writes into `model_runner.model`. A call of it that the
table of known calls has (frameworks/table.py) is adopted: its method is executed on the
shadow weights while the engine decodes. The method's own transport brings the tensors.

| event | what happens |
|---|---|
| the first call of a version | an update starts |
| a call with the mark of the end | the update is verified and committed |
| a call fails, or its result says so | the update is aborted |
| `resume`, `wake_up`, a cache reset | an update without its end mark is aborted |

The caller gets what the method has returned. A call that is not adopted is executed on
the live weights, and outside_writes.py detects what it writes.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.calls import AbortUpdate, StartUpdate
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.compat.worker_calls import Answer, after, delivered, finish
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.envelopes import enveloped
from vllm.inflight.engine.pause.absorption import Need
from vllm.inflight.engine.transaction import Update
from vllm.inflight.errors import (
    Cancelled,
    Conflict,
    EngineAsleep,
    EngineFault,
    InflightError,
    UpdateBusy,
    WrongPhase,
)
from vllm.inflight.frameworks.known_call import (
    UNKNOWN,
    Arguments,
    KnownCall,
    KnownWrite,
    Role,
)
from vllm.inflight.frameworks.table import DIRECT, matched
from vllm.inflight.update import Phase

logger = upstream.init_logger(__name__)

BEGINNING = (Role.VERSION, Role.BEGIN)
"""Roles of calls that never belong to a version which is open already."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """A worker call that is adopted."""

    row: KnownCall
    arguments: Arguments
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class OpenVersion:
    """A version of a framework that has not ended."""

    framework: str
    method: str
    """Of its first call."""
    update: Update
    names: tuple[str, ...]
    """The tensors of its first call, if the call told; else the first tensor."""
    is_rest: bool
    """Whether its first call may be in the middle of a version that has failed."""
    num_calls: int = 0
    """Calls that are under way."""
    is_ending: bool = False
    """Whether its end was marked, so that it is verified and committed now."""

    @property
    def is_busy(self) -> bool:
        """Whether a call of it is under way, or its end."""
        return self.num_calls > 0 or self.is_ending


@dataclass(frozen=True, slots=True)
class Failure:
    """The last version of a framework, if it has failed."""

    names: tuple[str, ...]
    """The tensors that its first call told, or the first tensor. If that has failed
    before a tensor came, those of the last version that ended well."""
    error: InflightError
    has_ended: bool
    """Whether its end was marked, so that the next call begins another version."""
    rest: tuple[str, ...] = ()
    """The same of the call that was rejected last, because it might be the rest."""

    def may_go_on_with(self, names: tuple[str, ...]) -> bool:
        """Whether a call with tensors `names` may be in the middle of this version.

        No rest begins twice in the same way: a trainer has begun to send in another
        order.
        """
        is_begin = bool(names) and names in (self.names, self.rest)
        return not self.has_ended and not is_begin


class Adoption:
    """The adopted calls of one engine core; changed between two steps only."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        self._controller = controller
        config = core.vllm_config
        self._adopt = InflightConfig.of(config).adopt
        self._is_required = InflightConfig.is_given(config, "adopt")
        """Whether a known call that cannot be adopted is rejected."""
        self.rows = matched(controller.ranks.methods)
        """The rows of the table that fit the workers of this engine."""
        may_adopt = self._adopt != "off" and controller.ranks.reason is None
        adopted = [row for row in self.rows if may_adopt and row.is_adopted]
        if adopted:
            logger.info(
                "worker calls of %s become updates: %s",
                ", ".join(dict.fromkeys(row.framework for row in adopted)),
                ", ".join(dict.fromkeys(row.method for row in adopted)),
            )
        self._is_quantised = config.model_config.is_quantized
        self._extension = config.parallel_config.worker_extension_cls or None
        if self._extension and not self.rows and self._adopt != "off":
            logger.info(
                "the worker extension %s has no known call; weights that it writes get "
                "a version without a digest",
                self._extension,
            )
        self._open: OpenVersion | None = None
        self._failed: dict[str, Failure] = {}
        """Framework → its last version, if that has failed."""
        self._begun_with: dict[str, tuple[str, ...]] = {}
        """Method → the `names` of the last version that it has begun and that ended
        well."""
        self._said: set[tuple[str, str]] = set()
        """Framework and reason of the calls that were not adopted, once logged."""
        self._calling = threading.local()
        """`depth` counts the worker calls that a thread is in."""
        is_here = isinstance(core.model_executor, upstream.UniProcExecutor)
        is_reached = controller.in_process and is_here
        if is_reached and InflightConfig.of(config).pauses == "absorb":
            controller.ranks.overwrite("announce_loads", self._before_load)
        if self._adopt == "direct" and is_reached:
            controller.ranks.overwrite("adopt_loads", self.load_directly)

    def recognised(
        self, method: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> Recognised | None:
        """A worker call that is adopted; None if it is executed as it is.

        Raises:
            Conflict: the call cannot be adopted, and --inflight-adopt was given.
            EngineAsleep: the call would write into weights that sleep.
            InflightError: the call belongs to a version that has failed before.

        """
        found = self._found(method, args, kwargs)
        if not found or self._adopt == "off":
            return None
        version = self._current()
        # Two frameworks may have the same call, as one that ends a version. It is of
        # the framework whose version is open, or whose last version has failed.
        order = ([] if version is None else [version.framework]) + [*self._failed]
        of_order = (c for name in order for c in found if c.row.framework == name)
        call = next(of_order, found[0])
        row = call.row
        if not row.is_adopted:
            self._leave(row, "it writes into the live model by itself")
            return None
        if self._belongs_to_nothing(row, version):
            failure = self._failed.get(row.framework)
            if failure is None:
                return None
            raise failure.error
        if (reason := self._obstacle(row, call.arguments)) is not None:
            self._leave(row, reason)
            return None
        return call

    def state(self) -> dict[str, Any] | None:
        """The worker extension, and its known calls; None if it has neither.

        For each call `why` says why it is not adopted, and is None if it is.
        """
        if self._extension is None and not self.rows:
            return None
        calls = [
            {
                "framework": row.framework,
                "call": row.signature,
                "role": row.role.value,
                "why": self._why_not(row),
            }
            for row in self.rows
        ]
        return {"name": self._extension, "calls": calls}

    def _why_not(self, row: KnownCall) -> str | None:
        if self._adopt == "off":
            return "the engine has --inflight-adopt off"
        if not row.is_adopted:
            return "it writes into the live model by itself"
        return self._standing_obstacle(row)

    def known_write(
        self, method: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> KnownWrite:
        """What is known of a worker call that is not adopted."""
        found = self._found(method, args, kwargs)
        return KnownWrite.of(found[0].row, found[0].arguments) if found else UNKNOWN

    def _found(
        self, method: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> list[Recognised]:
        """The call by each row that has it."""
        given = dict(kwargs or {})
        return [
            Recognised(row, arguments, tuple(args), given)
            for row in self.rows
            if row.method == method
            and (arguments := row.bound(args, given)) is not None
        ]

    def execute(self, call: Recognised) -> Any:
        """Make an adopted call.

        Returns:
            the result of each rank, or a Future of that.

        Raises:
            InflightError: the call has failed, or its version was rejected; the live
                weights have not changed.

        """
        version: OpenVersion | None = None
        number = 0

        def begin() -> Any:
            nonlocal version, number
            begun = self._begin(call)
            number = begun.update.num_chunks
            method = None if call.row is DIRECT else call.row.method
            sent = self._controller.updates.call_extension(
                begun.update, method, call.args, call.kwargs
            )
            version = begun
            version.num_calls += 1
            if call.row.is_single:
                self._stand_still(call)
            return sent

        def received(told: dict[str, Any]) -> Answer:
            if version is None:
                return told  # no version could be begun
            return self._received(call, version, number, told)

        try:
            answer = after(self._controller, self._between(begin), received)
            return delivered(self._controller, answer, list)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: nobody waits for the rest of the version
            if (broken := version) is not None and self._open is broken:
                error = Cancelled(f"{call.row.method} was interrupted")
                self._between(lambda: self._give_up(broken, error))
            raise

    @contextmanager
    def in_worker_call(self) -> Iterator[None]:
        """Context: this thread makes a worker call, which is not adopted."""
        depth = getattr(self._calling, "depth", 0)
        self._calling.depth = depth + 1
        try:
            yield
        finally:
            self._calling.depth = depth

    def _stand_still(self, call: Recognised) -> None:
        """Let an absorbed pause take force, since a call for each tensor will come.

        Each of these hundreds of calls would wait for steps if decoding went on. The
        update is right without the pause, so no call waits for it or fails with it.
        """
        try:
            self._controller.pauses.absorption.enforce(Need.SINGLE_TENSORS)
        except Exception as error:  # whatever keeps the engine from stopping
            logger.warning(
                "decoding goes on beside the calls of %s, as the pause did not take "
                "force: %s",
                call.row.framework,
                error,
            )

    def load_directly(self, weights: Iterable[Any]) -> set[str] | None:
        """Load tensors that code beside the engine gives to the live model.

        Returns their names. Returns None, and takes no tensor, if they are to be loaded
        into the live model: in a worker call, or if updates are not possible now.

        Raises:
            InflightError: a tensor was rejected; the live weights have not changed.

        """
        if getattr(self._calling, "depth", 0):
            return None
        if self._controller.sleep.weights == "asleep":
            return None
        if (reason := self._obstacle(DIRECT, {})) is not None:
            self._say_once(DIRECT, reason)
            return None
        names: set[str] = set()
        # An iterator may make each tensor when it is asked for it.
        is_there = isinstance(weights, Collection)
        for batch in [list(weights)] if is_there else ([pair] for pair in weights):
            if torch.cuda.is_available():
                # Another stream reads what this thread has computed.
                torch.cuda.current_stream().synchronize()
            self.execute(Recognised(DIRECT, {}, (batch,), {}))
            names.update(name for name, _ in batch)
        return names

    def _before_load(self) -> None:
        """Let an absorbed pause take force, as code beside the engine is to write.

        A worker call has done so before.
        """
        if not getattr(self._calling, "depth", 0):
            absorption = self._controller.pauses.absorption
            absorption.before(Need.LOAD, lambda: None)

    def end_direct_loads(self) -> None:
        """Commit what code beside the engine has loaded.

        Raises:
            WeightsMismatch: tensors are missing; the live weights have not changed.

        """
        version = self._current()
        if version is None or version.framework != DIRECT.framework:
            return
        end = finish(self._controller, version.update.update_id)
        after(self._controller, end, lambda told: self._finished(version, [], told))

    def before_step(self) -> None:
        """Commit what code beside the engine has loaded, if it is complete."""
        try:
            self.end_direct_loads()
        except InflightError as error:  # nobody has called anything that could raise
            logger.error("the old weights serve on: %s", error)

    def end_unmarked(self, what: str) -> None:
        """Abort a version whose end was not marked, because `what` was called.

        A trainer calls it after its last tensor. If the mark is missing, the trainer
        has died or has sent a part. What code beside the engine has loaded ends
        elsewhere, see `end_direct_loads`.
        """
        version = self._current()
        if version is None or version.is_busy:
            return
        if version.framework == DIRECT.framework:
            return
        self._give_up(
            version,
            WrongPhase(
                f"{what} was called before {version.framework} had marked the end of "
                "its version; what had come was dropped, and the old weights serve on"
            ),
        )

    # ------------------------------------------------------- what is recognised
    def _obstacle(self, row: KnownCall, arguments: Arguments) -> str | None:
        """Why a call is not adopted; None if it is.

        Raises:
            EngineAsleep: the weights sleep.

        """
        if (reason := self._standing_obstacle(row)) is not None:
            return reason
        if (reason := row.obstacle(arguments)) is not None:
            return reason
        sleep = self._controller.sleep
        if sleep.weights == "asleep":
            raise EngineAsleep(
                f"{row.method} of {row.framework} writes weights, and {sleep.detail}"
            )
        if sleep.weights != "live":
            return str(sleep.detail)
        return None

    def _standing_obstacle(self, row: KnownCall) -> str | None:
        """Why no call of a row is adopted by this engine; None if some may be."""
        ranks = self._controller.ranks
        if ranks.reason is not None:
            return f"weights of this engine cannot be updated in flight: {ranks.reason}"
        if ranks.has_mtp and row.role is Role.COMPLETING:
            return (
                "the engine drafts with MTP layers, and no call tells whether their "
                "tensors still come"
            )
        if self._is_quantised and not row.takes_quantised:
            return "the model is quantised, and the method prepares its layers itself"
        if self._is_quantised and (
            missing := ranks.missing_load_steps.intersection(row.load_steps)
        ):
            return (
                "the model is quantised, and the method prepares its layers by other "
                f"functions than {', '.join(sorted(missing))}"
            )
        if row.is_alone and self._controller.num_ranks > 1:
            return "the method uses the groups of the ranks that decode"
        return None

    def _leave(self, row: KnownCall, reason: str) -> None:
        """Let a call write into the live weights, unless adoption was asked for."""
        if self._is_required:
            raise Conflict(
                f"{row.method} of {row.framework} cannot be adopted, which "
                f"--inflight-adopt {self._adopt} asks for: {reason}",
                remedy="Start the engine without --inflight-adopt: such a call then "
                "writes into the live weights, and what it writes gets a label and no "
                "digest. Nothing has changed.",
            )
        self._say_once(row, reason)

    def _say_once(self, row: KnownCall, reason: str) -> None:
        if (row.framework, reason) in self._said:
            return
        self._said.add((row.framework, reason))
        logger.warning(
            "%s of %s is not adopted and writes into the live weights: %s",
            row.method,
            row.framework,
            reason,
        )

    def _belongs_to_nothing(self, row: KnownCall, version: OpenVersion | None) -> bool:
        """Whether a call belongs to a version that is not open."""
        if version is not None and version.framework == row.framework:
            return False
        has_begin = any(
            each.role is Role.BEGIN and each.framework == row.framework
            for each in self.rows
        )
        return row.role is Role.END or (row.role is Role.PART and has_begin)

    def _current(self) -> OpenVersion | None:
        """The open version; None if there is none, or if it has ended meanwhile."""
        version = self._open
        if version is None or version.update.is_active:
            return version
        if version.update.phase is Phase.COMMITTED:  # by a call of another client
            self._open = None
        else:
            error = version.update.error or WrongPhase(
                f"update {version.update.update_id!r} was aborted"
            )
            self._give_up(version, error)
        return None

    # -------------------------------------------------------- one adopted call
    def _begin(self, call: Recognised) -> OpenVersion:
        """The version that a call belongs to; it is started if there is none."""
        row, version = call.row, self._current()
        if version is not None:
            is_same = version.framework == row.framework
            if is_same and row.role not in BEGINNING and not version.is_ending:
                return version
            if version.is_busy:
                raise UpdateBusy(
                    f"a version of {version.framework} is being received; call "
                    f"{row.method} again after it"
                )
            self._give_up(
                version,
                WrongPhase(f"{row.method} has begun another version before its end"),
            )
        names = tuple(row.names(call.arguments))
        failure = self._failed.get(row.framework)
        reply = self._controller.call(
            StartUpdate(
                update_id=f"adopted-{uuid.uuid4().hex}",
                weight_version=row.label_of(call.arguments),
                owner=row.framework,
                transport="extension",
            )
        )
        if "error" in reply:
            raise InflightError.from_dict(reply["error"])
        update = self._controller.updates.ledger.active
        assert update is not None
        is_rest = failure is not None and failure.may_go_on_with(names)
        version = OpenVersion(row.framework, row.method, update, names, is_rest)
        self._open = version
        return version

    def _received(
        self,
        call: Recognised,
        version: OpenVersion,
        number: int,
        told: dict[str, Any],
    ) -> Answer:
        """Every rank has made the call, or one has failed."""

        def settle() -> tuple[list[Any], bool]:
            version.num_calls -= 1
            return self._settled(call, version, number, told)

        settled = self._between(settle)
        if "error" in settled:
            return settled
        results, is_end = settled["ok"]
        if not is_end:
            return {"ok": results}

        def finished(end: dict[str, Any]) -> Answer:
            return self._between(lambda: self._finished(version, results, end))

        end = finish(self._controller, version.update.update_id)
        return after(self._controller, end, finished)

    def _settled(
        self,
        call: Recognised,
        version: OpenVersion,
        number: int,
        told: dict[str, Any],
    ) -> tuple[list[Any], bool]:
        """The results of the call, and whether the version is to be committed.

        Raises:
            InflightError: the call has failed.

        """
        row, update = call.row, version.update
        told_by = self._controller.ranks.results(update.serial, number)
        results = [result for result, _ in told_by]
        self._note_first(version, next((first for _, first in told_by if first), None))
        failure = next(filter(None, map(row.failure, results)), None)
        if failure is not None and len(results) == self._controller.num_ranks:
            message = f"{row.method} of {row.framework} has failed: {failure}"
            self._give_up(version, EngineFault(message))
            return results, False  # the caller reads the failure from them
        if "error" in told:
            error = InflightError.from_dict(told["error"])
            self._give_up(version, error)
            raise error
        if len(results) != self._controller.num_ranks:
            error = EngineFault(
                f"{row.method} of {row.framework} was called on {len(results)} of "
                f"{self._controller.num_ranks} ranks"
            )
            self._give_up(version, error)
            raise error
        if row.role is Role.COMPLETING:
            self._reject_rest(version)
        params = told["ok"]["parameters"]
        if not self._is_end(call, params):
            return results, False
        if not params.get("begun"):
            logger.info("%s of %s has brought no tensor", row.method, row.framework)
            self._open = None
            self._abort(update, WrongPhase("the calls have brought no tensor"))
            return results, False
        if row.may_lack:
            update.may_lack, update.may_be_first = row.framework, not version.is_rest
        version.is_ending = True
        return results, True

    def _note_first(self, version: OpenVersion, first: str | None) -> None:
        """Note the first tensor of a version whose first call has told no names."""
        if version.names or first is None:
            return
        version.names = (first,)
        failure = self._failed.get(version.framework)
        version.is_rest = failure is not None and failure.may_go_on_with(version.names)

    def _reject_rest(self, version: OpenVersion) -> None:
        """Raise the error of the version before if this one may be the rest of that.

        The next version would complete it otherwise, and be a mixture.
        """
        failure = self._failed.get(version.framework)
        if failure is None or not failure.names or not version.is_rest:
            return
        self._give_up(version, failure.error)
        self._failed[version.framework] = replace(failure, rest=version.names)
        raise failure.error

    def _is_end(self, call: Recognised, params: Mapping[str, int]) -> bool:
        """Whether a version ends with a call; `params` counts its parameters."""
        match call.row.role:
            case Role.VERSION | Role.END:
                return True
            case Role.PART:
                is_last = call.row.is_last
                return is_last is not None and is_last(call.arguments)
            case Role.COMPLETING:
                return 0 < params.get("total", 0) == params.get("complete", 0)
        return False

    def _finished(
        self, version: OpenVersion, results: list[Any], end: dict[str, Any]
    ) -> list[Any]:
        """The results of a call that has ended a version; raises if it was rejected."""
        if "error" in end:
            error = InflightError.from_dict(end["error"])
            self._give_up(version, error)
            raise error
        if self._open is version:
            self._open = None
        self._failed.pop(version.framework, None)
        self._begun_with[version.method] = version.names
        return results

    def _give_up(self, version: OpenVersion, error: InflightError) -> None:
        """Abort a version, and remember with which tensors it had begun."""
        if self._open is version:
            self._open = None
        before = self._failed.get(version.framework)
        names = before.names if version.is_rest and before else version.names
        names = names or self._begun_with.get(version.method, ())
        failure = Failure(names, error, has_ended=version.is_ending)
        self._failed[version.framework] = failure
        self._abort(version.update, error)

    def _abort(self, update: Update, error: InflightError) -> None:
        if update.is_active:
            call = AbortUpdate(update.update_id, error=error.to_dict())
            self._controller.call(call)

    def _between(self, act: Callable[[], Any]) -> Any:
        """The envelope of what `act` returns, or a Future of it; between two steps."""
        if not self._controller.in_process:
            return enveloped(act)
        return self._controller.step_queue.run(lambda: enveloped(act))
