"""Dropping what was computed: prefix cache, connector, encoder and media caches."""

from __future__ import annotations

from typing import Any

from vllm.inflight.errors import PauseConflict


def flush(core: Any, *, media: bool) -> dict[str, Any]:
    """Drop every cache of an engine that holds no request's KV.

    Args:
        core: upstream's.
        media: also what was made of pictures and sounds before any weight saw them.
            The front end has the same under the same names, and sends the name alone
            of what it believes to be here: it has to drop its own first.

    Returns:
        `blocks`: cached KV blocks dropped. `connector`: True if its cache was
        dropped, False if it cannot say so, None without one. `encoder_outputs`:
        of media, dropped.

    Raises:
        PauseConflict: blocks are in use, or the connector refused.

    """
    scheduler = core.scheduler
    manager = scheduler.kv_cache_manager
    num_blocks = len(manager.block_pool.cached_block_hash_to_block)
    num_encoded = len(scheduler.encoder_cache_manager.cached)
    if not scheduler.reset_prefix_cache():
        raise PauseConflict(
            "flush_cache found blocks in use; pause with 'retract' and flush again"
        )
    is_dropped = _flush_connector(scheduler.connector)
    if media:
        core.reset_mm_cache()
    core.reset_encoder_cache()
    return {
        "blocks": num_blocks,
        "connector": is_dropped,
        "encoder_outputs": num_encoded,
    }


def _flush_connector(connector: Any) -> bool | None:
    if connector is None:
        return None
    answer = connector.reset_cache()
    if answer is False:
        raise PauseConflict(
            f"{type(connector).__name__} could not reset its cache; try again when its "
            "transfers are over"
        )
    # None is upstream's "not implemented": what it holds is still there.
    return answer is True
