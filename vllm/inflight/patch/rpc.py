"""RPCs that workers get: what the engine core asks of every rank.

They never raise: with several ranks one exception would leave the replies of the
others in the queue, and every later RPC would read a stale one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight.errors import ArenaTorn
from vllm.inflight.patch.record import Patch


def answered(call: Callable[[], Any]) -> dict[str, Any]:
    """The reply of an RPC: `{"ok": …}` or `{"error": …}`."""
    try:
        return {"ok": call()}
    except ArenaTorn as error:
        return {"error": str(error), "torn": True}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def inflight_attach(self: Any, board_path: str, num_ranks: int) -> dict[str, Any]:
    """Open the notice board; replies with what this rank can do."""
    if getattr(self, "_inflight_stager", None) is None:
        off = {"reason": "staging is off", "bytes": 0, "is_reversible": False}
        return {"ok": {"rank": self.rank} | off}
    return answered(lambda: self._inflight_stager.attach(board_path, num_ranks))


def inflight_order(self: Any, serial: int, order: str, payload: Any) -> dict[str, Any]:
    """Enqueue an order for the staging thread."""
    return answered(lambda: self._inflight_stager.order(serial, order, payload))


def inflight_flip(self: Any, ranks: list[int] | None = None) -> dict[str, Any]:
    """Exchange the live weights with the second set, on `ranks` or on all."""
    if ranks is not None and self.rank not in ranks:
        return {"ok": 0.0}
    return answered(lambda: self._inflight_stager.flip())


def inflight_read(self: Any, what: str, *args: Any) -> dict[str, Any]:
    """Read something of what this rank serves; see stage/readout.py."""
    from vllm.inflight.stage import readout
    from vllm.inflight.stage.steps import between_steps

    reads: dict[str, Callable[..., Any]] = {
        "checksums": readout.checksums,
        "rows": readout.rows,
        "names": lambda worker: worker._inflight_stager.names(),
    }

    def read() -> Any:
        with between_steps(self):
            return reads[what](self, *args)

    return answered(read)


def inflight_adapter(self: Any, move: str, request: Any) -> dict[str, Any]:
    """Make one move of loading an adapter; see commit/adapter.py."""
    from vllm.inflight.commit import adapter
    from vllm.inflight.stage.steps import between_steps

    def step() -> Any:
        with between_steps(self):
            return adapter.step(self, move, request)

    return answered(step)


def _added(function: Any, why: str) -> Patch:
    return Patch(
        target=f"vllm.v1.worker.worker_base:WorkerBase.{function.__name__}",
        expects=None,
        why=why,
        remove_when="upstream stages weights beside the live ones",
        around=lambda _: function,
    )


PATCHES = [
    _added(inflight_attach, "ranks report through shared memory"),
    _added(inflight_order, "orders for the staging thread return at once"),
    _added(inflight_flip, "the one RPC of a commit"),
    _added(inflight_adapter, "an adapter is loaded on every rank or on none"),
    _added(inflight_read, "weights can be compared with a trainer's, rank by rank"),
]
