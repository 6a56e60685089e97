"""Adapters: loaded on all ranks or on none, and how often each was loaded.

A worker loads an adapter when it is asked to (`add_lora`), or when a request comes of
one that it does not have. It loads an adapter again under the same name when
`load_inplace` says so, or under another number after the name was let go. vLLM's block
hashes know the name and the path, which are the same then; the KV is not. So loads are
counted by name, and the count is a part of a request's root, and of what its tokens are
stamped with.

An adapter is loaded before its request gets to the scheduler, in a turn of its own. So
what cannot be loaded ends that request, and no step. The workers keep it in the host's
memory until no request needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.executors import asking
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.engine.scheduling.version_stamp import Loads
from vllm.inflight.engine.step_queue import whole
from vllm.inflight.errors import EngineFault, InflightError, Malformed
from vllm.inflight.worker.lora import Key, allowed, key_of

logger = upstream.init_logger(__name__)


def add(controller: EngineContext, adapter: upstream.LoRARequest) -> bool:
    """Load an adapter for an engine core, and have the workers keep it.

    Args:
        controller: of the engine whose workers load it, in a turn of its own.
        adapter: as upstream names it.

    Returns:
        whether there was something to load.

    Raises:
        Forbidden: its files lie outside of the folders that are allowed.
        Malformed: a rank cannot read it.
        EngineFault: a rank could read it, and could not take it.

    """
    core = controller.core
    adapters = SchedulerState.of(core.scheduler).adapters
    adapter = allowed(adapter, core.vllm_config)
    # Whoever is scheduled from here on has the new one.
    controller.ranks.wait_for_steps(core.batch_queue)
    needed = adapters.needed(key_of(adapter))
    is_new = load_everywhere(core.model_executor, adapter, needed)
    adapters.keep(key_of(adapter))
    if is_new:
        adapters.load(adapter)
        adapters.note_files(adapter)
    return is_new


def admit(controller: EngineContext, request: upstream.Request) -> str | None:
    """Have the adapter of a request loaded, if the workers do not keep it already.

    Args:
        controller: of the engine core that the request has come to.
        request: of the scheduler's; `load_inplace` is done with afterwards.

    Returns:
        why its adapter cannot be had; None if the request may be scheduled.

    """
    adapter = request.lora_request
    adapters = SchedulerState.of(controller.core.scheduler).adapters
    if adapter is None or adapters.keeps(adapter):
        return None
    try:
        add(controller, adapters.from_last_files(adapter))
    except InflightError as error:
        logger.error("request %s is given up: %s", request.request_id, error.message)
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
        executor: of the ranks.
        adapter: as upstream names it.
        needed: the adapters that ranks go on keeping in the host's memory; None: all.

    Returns:
        whether there was something to load.

    Raises:
        Malformed: a rank cannot read it.
        EngineFault: a rank could read it, and could not take it.

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
                f"adapter {name!r} cannot be loaded, and what was loaded under its "
                f"name stays: {failed[0]}"
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
            what = f"; and what was before is lost: {lost[0]}" if lost else ""
            raise EngineFault(
                f"adapter {name!r} does not fit, and no rank has it: {failed[0]}{what}"
            )
        return True
    finally:
        ask("end")


class Adapters:
    """Those of one engine core, as `LoRARequest`s name them.

    Args:
        requests: of its scheduler, by id.
        num_idle: how many adapters workers keep that no request needs.

    """

    def __init__(self, requests: Mapping[str, Any], num_idle: int = 1) -> None:
        self._requests = requests
        self._num_idle = num_idle
        self._kept: dict[Key, None] = {}
        """Those that workers keep; the one that was asked for last at the end."""
        self._files: dict[Key, Any] = {}
        """How each was asked for when it was loaded last."""
        self._num_loads: Counter[str] = Counter()
        self._loads: dict[Key, int] = {}
        """Which load of its name each is; the first one is 0."""
        self._listed: set[Key] = set()
        self.replaced: Loads = ()
        """Those of `requests` that are not the first load of their name.

        Another object at a change. It travels with every step.
        """

    def load(self, adapter: upstream.LoRARequest) -> None:
        """Note that workers are about to load `adapter`, if they will."""
        key = adapter.lora_name, adapter.lora_int_id
        if adapter.load_inplace or key not in self._loads:
            self._count(key)
            self._list()
        elif self._loads[key] and key not in self._listed:
            self._list()

    def keeps(self, adapter: upstream.LoRARequest) -> bool:
        """Whether the workers have `adapter`, as it is asked for, in memory."""
        if adapter.load_inplace or key_of(adapter) not in self._kept:
            return False
        self.keep(key_of(adapter))
        return True

    def keep(self, key: Key) -> None:
        """Note that workers keep an adapter, and that it was asked for now."""
        self._kept.pop(key, None)
        self._kept[key] = None

    def needed(self, key: Key) -> list[Key]:
        """The adapters that workers have to go on keeping when `key` is loaded.

        Those of requests that run or wait, and of the others those asked for last.
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
        """How a request's adapter is read, if memory has nothing of it.

        A request names the files that its adapter had when it was asked for, and it may
        have waited since. Those of the last load are read: name and number stand for
        one adapter, whoever asks.
        """
        if adapter.load_inplace:
            return adapter
        return self._files.get(key_of(adapter), adapter)

    def drop(self, number: int) -> None:
        """Note that workers let the adapter of this number go.

        Those of its requests that there are go on with what workers keep of it, and it
        is read anew for those that come when they are through.
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
        """Which load of its name `adapter` is, or will be; 0 for no adapter."""
        if adapter is None:
            return 0
        key = adapter.lora_name, adapter.lora_int_id
        return self._loads.get(key, self._num_loads[adapter.lora_name])
