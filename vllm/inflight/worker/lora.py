"""One rank's side of loading an adapter: propose, then take, or put back.

An adapter is read while the adapter that has its number stays in place. When all ranks
have read theirs, all take it in one turn of the step queue. If a rank cannot, all put
the adapters before back. The reading and the taking are upstream's.

A taken adapter is kept in host memory as long as the engine core names it. Upstream
drops adapters to make room for others, and reads them again in the middle of a step. By
then the files may be gone or changed. So no step reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vllm.inflight import upstream
from vllm.inflight.attached import AttachedOnDemand
from vllm.inflight.config import InflightConfig
from vllm.inflight.transport.files.allowed_paths import resolved_folder
from vllm.inflight.worker.worker_state import WorkerState

Key = tuple[str, int]
"""Name and number of an adapter."""


@dataclass(slots=True)
class KeptAdapters(AttachedOnDemand):
    """The adapters that upstream's manager of one rank has in host memory."""

    read: dict[Key, Any] = field(default_factory=dict)
    """Adapter → what was read of it."""


@dataclass(slots=True)
class MergedAdapter(AttachedOnDemand):
    """What upstream has done to an adapter in host memory."""

    is_merged: bool = False
    """Whether the modules that upstream packs into one have been merged."""


class AdapterProposal:
    """An adapter that a rank has read and does not use yet."""

    def __init__(
        self, manager: upstream.WorkerLoRAManager, request: upstream.LoRARequest
    ) -> None:
        self._manager = manager
        self._request = request
        self._read = manager._load_adapter(request)
        self._there = manager._adapter_manager.list_adapters()
        """Number → adapter in host memory; the least recently used first."""
        self._kept = _kept(manager)
        self._pinned = _pinned(manager._adapter_manager)

    def take(self) -> None:
        """Put the adapter into its slot; a failure leaves the adapters before there."""
        try:
            self._put(self._read)
            _pin(self._manager._adapter_manager, self._pinned)
        except BaseException:  # Ctrl-C, too
            self.put_back()
            raise
        _keep(self._manager, key_of(self._request), self._read)

    def put_back(self) -> None:
        """Undo `take`, which may have dropped another adapter to make room."""
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
            KeptAdapters.of(self._manager).read = self._kept

    def _put(self, adapter: object) -> None:
        # Upstream's own way to take an adapter, with the one that was read.
        self._manager._load_adapter = lambda _: adapter
        try:
            self._manager.add_adapter(self._request)
        finally:
            del self._manager._load_adapter


def step(
    worker: upstream.WorkerBase,
    move: str,
    request: upstream.LoRARequest,
    needed: Collection[Key] | None = None,
) -> bool:
    """Make one move of a transaction on this rank.

    Args:
        worker: of this rank.
        move: `propose`, `take`, `put_back` or `end`.
        request: the adapter's, as upstream names it.
        needed: with `propose`, the adapters that stay in host memory; other kept
            adapters are
            dropped. None: all stay.

    Returns:
        whether there is an adapter to take.

    Raises:
        Forbidden: the adapter's files lie outside of the allowed folders.

    """
    state = WorkerState.of(worker)
    if move == "propose":
        manager = worker.model_runner.lora_manager
        if needed is not None:
            kept = {key: each for key, each in _kept(manager).items() if key in needed}
            KeptAdapters.of(manager).read = kept
        state.proposal = None
        if not _is_there(manager, request):
            judged = allowed(request, worker.vllm_config)
            state.proposal = AdapterProposal(manager, judged)
    if (proposal := state.proposal) is None:
        return False
    if move == "take":
        proposal.take()
    elif move == "put_back":
        proposal.put_back()
    elif move == "end":
        state.proposal = None
    return True


def key_of(request: upstream.LoRARequest) -> Key:
    """The name and number of the adapter that a request names."""
    return request.lora_name, request.lora_int_id


def allowed(
    request: upstream.LoRARequest, vllm_config: upstream.VllmConfig
) -> upstream.LoRARequest:
    """`request` with the folder that was checked, which is the one that is opened.

    vLLM looks for a relative path in several places: below the working directory, below
    a home directory, at a hub. So the path has to be absolute while updates may read
    some folders only, and each file in it has to lie in one of these.

    Raises:
        Forbidden: the folder, or a file in it, lies elsewhere.
        Malformed: the value is no path.

    """
    if not (folders := InflightConfig.of(vllm_config).allowed_paths):
        return request
    folder = resolved_folder(Path(request.lora_path), folders)
    return replace(request, lora_path=str(folder))


def kept_or_read(
    manager: upstream.WorkerLoRAManager,
    request: upstream.LoRARequest,
    read: Callable[[upstream.LoRARequest], Any],
) -> Any:
    """The adapter of a request from host memory; if it is not there, `read(request)`.

    Args:
        manager: upstream's, of one rank.
        request: the adapter's, as upstream names it.
        read: upstream's own reading of its files.

    """
    found = None if request.load_inplace else _kept(manager).get(key_of(request))
    return read(request) if found is None else found


def write_again(runner: upstream.GPUModelRunner) -> None:
    """Write all adapters again, since the memory of their slots was lost."""
    with kept(runner):
        runner.reset_lora_state()


@contextmanager
def kept(runner: upstream.GPUModelRunner) -> Iterator[None]:
    """Context around a call that drops all adapters: afterwards they are there again.

    Upstream drops them when it writes the weights below them. It would read them again
    from their files, which may be gone or changed by then.
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


def _is_there(
    manager: upstream.WorkerLoRAManager, request: upstream.LoRARequest
) -> bool:
    """Whether nothing has to be read; an adapter in a slot is kept from now on."""
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


def _pinned(registry: upstream.LoRAModelManager) -> set[int]:
    """The numbers of the adapters that upstream never drops for others."""
    return set(registry._registered_adapters.pinned_items)


def _pin(registry: upstream.LoRAModelManager, numbers: set[int]) -> None:
    for number in numbers - _pinned(
        registry
    ):  # the adapter that replaced a pinned one is not pinned
        registry.pin_adapter(number)


def _kept(manager: upstream.WorkerLoRAManager) -> dict[Key, Any]:
    """Adapter → what was read of it, in host memory."""
    return KeptAdapters.of(manager).read


def _keep(manager: upstream.WorkerLoRAManager, key: Key, adapter: object) -> None:
    KeptAdapters.of(manager).read = _kept(manager) | {key: adapter}
