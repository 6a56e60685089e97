"""One rank's side of loading an adapter: proposed, then taken, or neither.

An adapter is read while the one of its number stays where it is. When all ranks have
read theirs, all take it, in one turn of the engine core; a rank that cannot puts the
one before back. The reading and the taking are upstream's.
"""

from __future__ import annotations

from typing import Any


class Proposal:
    """An adapter that a rank has read and does not use yet."""

    def __init__(self, manager: Any, request: Any) -> None:
        self._manager = manager
        self._request = request
        self._read = manager._load_adapter(request)
        self._before = manager._adapter_manager.get_adapter(request.lora_int_id)
        """That of the same number, as it is in the host's memory; None without one."""

    def take(self) -> None:
        """Put it into its slot; what fails leaves the one before there."""
        try:
            self._put(self._read)
        except Exception:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Undo `take`."""
        if self._before is None:
            self._manager.remove_adapter(self._request.lora_int_id)
            return
        registry = self._manager._adapter_manager
        registry._create_merged_loras_inplace = lambda _: None  # it was, when it came
        try:
            self._put(self._before)
        finally:
            del registry._create_merged_loras_inplace

    def _put(self, adapter: Any) -> None:
        # Upstream's own way of taking an adapter, with one that has been read.
        self._manager._load_adapter = lambda _: adapter
        try:
            self._manager.add_adapter(self._request)
        finally:
            del self._manager._load_adapter


def step(worker: Any, move: str, request: Any) -> bool:
    """Make one move of a transaction on this rank.

    Args:
        worker: of this rank.
        move: `propose`, `take`, `put_back` or `end`.
        request: the adapter's, as upstream names it.

    Returns:
        whether there is something to take.

    """
    if move == "propose":
        manager = worker.model_runner.lora_manager
        known = request.lora_int_id in manager.list_adapters()
        is_idle = known and not request.load_inplace
        worker._inflight_proposal = None if is_idle else Proposal(manager, request)
    proposal: Proposal | None = getattr(worker, "_inflight_proposal", None)
    if proposal is None:
        return False
    if move == "take":
        proposal.take()
    elif move == "put_back":
        proposal.put_back()
    elif move == "end":
        worker._inflight_proposal = None
    return True
