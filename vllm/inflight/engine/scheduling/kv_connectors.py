"""KV connectors: KV that leaves the engine must not return under other weights.

| a connector that                        | at a commit                          |
|-----------------------------------------|--------------------------------------|
| keys its KV by the engine's block hashes| nothing to do: hashes have our salt  |
| has keys of its own, and `reset_cache`  | its cache is dropped; requests must  |
|                                         | not stay in place                    |
| has keys of its own, no `reset_cache`   | updates are rejected                 |

Epochs begin at 0 in every engine. So with a connector the salt also has a nonce.
"""

from __future__ import annotations

import secrets
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine import executors
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.errors import Conflict, PauseConflict
from vllm.inflight.update import PauseMode

HASHED = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""Connectors that look KV up by `Request.block_hashes` alone."""


def nonce_for(connector: upstream.KVConnectorBase_V1 | None) -> str:
    """A nonce that makes this engine's salts unique; empty without a connector."""
    return "" if connector is None else f".{secrets.token_hex(8)}"


def check_connectors(scheduler: upstream.Scheduler) -> None:
    """Raise `Conflict` if a connector could return KV of older weights."""
    for each in _apart(scheduler):
        if not _can_reset(each):
            raise Conflict(
                f"the KV connector {type(each).__name__} keys KV by tokens alone and "
                "cannot drop it, so new weights would read KV of old ones; start the "
                "engine without it, or with --inflight-prefix-cache shared"
            )


def default_mode(scheduler: upstream.Scheduler) -> str:
    """The mode of a commit or rollback that names none: `in_place` if possible."""
    try:
        check_commit(scheduler, PauseMode.IN_PLACE)
    except PauseConflict:
        return PauseMode.RETRACT.value
    return PauseMode.IN_PLACE.value


def check_commit(scheduler: upstream.Scheduler, mode: PauseMode) -> None:
    """Raise `PauseConflict` if requests could save KV of old weights after a commit."""
    num_running = len(scheduler.running) if mode is PauseMode.IN_PLACE else 0
    # Waiting requests that hold KV: it still arrives, or belongs to a session.
    num_waiting = len(SchedulerState.of(scheduler).waiting.holding_kv())
    if mode is PauseMode.ABORT or (mode is PauseMode.WAIT and scheduler.running):
        num_waiting = 0  # all are aborted, or checked again when none runs
    for each in _apart(scheduler) if num_running + num_waiting else ():
        instead = "'abort'" if num_waiting else "'retract', 'abort' or 'wait'"
        raise PauseConflict(
            f"the KV connector {type(each).__name__} keys KV by tokens alone, and "
            f"{num_running + num_waiting} requests would keep saving KV of the old "
            f"weights in it; use mode {instead}"
        )


def drop(scheduler: upstream.Scheduler, in_flight: executors.InFlight | None) -> None:
    """Drop the caches of connectors with keys of their own.

    Raises:
        Conflict: a connector did not drop its cache.
        EngineFault: a step in flight has failed.

    """
    for each in _apart(scheduler):
        executors.wait_for_steps(in_flight)  # their KV is saved as well
        if each.reset_cache() is not True:
            raise Conflict(
                f"the KV connector {type(each).__name__} did not drop its cache, so "
                "the live weights have not changed; try again when its transfers are "
                "over"
            )


def _apart(scheduler: upstream.Scheduler) -> list[Any]:
    """The connectors with keys of their own; none if requests may read old KV."""
    if SchedulerState.of(scheduler).policy.oldest is None:
        return []
    parts = _parts(scheduler.connector)
    return [each for each in parts if type(each).__name__ not in HASHED]


def _parts(connector: upstream.KVConnectorBase_V1 | None) -> list[Any]:
    """The connector, or the connectors that it consists of."""
    if connector is None:
        return []
    return list(getattr(connector, "_connectors", [connector]))


def _can_reset(connector: upstream.KVConnectorBase_V1) -> bool:
    base = upstream.KVConnectorBase_V1
    return type(connector).reset_cache is not base.reset_cache
