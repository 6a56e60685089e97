"""The methods that pause an `AsyncLLM` and let it go on; those of `LLM` are made from
them, in `methods.blocking`.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight.api.door import Reply
from vllm.inflight.api.methods import control_of
from vllm.inflight.errors import Malformed

OUR_MODES = ("in_place", "retract")
"""Pauses that upstream has not: no caller of its expects them to drop the caches."""


async def pause_generation(
    self: Any,
    *,
    mode: str = "abort",
    wait_for_inflight_requests: bool | None = None,
    clear_cache: bool | None = None,
    flush_cache: bool | None = None,
    lease_s: float | None = None,
    owner: str | None = None,
) -> Reply:
    """Pause between two steps; modes `in_place` (`keep`), `retract`, `abort`, `wait`.

    Args:
        self: the engine.
        mode: what becomes of running requests; `keep` is upstream's `in_place`.
        wait_for_inflight_requests: of vLLM 0.15 to 0.31. True means the mode `wait`,
            whatever `mode` says; with False and None `mode` counts.
        clear_cache: upstream's argument, with upstream's effect: `keep` with it
            retracts and flushes. None: true for upstream's modes, as there, and
            false for `in_place` and `retract`, as on the route.
        flush_cache: drops the caches, or not, in every mode; where it is given,
            `clear_cache` does not count. None: as `clear_cache` says.
        lease_s: seconds after which decoding goes on unless the same call is made
            again; 0 for never, None for `--inflight-pause-lease-s`.
        owner: whose pause it is; another owner can then neither change nor end it.

    Returns:
        That of `POST /pause_generation`.

    Raises:
        Malformed: there is no such mode, or an argument has the wrong type.
        PauseConflict: the pause that is in force forbids this mode.
        OwnedByAnother: the pause is another owner's.

    """
    if not isinstance(wait_for_inflight_requests, bool | None):
        raise Malformed(
            "wait_for_inflight_requests must be true or false, got "
            f"{wait_for_inflight_requests!r:.80}"
        )
    if wait_for_inflight_requests:
        mode = "wait"
    if flush_cache is None:
        flush_cache = mode not in OUR_MODES if clear_cache is None else clear_cache
        if mode == "keep" and flush_cache:
            mode = "retract"
    renderer = getattr(self, "renderer", None)
    if flush_cache and renderer is not None:
        if hasattr(self, "llm_engine"):  # an `LLM` has no event loop to await in
            renderer.clear_mm_cache()
        else:
            await renderer.clear_mm_cache_async()
    return await control_of(self).pause(
        mode, flush_cache=flush_cache, lease_s=lease_s, owner=owner
    )


async def is_paused(self: Any) -> bool:
    """Whether decoding stands still, in whatever mode.

    Returns:
        True or False.

    """
    return bool((await control_of(self).paused())["is_paused"])


async def continue_generation(self: Any, owner: str | None = None) -> Reply:
    """Go on after a pause; going on twice is going on once.

    Args:
        self: the engine.
        owner: whose pause it is; None ends everybody's.

    Returns:
        That of `POST /continue_generation`.

    Raises:
        OwnedByAnother: the pause is another owner's.

    """
    return await control_of(self).resume(owner)


async def resume_generation(self: Any) -> None:
    """Upstream's name for `continue_generation`."""
    await control_of(self).resume()
