"""The engine core's view of its ranks: commands, statuses, the flip.

Commands are RPCs that only put the command into a queue. The ranks report on the status
board. The engine core waits for the RPCs of the flip, of sleep, of scrubs, and of
out-of-band writes.
"""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from typing import Any, NoReturn

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.executors import (
    InFlight,
    Kind,
    asking,
    kind_of,
    lagging_drafter,
    wait_for_steps,
)
from vllm.inflight.engine.update import cut_tensors
from vllm.inflight.errors import (
    CAUSES,
    Cause,
    ConfigError,
    DeltaUnsupported,
    EngineFault,
    InflightError,
    StagingUnavailable,
    UpstreamChanged,
    WeightsMismatch,
)
from vllm.inflight.messages import Command, FlipTo, State, Status, command_to_dict
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.verify.checks import counted, listed

logger = upstream.init_logger(__name__)

MOST_UNREAD = 4
"""Most replies to commands that may be unread at a time.

A rank has room for ten replies and blocks when there is none. A step reads the replies
that come before its own."""

CHECK_WORKERS = (
    "Run `vllm-inflight doctor` in the environment of each worker, with Ray on each "
    "node: vllm-inflight has to be installed there, and VLLM_PLUGINS has to be unset "
    "or to name inflight. If it is so, look for 'Failed to load plugin inflight' in "
    "the log of the workers"
)
"""What to do where a worker process lacks the changes of this package."""


class Ranks:
    """All TP × PP ranks of one engine."""

    def __init__(
        self,
        executor: upstream.Executor,
        num_ranks: int,
        kind: Kind | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        self._executor = executor
        self._kind = kind = kind or Kind()
        self.count = num_ranks
        self.are_here = isinstance(executor, upstream.UniProcExecutor)
        """Whether the ranks are in this process: each post of theirs ends `rest`."""
        self._board = StatusBoard.create(num_ranks)
        self._unread: list[Any] = []
        """Futures of unread replies to commands, the oldest first."""
        self._statuses: list[Status] = []
        self._read_at: tuple[int, ...] | None = None
        self._given_up = 0
        """The highest serial that this engine core has cancelled."""
        self.reason = kind.refusal
        """Why the engine cannot stage updates; None if it can."""
        replies: list[dict[str, Any]] = []
        try:
            if self.reason is None:
                replies = self._attached(num_ranks)
            self._has_tripwires = self._lay_tripwires(in_process)
            """Whether ranks report out-of-band writes on the status board.

            Without it, the engine core checks only after worker calls.
            """
        finally:
            self._board.unlink()
        self._hears = bool(replies)
        """Whether commands reach the ranks and their statuses come back."""
        reasons = [reply["reason"] for reply in replies if reply["reason"]]
        self.nbytes = sum(reply["bytes"] for reply in replies)
        self.host_bytes = sum(reply.get("host_bytes", 0) for reply in replies)
        """Most bytes of host memory that the logs of delta staging go on in."""
        self.bucket_bytes = sum(reply.get("bucket_bytes", 0) for reply in replies)
        """Bytes of GPUs that are reserved for buckets beside the logs."""
        dtypes = {reply.get("dtype") for reply in replies}
        self.dtype: str | None = dtypes.pop() if len(dtypes) == 1 else None
        """The dtype of all floating-point tensors; None: they have several."""
        self.has_logs = any(reply.get("has_log") for reply in replies)
        """Whether ranks have one set of weights, and a log of what changes."""
        self.num_unproved = max([0, *(reply.get("unproved", 0) for reply in replies)])
        """Tensors of a rank whose places the next update has to prove; the most of all
        ranks."""
        self.is_reversible = all(reply["is_reversible"] for reply in replies)
        """Whether every rank keeps the version before a commit as rollback target."""
        self.has_mtp = any(reply.get("has_mtp") for reply in replies)
        """Whether MTP layers are staged as part of the model."""
        has_drafter = any(reply.get("has_drafter") for reply in replies)
        self.has_drafter = has_drafter and not self.has_mtp
        """Whether a drafter with tensors of its own is staged with the model."""
        found = self.overwrite("methods") if self._has_tripwires else [None]
        self.methods: dict[str, list[str]] = found[0] or {}
        """Methods of the workers that known calls name → their parameters."""
        missing = self.overwrite("missing_load_steps") if self.methods else []
        self.missing_load_steps = {step for steps in missing for step in steps or ()}
        """Those of `KnownCall.load_steps` that a rank could not find."""
        if has_drafter or self.has_mtp:
            reasons.append(lagging_drafter(kind, num_ranks))
        self.reason = next(filter(None, [self.reason, *reasons]), None)

    @classmethod
    def of(cls, core: upstream.EngineCore) -> Ranks:
        """The ranks of an engine core.

        Raises:
            ConfigError: the configuration requires shadow weights that are impossible.

        """
        executor = core.model_executor
        num_ranks = core.vllm_config.parallel_config.world_size
        ranks = cls(
            executor,
            num_ranks,
            kind_of(executor),
            in_process=not hasattr(core, "input_queue"),
        )
        staging = InflightConfig.of(core.vllm_config).staging
        is_required = staging in ("device", "host", "delta")
        if (reason := ranks.reason) is not None and is_required:
            ranks.close()
            raise ConfigError(f"--inflight-staging {staging} is not possible: {reason}")
        return ranks

    @property
    def staging(self) -> dict[str, Any]:
        """Where updates are staged: `bytes` of shadow weights, or of logs; the most
        `host_bytes` that logs go on in; the `bucket_bytes` reserved beside logs; the
        `dtype` of what is served; tensors whose places are `unproved`; or the `reason`
        why there is no staging."""
        return {
            "bytes": self.nbytes,
            "host_bytes": self.host_bytes,
            "bucket_bytes": self.bucket_bytes,
            "dtype": self.dtype,
            "has_logs": self.has_logs,
            "unproved": self.num_unproved,
            "reason": self.reason,
        }

    def _attached(self, num_ranks: int) -> list[dict[str, Any]]:
        """What each rank supports; empty if a rank cannot open the status board."""
        try:
            replies = self._raw("inflight_attach", self._board.path, num_ranks)
        except Exception as error:
            if not _lacks("inflight_attach", error):
                raise
            raise UpstreamChanged(
                "a worker process did not load the plugin of vllm-inflight. "
                f"{CHECK_WORKERS}.",
                remedy=f"{CHECK_WORKERS}.",
            ) from error
        for rank, reply in enumerate(replies):
            if "error" in reply:
                self.reason = (
                    f"rank {rank} cannot open the engine's status board, a file in the "
                    f"shared memory of its host ({reply['error']}); all ranks of an "
                    "engine have to be on one host, in one container"
                )
                return []
        return [reply["ok"] for reply in replies]

    def _lay_tripwires(self, in_process: bool) -> bool:
        """Make every rank report out-of-band writes on the status board."""
        try:
            self.overwrite("attach", self._board.path, self.count, in_process)
        except Exception as error:  # the ranks of another host cannot open it
            logger.warning(
                "out-of-band writes into live weights are detected after worker calls "
                "only: %s",
                error,
            )
            return False
        return True

    def require_staging(self) -> None:
        """Raise `StagingUnavailable` if these weights cannot be updated in flight."""
        if self.reason is not None:
            raise StagingUnavailable(
                f"weights of this engine cannot be updated in flight: {self.reason}"
            )

    def wait_for_steps(self, in_flight: InFlight | None) -> None:
        """Wait for the steps in flight, if the next call could overtake them.

        Raises:
            EngineFault: a step has failed.

        """
        if not self._kind.is_ordered:
            wait_for_steps(in_flight)

    def command(self, serial: int, command: Command) -> None:
        """Send every rank a command, without waiting until it is executed.

        Args:
            serial: number of the update, or of the call, that the command belongs to.
            command: the command.

        Raises:
            StagingUnavailable: the ranks could not report the result.

        """
        if not self._hears:
            self.require_staging()
        self._send("inflight_command", serial, command.name, command_to_dict(command))

    def _send(self, method: str, *args: object) -> None:
        """Call every rank without waiting for its reply."""
        self._unread = [reply for reply in self._unread if not reply.done()]
        if len(self._unread) >= MOST_UNREAD:
            # No step has read the replies, so no step is in flight either.
            self._unread.pop(0).result()
        reply = self._executor.collective_rpc(method, args=args, non_block=True)
        if self._kind.is_ordered:
            self._unread.append(reply)  # Ray keeps any number of replies

    def results(self, serial: int, number: int) -> list[tuple[Any, str | None]]:
        """What each rank has returned in call `number` of its extension.

        The name of the first tensor that the update has brought comes with it. A rank
        whose call has failed has no result and is left out.
        """
        found = self._call("inflight_result", serial, number)
        return list(chain.from_iterable(found))

    def cancel(self, serial: int) -> None:
        """Make every rank stop working on update `serial`."""
        self._given_up = max(serial, self._given_up)
        self._board.cancel(serial)

    def has_given_up(self, serial: int) -> bool:
        """Whether this engine core cancelled update `serial`.

        A rank that is shut down cancels on the status board too.
        """
        return serial <= self._given_up

    def prepare_sleep(self, level: int) -> None:
        """Prepare a sleep of `level` on every rank; level 0 cancels the preparation.

        Raises:
            EngineFault: a transfer did not stop, or a host lacks memory.

        """
        self._call("inflight_prepare_sleep", level)

    def scrub(self, move: str) -> list[Any]:
        """Make one move of a scrub on every rank; see `StagingWorker.scrub`."""
        return self._call("inflight_scrub", move)

    def scrub_slice(self) -> None:
        """Make every rank read a slice, without waiting for it."""
        self._send("inflight_scrub", "slice")

    def overwrite(
        self, move: str, *args: object, timeout: float | None = None
    ) -> list[Any]:
        """Call one function for out-of-band writes on every rank.

        `move` names a function of worker/integrity/outside_writes.py.

        Raises:
            InflightError: the call failed on a rank; the others have executed it.
            TimeoutError: a rank has not answered within `timeout` seconds.

        """
        return self._call("inflight_overwrite", move, *args, timeout=timeout)

    def is_touched(self) -> bool:
        """Whether a rank reports a write that touched its live weights."""
        return self._has_tripwires and self._board.is_touched()

    def untouch(self) -> None:
        """Reset the report; call it before a check, so that no write is missed."""
        if self._has_tripwires:
            self._board.untouch()

    def flip(self, to: FlipTo = "next") -> float:
        """Exchange the live weights with others on every rank, or on none.

        Returns the longest time a rank took, in seconds.

        Raises:
            EngineFault: the flip failed on a rank, and no rank has flipped.
            SystemExit: ranks may have different live versions now.

        """
        replies = self._flip(None, to)
        if any(reply.get("torn") for reply in replies):
            _stop(replies)
        failed = {n: r["error"] for n, r in enumerate(replies) if "error" in r}
        if not failed:
            return max(reply["ok"] for reply in replies)
        # A flip is its own inverse, so ranks that flipped flip back. A failed flip
        # has moved nothing, because it checks all pairs first.
        if len(failed) < len(replies):
            flipped = [rank for rank, reply in enumerate(replies) if "ok" in reply]
            back = self._flip(flipped, "undo")
            if any("error" in reply for reply in back):
                _stop(back)
        told = "; ".join(f"on rank {rank}: {error}" for rank, error in failed.items())
        raise EngineFault(f"the flip failed {told}")

    def statuses(self) -> list[Status]:
        """The last status of every rank, in rank order."""
        stamp = self._board.stamp()
        if stamp != self._read_at:
            # The stamp is read first, so that a later post is read again.
            posted = map(Status.from_dict, self._board.read_all())
            self._statuses, self._read_at = list(posted), stamp
        return self._statuses

    def rest(self, seconds: float) -> None:
        """Wait for so long; a status of a rank in this process ends the wait."""
        self._board.rest(seconds)

    def wake(self) -> None:
        """End the wait of `rest`."""
        self._board.wake()

    def stamp(self) -> tuple[int, ...]:
        """A value that changes whenever a rank posts a status."""
        return self._board.stamp()

    def close(self) -> None:
        """Free the status board; no update can start from now on."""
        self.reason = "the engine has been shut down"
        self._has_tripwires = False
        self._board.close()

    def _flip(self, ranks: list[int] | None, to: FlipTo) -> list[dict[str, Any]]:
        """Flip `ranks`, or all; the engine ends if a rank does not answer.

        The live version of such a rank is unknown. A second Ctrl-C ends the wait.
        """
        longest_s = upstream.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        try:
            with asking(self._executor):
                return self._raw("inflight_flip", ranks, to, timeout=longest_s)
        except BaseException as error:
            _stop(repr(error))

    def _call(
        self, method: str, *args: object, timeout: float | None = None
    ) -> list[Any]:
        replies = self._raw(method, *args, timeout=timeout)
        for rank, reply in enumerate(replies):
            if "described" in reply:
                raise InflightError.from_dict(reply["described"])
            if "error" in reply:
                raise EngineFault(f"{method} failed on rank {rank}: {reply['error']}")
        return [reply["ok"] for reply in replies]

    def _raw(
        self, method: str, *args: object, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = self._executor.collective_rpc(
            method, timeout=timeout, args=args
        )
        return replies


def _lacks(method: str, error: Exception) -> bool:
    """Whether the error of an RPC is that a worker has no such method."""
    told = rf"no attribute '{method}'|'{method}' is not implemented"
    return re.search(told, str(error)) is not None


def _stop(replies: object) -> NoReturn:
    """End the engine, because it would decode with a mixture of two versions."""
    reason = (
        "vllm-inflight: a flip failed and could not be undone, so the live weights "
        f"may mix two versions; the ranks replied: {replies}"
    )
    logger.critical(reason)
    raise SystemExit(reason)


def verdict(statuses: list[Status], serial: int) -> InflightError | State | None:
    """The common result of the ranks' statuses on update `serial`.

    It is an error if any rank failed, the common state if all ranks agree, and None
    before that.
    """
    current = [status for status in statuses if status.serial == serial]
    failed = [status for status in current if status.state == "failed"]
    if failed:
        error = refused(failed, current)
        if len(failed) < len(statuses):
            ranks = [str(n) for n, each in enumerate(statuses) if each in failed]
            error.message += f" (told by rank {', '.join(ranks)} of {len(statuses)})"
        return error
    if len(current) < len(statuses):
        return None
    states = {status.state for status in current}
    return states.pop() if len(states) == 1 else None


def refused(failed: list[Status], statuses: list[Status]) -> InflightError:
    """Merge the errors of ranks into one rejection, or return the first other error.

    Ranks that hold different parts of a model may reject different tensors.

    Args:
        failed: the statuses of ranks that have failed.
        statuses: the statuses of all ranks, on the same update.

    """
    errors = [InflightError.from_dict(status.error or {}) for status in failed]
    others = [each for each in errors if not isinstance(each, WeightsMismatch)]
    if others:  # the first, or the one that lacks most memory
        return max(others, key=lambda error: getattr(error, "missing_bytes", 0) or 0)
    named: dict[str, dict[str, None]] = {}
    for status in failed:
        if not status.named:
            return errors[0]  # it rejects no tensors, or too many to name
        for cause, names in status.named.items():
            named.setdefault(cause, {}).update(dict.fromkeys(names))
    reasons = list(dict.fromkeys(error.message.partition("; ")[2] for error in errors))
    if unused := _unfilled(statuses):
        unused -= {name for names in named.values() for name in names}
        if unused:
            named[Cause.UNUSED] = dict.fromkeys(sorted(unused))
            reasons.append(f"no parameter is filled by {listed(sorted(unused))}")
    if len(reasons) == 1 and all(status.named == failed[0].named for status in failed):
        return errors[0]
    tensors = list(dict.fromkeys(chain.from_iterable(named.values())))
    return WeightsMismatch(
        f"{counted(tensors)}; {'; '.join(reasons)}",
        named={cause: list(names) for cause, names in named.items()},
        tensors=tensors,
    )


def agree(statuses: list[Status]) -> InflightError | str | None:
    """The digest of the version that all ranks staged, or an error if they differ.

    It is None for a subset on top of weights without a digest. The digest of the sent
    tensors is compared in any case. Parameters that methods of worker extensions have
    written themselves are each rank's own, so that digests of them are joined.
    """
    votes = {(status.sent, status.digest) for status in statuses}
    if len(votes) > 1:
        digests = ", ".join(f"rank {n}: {s.sent}" for n, s in enumerate(statuses))
        return WeightsMismatch(
            f"the ranks received different weights; their digests are {digests}",
            remedy=CAUSES[Cause.RANKS][1],
        )
    if (error := _unproved(statuses)) is not None:
        return error
    if unused := _unfilled(statuses):
        names = sorted(unused)
        return WeightsMismatch(
            f"{counted(names)}; no parameter is filled by {listed(names)}",
            named={Cause.UNUSED: names},
        )
    whole = statuses[0].digest
    return None if whole is None else with_written(whole, statuses)


def with_written(digest: str | None, statuses: list[Status]) -> str | None:
    """The digest of sent tensors, joined with what methods have written on each rank.

    It is `digest` itself if they have written nothing.
    """
    if not any(status.written for status in statuses):
        return digest
    text = repr([digest, *(status.written for status in statuses)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _unproved(statuses: list[Status]) -> InflightError | None:
    """What is wrong with the shares of a delta; None if they add up.

    Each rank has told its share and the sum of all: see worker/delta/shares.py.
    """
    told = [status.shares for status in statuses if status.shares is not None]
    if not told:
        return None
    if len(told) < len(statuses):
        return WeightsMismatch(
            "some ranks received a delta, and others a whole version",
            remedy=CAUSES[Cause.RANKS][1],
        )
    if unserved := _unfilled(statuses):
        names = sorted(unserved)
        return DeltaUnsupported(
            f"no rank serves {listed(names)} as a copy of the checkpoint's tensor, so "
            "a delta cannot change it",
            tensors=names,
        )
    return cut_tensors.problem(told)


def _unfilled(statuses: list[Status]) -> set[str]:
    """Names of tensors that filled no parameter of any rank.

    A tensor that fills nothing on one rank may belong to another rank. The result is
    empty if a rank has not reported its names.
    """
    names = [set(each.unfilled) for each in statuses if each.unfilled is not None]
    return set.intersection(*names) if len(names) == len(statuses) else set()
