"""KV connectors: KV that leaves the engine must not come back under other weights.

| a connector that                        | at a commit                          |
|-----------------------------------------|--------------------------------------|
| keys its KV by the engine's block hashes| nothing: the hashes have our salt    |
| has keys of its own, and `reset_cache`  | its cache is dropped, or no commit   |
| has keys of its own, and nothing else   | updates are refused                  |

Epochs begin at 0 with every engine, so where KV leaves it the salt has a nonce too.
"""

from __future__ import annotations

import secrets
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import Conflict

HASHED = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""Connectors that look KV up by `Request.block_hashes` alone."""


def nonce_for(connector: Any) -> str:
    """What tells this engine's salts from another's; empty where KV stays inside."""
    return "" if connector is None else f".{secrets.token_hex(8)}"


def check(connector: Any, *, is_shared: bool) -> None:
    """Raise `Conflict` if KV of older weights could come back through `connector`.

    Args:
        is_shared: new requests may read old KV anyway (`shared`).

    """
    if is_shared:
        return
    for each in _parts(connector):
        if type(each).__name__ not in HASHED and not _can_reset(each):
            raise Conflict(
                f"the KV connector {type(each).__name__} keys KV by tokens alone and "
                "cannot drop it, so new weights would read KV of old ones; serve "
                "without it, or with --inflight-prefix-cache shared"
            )


def drop(connector: Any, *, is_shared: bool) -> None:
    """Drop what connectors with keys of their own hold; raises if one does not."""
    if is_shared:
        return
    for each in _parts(connector):
        if type(each).__name__ not in HASHED and each.reset_cache() is not True:
            raise Conflict(
                f"the KV connector {type(each).__name__} did not drop its cache; "
                "nothing has been switched, try again when its transfers are over"
            )


def _parts(connector: Any) -> list[Any]:
    """The connector, or those that it is made of."""
    if connector is None:
        return []
    return list(getattr(connector, "_connectors", [connector]))


def _can_reset(connector: Any) -> bool:
    base = upstream.KVConnectorBase_V1
    return type(connector).reset_cache is not base.reset_cache
