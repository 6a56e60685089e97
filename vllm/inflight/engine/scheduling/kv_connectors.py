"""KV connectors: KV that leaves the engine must not come back under other weights.

| a connector that                        | at a commit                          |
|-----------------------------------------|--------------------------------------|
| keys its KV by the engine's block hashes| nothing: the hashes have our salt    |
| has keys of its own, and `reset_cache`  | its cache is dropped, or no commit;  |
|                                         | nothing may run on in place          |
| has keys of its own, and nothing else   | updates are refused                  |

Epochs begin at 0 with every engine, so where KV leaves it the salt has a nonce too.
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
    """What tells this engine's salts from another's; empty where KV stays inside."""
    return "" if connector is None else f".{secrets.token_hex(8)}"


def check_connectors(scheduler: upstream.Scheduler) -> None:
    """Raise `Conflict` if KV of older weights could come back through a connector."""
    for each in _apart(scheduler):
        if not _can_reset(each):
            raise Conflict(
                f"the KV connector {type(each).__name__} keys KV by tokens alone and "
                "cannot drop it, so new weights would read KV of old ones; serve "
                "without it, or with --inflight-prefix-cache shared"
            )


def default_mode(scheduler: upstream.Scheduler) -> str:
    """That of a commit or a rollback which names none: `in_place`, if it can be."""
    try:
        check_commit(scheduler, PauseMode.IN_PLACE)
    except PauseConflict:
        return PauseMode.RETRACT.value
    return PauseMode.IN_PLACE.value


def check_commit(scheduler: upstream.Scheduler, mode: PauseMode) -> None:
    """Raise `PauseConflict` if KV of older weights could get there after a commit."""
    num_running = len(scheduler.running) if mode is PauseMode.IN_PLACE else 0
    # Those that wait hold KV that is on its way, or of a session between two inputs.
    num_waiting = len(scheduler.kv_holding_waiting)
    if mode is PauseMode.ABORT or (mode is PauseMode.WAIT and scheduler.running):
        num_waiting = 0  # none is left, or asked about again when none runs
    for each in _apart(scheduler) if num_running + num_waiting else ():
        instead = "'abort'" if num_waiting else "'retract', 'abort' or 'wait'"
        raise PauseConflict(
            f"the KV connector {type(each).__name__} keys KV by tokens alone, and "
            f"{num_running + num_waiting} requests that keep theirs would go on "
            f"bringing it KV of the old weights; use mode {instead}"
        )


def drop(scheduler: upstream.Scheduler, in_flight: executors.InFlight | None) -> None:
    """Drop what connectors with keys of their own hold.

    Raises:
        Conflict: one does not.
        EngineFault: a step in flight has failed.

    """
    for each in _apart(scheduler):
        executors.wait_for_steps(in_flight)  # what these compute is saved as well
        if each.reset_cache() is not True:
            raise Conflict(
                f"the KV connector {type(each).__name__} did not drop its cache; "
                "nothing has been switched, try again when its transfers are over"
            )


def _apart(scheduler: upstream.Scheduler) -> list[Any]:
    """Connectors with keys of their own; none if requests may read old KV anyway."""
    if SchedulerState.of(scheduler).policy.oldest is None:
        return []
    parts = _parts(scheduler.connector)
    return [each for each in parts if type(each).__name__ not in HASHED]


def _parts(connector: upstream.KVConnectorBase_V1 | None) -> list[Any]:
    """The connector, or those that it is made of."""
    if connector is None:
        return []
    return list(getattr(connector, "_connectors", [connector]))


def _can_reset(connector: upstream.KVConnectorBase_V1) -> bool:
    base = upstream.KVConnectorBase_V1
    return type(connector).reset_cache is not base.reset_cache
