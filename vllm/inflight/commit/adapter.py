"""One rank's side of loading an adapter: proposed, then taken, or neither.

An adapter is read while the one of its number stays where it is. When all ranks have
read theirs, all take it, in one turn of the engine core; a rank that cannot puts the
ones before back. The reading and the taking are upstream's.

A request names the files that its adapter had when it was asked for. If vLLM reads the
adapter again for it, as it does for one that had to make room for others, those of the
last load are read: name and number stand for one adapter, whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace


class Proposal:
    """An adapter that a rank has read and does not use yet."""

    def __init__(self, manager: Any, request: Any) -> None:
        self._manager = manager
        self._request = request
        self._read = manager._load_adapter(request)
        self._there = manager._adapter_manager.list_adapters()
        """Number → adapter, in the host's memory; the one used least recently first."""
        self._named = dict(_loaded(manager))
        self._pinned = _pinned(manager._adapter_manager)

    def take(self) -> None:
        """Put it into its slot; what fails leaves the ones before there."""
        try:
            self._put(self._read)
            _pin(self._manager._adapter_manager, self._pinned)
        except BaseException:  # Ctrl-C, too
            self.put_back()
            raise
        _note(self._manager, self._request)

    def put_back(self) -> None:
        """Undo `take`, which may have let another adapter go to make room."""
        registry = self._manager._adapter_manager
        before = self._there.get(self._request.lora_int_id)
        try:
            with _merged(registry):
                if before is None:
                    self._manager.remove_adapter(self._request.lora_int_id)
                else:
                    self._put(before)
                for adapter in self._there.values():
                    registry.add_adapter(adapter)
            _pin(registry, self._pinned)
        finally:
            self._manager._inflight_loaded = self._named

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


def last_loaded(manager: Any, requests: Iterable[Any]) -> set[Any]:
    """The adapters of a step, each from the files that it was last loaded from."""
    for request in requests:
        if request is not None and request.load_inplace:
            _note(manager, request)
    loaded = _loaded(manager)
    return {
        request
        if request is None or request.load_inplace
        else loaded.get((request.lora_name, request.lora_int_id), request)
        for request in requests
    }


def write_again(runner: Any) -> None:
    """Have all adapters written anew, since the memory of their slots was lost."""
    with kept(runner):
        runner.reset_lora_state()


@contextmanager
def kept(runner: Any) -> Iterator[None]:
    """Around what lets all adapters go: they are there again when it has succeeded.

    Upstream lets them go where it writes below them, and they would be read from their
    files, which may be gone by now, or others.
    """
    if not runner.lora_config:
        yield
        return
    registry = runner.lora_manager._adapter_manager
    there, pinned = registry.list_adapters(), _pinned(registry)
    yield
    with _merged(registry):
        for adapter in there.values():
            registry.add_adapter(adapter)
    _pin(registry, pinned)


@contextmanager
def _merged(registry: Any) -> Iterator[None]:
    """Take adapters that it had before: they were merged when they came."""
    registry._create_merged_loras_inplace = lambda _: None
    try:
        yield
    finally:
        del registry._create_merged_loras_inplace


def _pinned(registry: Any) -> set[int]:
    """The numbers of those that make room for no others."""
    return set(registry._registered_adapters.pinned_items)


def _pin(registry: Any, numbers: set[int]) -> None:
    for number in numbers - _pinned(registry):  # who came in the place of one is not
        registry.pin_adapter(number)


def let_go(manager: Any, number: int) -> None:
    """The next request of this number says which files it is loaded from."""
    known = _loaded(manager)
    manager._inflight_loaded = {k: r for k, r in known.items() if k[1] != number}


def _loaded(manager: Any) -> dict[tuple[str, int], Any]:
    """(name, number) → the request that it was last loaded with, if by itself."""
    known: dict[tuple[str, int], Any] = getattr(manager, "_inflight_loaded", {})
    return known


def _note(manager: Any, request: Any) -> None:
    once = replace(request, load_inplace=False)
    key = request.lora_name, request.lora_int_id
    manager._inflight_loaded = _loaded(manager) | {key: once}
