"""Changes in the clients of an engine core, so that several threads may call them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.patch.controllers import controller_of
from vllm.inflight.patch.records.record import Patch

PAUSED_STEP_S = 0.001


def _in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: upstream.EngineCoreClient, *args: object, **kwargs: object) -> Any:
        with controller_of(self.engine_core).step_queue.between():
            return original(self, *args, **kwargs)

    return call


def _get_output_in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_output(self: upstream.EngineCoreClient) -> Any:
        from vllm.inflight import upstream

        controller = controller_of(self.engine_core)
        if controller.pauses.is_paused:
            time.sleep(PAUSED_STEP_S)  # there is no output; let other threads run
        with controller.step_queue.stepping():
            if controller.drained_outputs:
                return (
                    controller.drained_outputs.pop(0).get(0)
                    or upstream.EngineCoreOutputs()
                )
            if not controller.undelivered_outputs:
                return original(self)
            last, controller.undelivered_outputs = controller.undelivered_outputs, []
            return upstream.EngineCoreOutputs(
                finished_requests={each.request_id for each in last}, outputs=last
            )

    return get_output


def _send_locked(original: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.Lock()

    def _send_input(
        self: upstream.EngineCoreClient, request_type: object, request: object
    ) -> None:
        # Socket and encoder are not thread-safe; the wait for a reply is.
        with lock:
            original(self, request_type, request)

    return _send_input


def _one_by_one(_: None) -> Any:
    def call_utility_each(
        self: upstream.EngineCoreClient, method: str, *args: object
    ) -> list[Any]:
        """A coroutine for each engine, so that each can be awaited by itself."""
        return [
            self._call_utility_async(method, *args, engine=engine)
            for engine in self.core_engines
        ]

    return call_utility_each


def _all_at_once(_: None) -> Any:
    async def call_utility_all_async(
        self: upstream.EngineCoreClient, method: str, *args: object
    ) -> list[Any]:
        """The results of all engines, in their order."""
        return await asyncio.gather(*self.call_utility_each(method, *args))

    return call_utility_all_async


_CLIENT = "vllm.v1.engine.core_client"

PATCHES = [
    Patch(
        target=f"{_CLIENT}:InprocClient.get_output",
        expects=("self",),
        why="a call from another thread must not interrupt a step",
        remove_when="upstream makes InprocClient safe for threads",
        around=_get_output_in_turn,
    ),
    Patch(
        target=f"{_CLIENT}:InprocClient.add_request",
        expects=("self", "request"),
        why="the scheduler is touched by one thread at a time",
        remove_when="upstream makes InprocClient safe for threads",
        around=_in_turn,
    ),
    Patch(
        target=f"{_CLIENT}:InprocClient.abort_requests",
        expects=("self", "request_ids"),
        why="the scheduler is touched by one thread at a time",
        remove_when="upstream makes InprocClient safe for threads",
        around=_in_turn,
    ),
    Patch(
        target=f"{_CLIENT}:InprocClient.sleep",
        expects=("self", "level", "mode"),
        why="an engine goes to sleep between two steps, whichever thread calls",
        remove_when="upstream makes InprocClient safe for threads",
        around=_in_turn,
    ),
    Patch(
        target=f"{_CLIENT}:InprocClient.wake_up",
        expects=("self", "tags"),
        why="an engine wakes up between two steps, whichever thread calls",
        remove_when="upstream makes InprocClient safe for threads",
        around=_in_turn,
    ),
    Patch(
        target=f"{_CLIENT}:InprocClient.release_kv_cache_memory",
        expects=("self",),
        why="an engine gives memory back between two steps, whichever thread says so",
        remove_when="upstream makes InprocClient safe for threads",
        around=_in_turn,
        since="0.31.0",
    ),
    *(
        Patch(
            target=f"{_CLIENT}:InprocClient.{method}",
            expects=("self", parameter),
            why="adapters are loaded and unloaded between two steps",
            remove_when="upstream makes InprocClient safe for threads",
            around=_in_turn,
        )
        for method, parameter in (
            ("add_lora", "lora_request"),
            ("remove_lora", "lora_id"),
        )
    ),
    Patch(
        target=f"{_CLIENT}:SyncMPClient._send_input",
        expects=("self", "request_type", "request"),
        why="updates come from another thread while generate() runs",
        remove_when="upstream makes SyncMPClient safe for threads",
        around=_send_locked,
    ),
    Patch(
        target=f"{_CLIENT}:AsyncMPClient.call_utility_each",
        expects=None,
        why="an engine that does not answer must not delay the metrics of others",
        remove_when="upstream can call a utility of a single engine",
        around=_one_by_one,
    ),
    Patch(
        target=f"{_CLIENT}:AsyncMPClient.call_utility_all_async",
        expects=None,
        why="upstream returns the result of the first engine alone before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=_all_at_once,
        before="0.32.0",
    ),
]
