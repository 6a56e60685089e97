"""LoRA adapters: they load on all ranks or on none, and their loads are counted.

A worker loads an adapter at `add_lora`, or when the first request for it comes. It
loads the adapter again at `load_inplace`, or under another number after an unload.
vLLM's block hashes contain name and path, which are then the same. The KV differs. So
loads are counted by name. The count is part of a request's prefix-cache namespace and
of its version stamp.

An adapter is loaded between two steps, before its request gets to the scheduler. So an
adapter that cannot be loaded ends that request only. The workers keep it in host memory
until no request needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec.structs import replace

from vllm.inflight import upstream
from vllm.inflight.engine.executors import asking
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.engine.scheduling.version_stamp import Loads
from vllm.inflight.engine.step_queue import whole
from vllm.inflight.errors import EngineFault, InflightError, Malformed
from vllm.inflight.worker.lora import Key, allowed, key_of

logger = upstream.init_logger(__name__)


def add(
    core: upstream.EngineCore,
    adapter: upstream.LoRARequest,
    wait_for_steps: Callable[[Any], object],
) -> bool:
    """Load an adapter on the workers of an engine core, and keep it there.

    Args:
        core: the engine core; call this between two steps.
        adapter: the adapter.
        wait_for_steps: waits for the steps of a batch queue, see `Ranks`.

    Returns:
        whether there was something to load.

    Raises:
        Forbidden: its files are outside of the allowed folders.
        Malformed: a rank cannot read it.
        EngineFault: a rank has read it and could not load it.

    """
    adapters = SchedulerState.of(core.scheduler).adapters
    adapter = allowed(adapter, core.vllm_config)
    # Steps that are scheduled from here on use the new adapter.
    wait_for_steps(core.batch_queue)
    needed = adapters.needed(key_of(adapter))
    is_new = load_everywhere(core.model_executor, adapter, needed)
    adapters.keep(key_of(adapter))
    if is_new:
        adapters.load(adapter)
        adapters.note_files(adapter)
    return is_new


def admit(
    core: upstream.EngineCore,
    request: upstream.Request,
    wait_for_steps: Callable[[Any], object],
) -> str | None:
    """Load the adapter of a request, unless the workers keep it already.

    Args:
        core: the engine core of the request.
        request: the request, in the scheduler's form; its `load_inplace` becomes False.
        wait_for_steps: waits for the steps of a batch queue, see `Ranks`.

    Returns:
        why the adapter cannot be loaded; None if the request may be scheduled.

    """
    adapter = request.lora_request
    adapters = SchedulerState.of(core.scheduler).adapters
    if adapter is None or adapters.keeps(adapter):
        return None
    try:
        add(core, adapters.from_last_files(adapter), wait_for_steps)
    except InflightError as error:
        logger.error("request %s is aborted: %s", request.request_id, error.message)
        return error.message
    request.lora_request = replace(adapter, load_inplace=False)
    return None


def load_everywhere(
    executor: upstream.Executor,
    adapter: upstream.LoRARequest,
    needed: Collection[Key] | None = None,
) -> bool:
    """Load an adapter on every rank, or change it on none.

    Args:
        executor: the executor of the ranks.
        adapter: the adapter.
        needed: the adapters that ranks keep in host memory; None for all.

    Returns:
        whether there was something to load.

    Raises:
        Malformed: a rank cannot read it.
        EngineFault: a rank has read it and could not load it.

    """

    def ask(move: str, *more: object) -> list[dict[str, Any]]:
        args = (move, adapter, *more)
        with asking(executor):
            replies: list[dict[str, Any]] = executor.collective_rpc(
                "inflight_adapter", args=args
            )
        return replies

    name = adapter.lora_name
    try:
        read = ask("propose", needed)
        if failed := [reply["error"] for reply in read if "error" in reply]:
            raise Malformed(
                f"adapter {name!r} cannot be loaded, and an earlier load of that name "
                f"stays: {failed[0]}"
            )
        if not any(reply["ok"] for reply in read):
            return False
        with whole():
            try:
                taken = ask("take")
            except BaseException:  # Ctrl-C while a rank does not answer
                ask("put_back")
                raise
            failed = [reply["error"] for reply in taken if "error" in reply]
            back = ask("put_back") if failed else []
        if failed:
            lost = [reply["error"] for reply in back if "error" in reply]
            what = f"; and its earlier load is lost: {lost[0]}" if lost else ""
            raise EngineFault(
                f"adapter {name!r} does not fit, and no rank has it: {failed[0]}{what}"
            )
        return True
    finally:
        ask("end")


class Adapters:
    """The LoRA adapters of one engine core.

    Args:
        requests: the scheduler's requests by id.
        num_idle: how many adapters the workers keep that no request needs.

    """

    def __init__(self, requests: Mapping[str, Any], num_idle: int = 1) -> None:
        self._requests = requests
        self._num_idle = num_idle
        self._kept: dict[Key, None] = {}
        """The adapters that workers keep; the last used one is at the end."""
        self._files: dict[Key, Any] = {}
        """The request of the last load of each adapter."""
        self._num_loads: Counter[str] = Counter()
        self._loads: dict[Key, int] = {}
        """The load number of each adapter; its first load is 0."""
        self._listed: set[Key] = set()
        self.replaced: Loads = ()
        """The adapters of `requests` whose load number is not 0.

        A change makes a new tuple, so that the scheduler can compare by identity. Every
        step carries it.
        """

    def load(self, adapter: upstream.LoRARequest) -> None:
        """Count a load of `adapter`, if the workers are about to load it."""
        key = adapter.lora_name, adapter.lora_int_id
        if adapter.load_inplace or key not in self._loads:
            self._count(key)
            self._list()
        elif self._loads[key] and key not in self._listed:
            self._list()

    def keeps(self, adapter: upstream.LoRARequest) -> bool:
        """Whether the workers keep `adapter` and do not have to load it again."""
        if adapter.load_inplace or key_of(adapter) not in self._kept:
            return False
        self.keep(key_of(adapter))
        return True

    def keep(self, key: Key) -> None:
        """Note that the workers keep an adapter, which is used now."""
        self._kept.pop(key, None)
        self._kept[key] = None

    def needed(self, key: Key) -> list[Key]:
        """The adapters that workers have to keep when `key` is loaded.

        These are the adapters of current requests, and the last used of the others.
        """
        adapters = (request.lora_request for request in self._requests.values())
        live = {key_of(adapter) for adapter in adapters if adapter is not None}
        idle = [each for each in self._kept if each not in live and each != key]
        kept = {*idle[len(idle) - self._num_idle :]} if self._num_idle else set()
        if key in self._kept:
            kept.add(key)
        self._kept = {each: None for each in self._kept if each in live | kept}
        return sorted(live | kept)

    def note_files(self, adapter: upstream.LoRARequest) -> None:
        """Note which files an adapter was loaded from."""
        self._files[key_of(adapter)] = replace(adapter, load_inplace=False)

    def from_last_files(self, adapter: upstream.LoRARequest) -> Any:
        """The files to load for a request whose adapter is not in memory.

        The request names the files that its adapter had at its arrival. A later load
        may have used other files. Those are read, because name and number identify the
        adapter.
        """
        if adapter.load_inplace:
            return adapter
        return self._files.get(key_of(adapter), adapter)

    def drop(self, number: int) -> None:
        """Note that the workers have unloaded the adapter with this number.

        Current requests go on with the adapter in host memory. A request that comes
        after them loads it again.
        """
        self._kept = {key: None for key in self._kept if key[1] != number}
        self._files = {k: each for k, each in self._files.items() if k[1] != number}
        for key in [key for key in self._loads if key[1] == number]:
            self._count(key)
        self._list()

    def _count(self, key: Key) -> None:
        self._loads[key] = self._num_loads[key[0]]
        self._num_loads[key[0]] += 1

    def _list(self) -> None:
        adapters = (request.lora_request for request in self._requests.values())
        keys = {(a.lora_name, a.lora_int_id) for a in adapters if a is not None}
        self._listed = {key for key in keys if self._loads.get(key)}
        self.replaced = tuple((*key, self._loads[key]) for key in sorted(self._listed))

    def load_of(self, adapter: upstream.LoRARequest) -> int:
        """The current or next load number of `adapter`; 0 without an adapter."""
        if adapter is None:
            return 0
        key = adapter.lora_name, adapter.lora_int_id
        return self._loads.get(key, self._num_loads[adapter.lora_name])
