"""The ranks of an engine, as its core sees them: commands, statuses, the flip.

Orders go out as RPCs that only enqueue; what the ranks make of them is read
from the board. The one RPC that is waited for is the flip.
"""

from __future__ import annotations

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
from vllm.inflight.errors import (
    CAUSES,
    Cause,
    ConfigError,
    EngineFault,
    InflightError,
    StagingUnavailable,
    WeightsMismatch,
)
from vllm.inflight.messages import Command, State, Status, command_to_dict
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.verify.checks import counted, listed

logger = upstream.init_logger(__name__)

MOST_UNREAD = 4
"""Most replies to commands that may wait to be read.

A rank has room for ten replies of any kind and stands still when there is none. A step
reads the replies before its own."""


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
        self._board = StatusBoard.create(num_ranks)
        self._unread: list[Any] = []
        """Futures of the replies to commands, the oldest first."""
        self._statuses: list[Status] = []
        self._read_at: tuple[int, ...] | None = None
        self._given_up = 0
        """The serial of the last update that was cancelled from here."""
        self.reason = kind.refusal
        """Why no version can be staged here; None if one can."""
        replies: list[dict[str, Any]] = []
        try:
            if self.reason is None:
                replies = self._attached(num_ranks)
            self._has_tripwires = self._lay_tripwires(in_process)
            """Whether ranks tell on the board of what others write into live weights.

            Without it, that is looked for after the calls of the workers alone.
            """
        finally:
            self._board.unlink()
        self._hears = bool(replies)
        """Whether commands reach the ranks, and what they make of them comes back."""
        reasons = [reply["reason"] for reply in replies if reply["reason"]]
        self.nbytes = sum(reply["bytes"] for reply in replies)
        self.is_reversible = all(reply["is_reversible"] for reply in replies)
        """Whether a commit leaves the version served before on every rank."""
        self.has_mtp = any(reply.get("has_mtp") for reply in replies)
        """Whether MTP layers are staged with the model; their tensors are among its."""
        has_drafter = any(reply.get("has_drafter") for reply in replies)
        self.has_drafter = has_drafter and not self.has_mtp
        """Whether a drafter is staged with the model, whose tensors are its own."""
        if has_drafter or self.has_mtp:
            reasons.append(lagging_drafter(kind, num_ranks))
        self.reason = next(filter(None, [self.reason, *reasons]), None)

    @classmethod
    def of(cls, core: upstream.EngineCore) -> Ranks:
        """The ranks of an engine core.

        Raises:
            ConfigError: the configuration asks for shadow weights that cannot be had.

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
        if (reason := ranks.reason) is not None and staging in ("device", "host"):
            ranks.close()
            raise ConfigError(f"--inflight-staging {staging} cannot be had: {reason}")
        return ranks

    def _attached(self, num_ranks: int) -> list[dict[str, Any]]:
        """What the ranks can do, or nothing if not all of them see the board."""
        replies = self._raw("inflight_attach", self._board.path, num_ranks)
        for rank, reply in enumerate(replies):
            if "error" in reply:
                self.reason = (
                    f"rank {rank} cannot open the engine's notice board, a file in the "
                    f"shared memory of its host ({reply['error']}); all ranks of an "
                    "engine have to be on one host, in one container"
                )
                return []
        return [reply["ok"] for reply in replies]

    def _lay_tripwires(self, in_process: bool) -> bool:
        """Have every rank tell on the board of writes into what it serves."""
        try:
            self.overwrite("attach", self._board.path, self.count, in_process)
        except Exception as error:  # the ranks of another host cannot open it
            logger.warning(
                "what others write into live weights is seen after calls of the "
                "workers only: %s",
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
        """Wait for the steps in flight, if what is called next could overtake them.

        Raises:
            EngineFault: one has failed.

        """
        if not self._kind.is_ordered:
            wait_for_steps(in_flight)

    def command(self, serial: int, command: Command) -> None:
        """Send every rank a command, without waiting until it is carried out.

        Args:
            serial: number of the update, or of the call, that the command belongs to.
            command: what the ranks do.

        Raises:
            StagingUnavailable: nobody would hear of what becomes of it.

        """
        if not self._hears:
            self.require_staging()
        self._send("inflight_command", serial, command.name, command_to_dict(command))

    def _send(self, method: str, *args: object) -> None:
        """Call every rank without waiting for what it replies."""
        self._unread = [reply for reply in self._unread if not reply.done()]
        if len(self._unread) >= MOST_UNREAD:
            # Nobody steps, so nobody else reads; then nothing is in flight either.
            self._unread.pop(0).result()
        reply = self._executor.collective_rpc(method, args=args, non_block=True)
        if self._kind.is_ordered:
            self._unread.append(reply)  # of others, Ray keeps as many as there are

    def cancel(self, serial: int) -> None:
        """Make every rank stop working on update `serial`."""
        self._given_up = max(serial, self._given_up)
        self._board.cancel(serial)

    def has_given_up(self, serial: int) -> bool:
        """Whether update `serial` was cancelled from here.

        A rank that is shut down cancels on the board too.
        """
        return serial <= self._given_up

    def prepare_sleep(self, level: int) -> None:
        """Prepare a sleep of `level` on every rank; 0 takes that back.

        Raises:
            EngineFault: a transfer does not let go, or a host lacks memory.

        """
        self._call("inflight_prepare_sleep", level)

    def scrub(self, move: str) -> list[Any]:
        """Make one move of a scrub on every rank; see `Stager.scrub`."""
        return self._call("inflight_scrub", move)

    def scrub_slice(self) -> None:
        """Have every rank read a slice, without waiting for it."""
        self._send("inflight_scrub", "slice")

    def overwrite(
        self, move: str, *args: object, timeout: float | None = None
    ) -> list[Any]:
        """One move of every rank about writes into what it serves.

        See worker/integrity/outside_writes.py.

        Raises:
            InflightError: a rank could not; the others have made the move.
            TimeoutError: a rank has not answered within `timeout` seconds.

        """
        return self._call("inflight_overwrite", move, *args, timeout=timeout)

    def is_touched(self) -> bool:
        """Whether a rank tells that something has touched what it serves."""
        return self._has_tripwires and self._board.is_touched()

    def untouch(self) -> None:
        """Take note of that; before looking, so that nothing is missed."""
        if self._has_tripwires:
            self._board.untouch()

    def flip(self) -> float:
        """Exchange live and staged weights on every rank, or on none.

        Returns the longest time a rank took, in seconds.

        Raises:
            EngineFault: it failed on a rank, and none has flipped.
            SystemExit: ranks may serve different versions now.

        """
        replies = self._flip()
        if any(reply.get("torn") for reply in replies):
            _stop(replies)
        failed = [r["error"] for r in replies if "error" in r]
        if not failed:
            return max(reply["ok"] for reply in replies)
        # A flip is its own inverse: those that flipped flip back. A failed flip
        # has checked its pairs before it moved the first of them.
        if len(failed) < len(replies):
            flipped = [rank for rank, reply in enumerate(replies) if "ok" in reply]
            back = self._flip(flipped)
            if any("error" in reply for reply in back):
                _stop(back)
        raise EngineFault(f"the flip failed on {len(failed)} rank(s): {failed[0]}")

    def statuses(self) -> list[Status]:
        """What every rank posted last, in rank order."""
        stamp = self._board.stamp()
        if stamp != self._read_at:
            # The stamp is older than what is read: a post in between is read again.
            posted = map(Status.from_dict, self._board.read_all())
            self._statuses, self._read_at = list(posted), stamp
        return self._statuses

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever a rank has posted."""
        return self._board.stamp()

    def close(self) -> None:
        """Give the board back; from now on no update can begin."""
        self.reason = "the engine has been shut down"
        self._has_tripwires = False
        self._board.close()

    def _flip(self, ranks: list[int] | None = None) -> list[dict[str, Any]]:
        """Flip `ranks`, or all; ends the engine if one of them does not answer.

        Nobody knows then what that rank serves. A second Ctrl-C ends the wait for it.
        """
        longest_s = upstream.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        args = () if ranks is None else (ranks,)
        try:
            with asking(self._executor):
                return self._raw("inflight_flip", *args, timeout=longest_s)
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


def _stop(said: object) -> NoReturn:
    """Rather than serve a mixture of two versions, serve nothing."""
    reason = (
        "vllm-inflight: a flip failed and could not be taken back, so the weights at "
        f"hand are of no version; what the ranks say: {said}"
    )
    logger.critical(reason)
    raise SystemExit(reason)


def verdict(statuses: list[Status], serial: int) -> InflightError | State | None:
    """What the ranks' statuses on update `serial` amount to.

    An error if any rank failed, the common state if all ranks agree, None while
    they do not yet. One no is a no of all.
    """
    current = [status for status in statuses if status.serial == serial]
    failed = [status for status in current if status.state == "failed"]
    if failed:
        return refused(failed, current)
    if len(current) < len(statuses):
        return None
    states = {status.state for status in current}
    return states.pop() if len(states) == 1 else None


def refused(failed: list[Status], statuses: list[Status]) -> InflightError:
    """What the failures of ranks amount to: one refusal, or the first that is none.

    Ranks that have different parts of a model may be refused different tensors.

    Args:
        failed: the statuses of ranks that have failed.
        statuses: those of all ranks, on the same update.

    """
    errors = [InflightError.from_dict(status.error or {}) for status in failed]
    for error in errors:
        if not isinstance(error, WeightsMismatch):
            return error
    named: dict[str, dict[str, None]] = {}
    for status in failed:
        if not status.named:
            return errors[0]  # it is no refusal of tensors, or has too many to tell
        for cause, names in status.named.items():
            named.setdefault(cause, {}).update(dict.fromkeys(names))
    told = list(dict.fromkeys(error.message.partition("; ")[2] for error in errors))
    if unused := _unfilled(statuses):
        unused -= {name for names in named.values() for name in names}
        if unused:
            named[Cause.UNUSED] = dict.fromkeys(sorted(unused))
            told.append(f"no parameter is filled by {listed(sorted(unused))}")
    if len(told) == 1 and all(status.named == failed[0].named for status in failed):
        return errors[0]
    tensors = list(dict.fromkeys(chain.from_iterable(named.values())))
    return WeightsMismatch(
        f"{counted(tensors)}; {'; '.join(told)}",
        named={cause: list(names) for cause, names in named.items()},
        tensors=tensors,
    )


def agree(statuses: list[Status]) -> InflightError | str | None:
    """The digest of what all ranks staged, or why they do not agree.

    None if it is not known: of a subset, on top of weights of which nothing is known.
    What was sent of it is the same on all ranks even so.
    """
    votes = {(status.sent, status.digest) for status in statuses}
    if len(votes) > 1:
        told = ", ".join(f"rank {n}: {s.sent}" for n, s in enumerate(statuses))
        return WeightsMismatch(
            f"the ranks received different weights; their digests are {told}",
            remedy=CAUSES[Cause.RANKS][1],
        )
    if unused := _unfilled(statuses):
        names = sorted(unused)
        return WeightsMismatch(
            f"{counted(names)}; no parameter is filled by {listed(names)}",
            named={Cause.UNUSED: names},
        )
    return statuses[0].digest


def _unfilled(statuses: list[Status]) -> set[str]:
    """Names of tensors that filled no parameter of any rank; empty if a rank is silent.

    A tensor that fills nothing on one rank may belong to another rank.
    """
    told = [set(each.unfilled) for each in statuses if each.unfilled is not None]
    return set.intersection(*told) if len(told) == len(statuses) else set()
