"""One rank's side of loading an adapter: proposed, then taken, or neither.

An adapter is read while the one of its number stays where it is. When all ranks have
read theirs, all take it, in one turn of the engine core; a rank that cannot puts the
ones before back. The reading and the taking are upstream's.

What was taken is kept in the host's memory as long as the engine core names it.
Upstream lets an adapter go to make room for another, and reads it again in the middle
of a step that needs it. Its files may be gone by then, or be others. So no step reads a
file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vllm.inflight.config import InflightConfig
from vllm.inflight.transport.files.allowed_paths import resolved_folder

Key = tuple[str, int]
"""Name and number of an adapter."""


class AdapterProposal:
    """An adapter that a rank has read and does not use yet."""

    def __init__(self, manager: Any, request: Any) -> None:
        self._manager = manager
        self._request = request
        self._read = manager._load_adapter(request)
        self._there = manager._adapter_manager.list_adapters()
        """Number → adapter, in the host's memory; the one used least recently first."""
        self._kept = _kept(manager)
        self._pinned = _pinned(manager._adapter_manager)

    def take(self) -> None:
        """Put it into its slot; what fails leaves the ones before there."""
        try:
            self._put(self._read)
            _pin(self._manager._adapter_manager, self._pinned)
        except BaseException:  # Ctrl-C, too
            self.put_back()
            raise
        _keep(self._manager, key_of(self._request), self._read)

    def put_back(self) -> None:
        """Undo `take`, which may have let another adapter go to make room."""
        registry = self._manager._adapter_manager
        before = self._there.get(self._request.lora_int_id)
        try:
            if before is None:
                self._manager.remove_adapter(self._request.lora_int_id)
            else:
                self._put(before)
            for adapter in self._there.values():
                registry.add_adapter(adapter)
            _pin(registry, self._pinned)
        finally:
            self._manager._inflight_kept = self._kept

    def _put(self, adapter: Any) -> None:
        # Upstream's own way of taking an adapter, with one that has been read.
        self._manager._load_adapter = lambda _: adapter
        try:
            self._manager.add_adapter(self._request)
        finally:
            del self._manager._load_adapter


def step(
    worker: Any, move: str, request: Any, needed: Collection[Key] | None = None
) -> bool:
    """Make one move of a transaction on this rank.

    Args:
        worker: of this rank.
        move: `propose`, `take`, `put_back` or `end`.
        request: the adapter's, as upstream names it.
        needed: with `propose`, the adapters that stay in the host's memory; others that
            were kept are let go. None: all stay.

    Returns:
        whether there is something to take.

    Raises:
        Forbidden: its files lie outside of the folders that are allowed.

    """
    if move == "propose":
        manager = worker.model_runner.lora_manager
        if needed is not None:
            kept = {key: each for key, each in _kept(manager).items() if key in needed}
            manager._inflight_kept = kept
        worker._inflight_proposal = None
        if not _is_there(manager, request):
            judged = allowed(request, worker.vllm_config)
            worker._inflight_proposal = AdapterProposal(manager, judged)
    proposal: AdapterProposal | None = getattr(worker, "_inflight_proposal", None)
    if proposal is None:
        return False
    if move == "take":
        proposal.take()
    elif move == "put_back":
        proposal.put_back()
    elif move == "end":
        worker._inflight_proposal = None
    return True


def key_of(request: Any) -> Key:
    """The name and number of the adapter that a request names."""
    return request.lora_name, request.lora_int_id


def allowed(request: Any, vllm_config: Any) -> Any:
    """`request` with the folder that was judged, which is the one that is opened.

    vLLM looks for a path that is not absolute in several places: below the working
    directory, below a home directory, at a hub. So it has to be absolute while updates
    may read some folders only, and each file in it has to lie in one of these.

    Raises:
        Forbidden: the folder, or a file in it, lies elsewhere.
        Malformed: it cannot be a path.

    """
    if not (folders := InflightConfig.of(vllm_config).allowed_paths):
        return request
    folder = resolved_folder(Path(request.lora_path), folders)
    return replace(request, lora_path=str(folder))


def kept_or_read(manager: Any, request: Any, read: Any) -> Any:
    """The adapter of a request from the host's memory, else as `read(request)` has it.

    Args:
        manager: upstream's, of one rank.
        request: the adapter's, as upstream names it.
        read: upstream's own reading of its files.

    """
    found = None if request.load_inplace else _kept(manager).get(key_of(request))
    return read(request) if found is None else found


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
    for adapter in there.values():
        registry.add_adapter(adapter)
    _pin(registry, pinned)


def _is_there(manager: Any, request: Any) -> bool:
    """Whether nothing has to be read; what is in a slot is kept from now on."""
    if request.load_inplace:
        return False
    key = key_of(request)
    if key in _kept(manager):
        return True
    there = manager._adapter_manager.list_adapters().get(request.lora_int_id)
    if there is None:
        return False
    _keep(manager, key, there)
    return True


def _pinned(registry: Any) -> set[int]:
    """The numbers of those that make room for no others."""
    return set(registry._registered_adapters.pinned_items)


def _pin(registry: Any, numbers: set[int]) -> None:
    for number in numbers - _pinned(registry):  # who came in the place of one is not
        registry.pin_adapter(number)


def _kept(manager: Any) -> dict[Key, Any]:
    """Adapter → what was read of it, in the host's memory."""
    known: dict[Key, Any] = getattr(manager, "_inflight_kept", {})
    return known


def _keep(manager: Any, key: Key, adapter: Any) -> None:
    manager._inflight_kept = _kept(manager) | {key: adapter}
