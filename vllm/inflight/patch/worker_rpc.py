"""RPCs that are added to workers; the engine core calls them on every rank.

They never raise. With several ranks, one exception would leave the replies of the other
ranks in the queue, and every later RPC would read a stale reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import ArenaTorn, InflightError
from vllm.inflight.messages import FlipTo
from vllm.inflight.patch.records.record import Patch
from vllm.inflight.transport.rank_numbers import rank_in_engine
from vllm.inflight.worker.worker_state import WorkerState


def answered(call: Callable[[], Any]) -> dict[str, Any]:
    """The reply of an RPC: `{"ok": …}` or `{"error": …}`.

    For an `InflightError`, `described` has its code and its fields.
    """
    try:
        return {"ok": call()}
    except ArenaTorn as error:
        return {"error": str(error), "torn": True, "described": error.to_dict()}
    except InflightError as error:
        return {"error": str(error), "described": error.to_dict()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def inflight_attach(
    self: upstream.WorkerBase, board_path: str, num_ranks: int
) -> dict[str, Any]:
    """Open the status board; replies with what this rank supports."""
    if (stager := WorkerState.of(self).stager) is None:
        off = {"reason": "staging is off", "bytes": 0, "is_reversible": False}
        return {"ok": {"rank": rank_in_engine(self.parallel_config)} | off}
    return answered(lambda: stager.attach(board_path, num_ranks))


def inflight_command(
    self: upstream.WorkerBase, serial: int, name: str, values: Any
) -> dict[str, Any]:
    """Enqueue a command for the staging thread."""
    from vllm.inflight.messages import command_from_dict

    return answered(
        lambda: (
            WorkerState.of(self)
            .require_stager()
            .command(serial, command_from_dict(name, values))
        )
    )


def inflight_result(
    self: upstream.WorkerBase, serial: int, number: int
) -> dict[str, Any]:
    """Reply with the result of call `number` of the worker's extension, in a list.

    The name of the first tensor of the update comes with it.
    """
    return answered(
        lambda: WorkerState.of(self).require_stager().extension.take(serial, number)
    )


def inflight_flip(
    self: upstream.WorkerBase, ranks: list[int] | None = None, to: FlipTo = "next"
) -> dict[str, Any]:
    """Exchange the live weights with others, on `ranks` or on all."""
    if ranks is not None and rank_in_engine(self.parallel_config) not in ranks:
        return {"ok": 0.0}

    from vllm.inflight.worker.shadow.swap import OtherBits

    def flip() -> float:
        state = WorkerState.of(self)
        try:
            seconds = state.require_stager().flip(to)
        except OtherBits:
            if state.tripwire is not None:
                state.tripwire.note()  # it is not known what else was written
            raise
        if state.tripwire is not None:
            state.tripwire.changed()
        return seconds

    return answered(flip)


def inflight_overwrite(
    self: upstream.WorkerBase, move: str, *args: object
) -> dict[str, Any]:
    """Make one move about out-of-band writes; see integrity/outside_writes.py."""
    from vllm.inflight.worker.integrity import outside_writes
    from vllm.inflight.worker.step_tracker import between_steps

    def act() -> Any:
        with between_steps(self):
            return outside_writes.MOVES[move](self, *args)

    return answered(act)


def inflight_read(
    self: upstream.WorkerBase, what: str, *args: object
) -> dict[str, Any]:
    """Read from the live weights of this rank; see worker/verify/readback.py."""
    from vllm.inflight.worker.step_tracker import between_steps
    from vllm.inflight.worker.verify import readback

    reads: dict[str, Callable[..., Any]] = {
        "checksums": readback.checksums,
        "rows": readback.rows,
        "unused": readback.unused,
        "names": lambda worker: WorkerState.of(worker).require_stager().names(),
    }

    def read() -> Any:
        with between_steps(self):
            return reads[what](self, *args)

    return answered(read)


def inflight_scrub(self: upstream.WorkerBase, move: str) -> dict[str, Any]:
    """Make one move of a scrub on this rank; see `StagingWorker.scrub`."""
    return answered(lambda: WorkerState.of(self).require_stager().scrub(move))


def inflight_adapter(
    self: upstream.WorkerBase, move: str, request: Any, needed: Any = None
) -> dict[str, Any]:
    """Make one move of loading an adapter; see worker/lora.py."""
    from vllm.inflight.worker import lora
    from vllm.inflight.worker.step_tracker import between_steps

    def step() -> Any:
        with between_steps(self):
            return lora.step(self, move, request, needed)

    return answered(step)


def _added(function: Callable[..., Any], why: str) -> Patch:
    return Patch(
        target=f"vllm.v1.worker.worker_base:WorkerBase.{function.__name__}",
        expects=None,
        why=why,
        remove_when="upstream loads updates into shadow weights",
        around=lambda _: function,
    )


PATCHES = [
    _added(inflight_attach, "ranks report through a status board in shared memory"),
    _added(inflight_command, "commands for the staging thread return at once"),
    _added(inflight_result, "the result of a call of an extension is read on its rank"),
    _added(inflight_flip, "a commit flips the weights of every rank with one RPC"),
    _added(inflight_overwrite, "ranks detect out-of-band writes into live weights"),
    _added(inflight_adapter, "an adapter is loaded on every rank or on none"),
    _added(inflight_scrub, "live weights are compared with the committed digest"),
    _added(inflight_read, "live weights can be read and compared with a trainer's"),
]
