"""What the switches on SGLang's update calls mean for a commit here."""

from __future__ import annotations

from typing import Any

from vllm.inflight.api.control import Control
from vllm.inflight.api.fields import Fields
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import Malformed, PauseConflict

NO_EFFECT = {
    "torch_empty_cache": "nothing is allocated by an update",
    "is_async": "staging is always beside decoding",
    "recapture_cuda_graph": "addresses stay, and graphs with them",
    "disable_draft_model": "a drafter keeps its weights where none come for it",
}
"""Switches of SGLang's with nothing to switch here; either value is fine."""

FALSE_ONLY = {
    "block_generation": "an update blocks nothing here; POST /pause_generation does",
}
TRUE_ONLY = {
    "online": "an update never takes the engine off line here",
    "non_blocking": "an update never blocks requests here; pause first if it should",
}
"""Older switches, with the one value that describes what happens here."""


async def commit_options(
    engine: Any, control: Control, fields: Fields
) -> dict[str, Any]:
    """`mode` and `flush_cache` of the commit, from the fields of an update.

    Raises:
        Malformed: a switch has a value that cannot be had.
        PauseConflict: the cache cannot be flushed under requests that stay in place.

    """
    for name in NO_EFFECT:
        fields.flag(name, False)
    for name, why in FALSE_ONLY.items():
        if fields.flag(name, False):
            raise Malformed(f"{name} cannot be true: {why}")
    for name, why in TRUE_ONLY.items():
        if not fields.flag(name, True):
            raise Malformed(f"{name} cannot be false: {why}")
    fields.one_of("selector", (None, "all", "target"))  # draft_path is for the drafter
    is_shared = InflightConfig.of(engine.vllm_config).prefix_cache == "shared"
    # SGLang flushes by default, lest new requests read KV of old weights. A versioned
    # cache sees to that itself, and what old requests still use can stay.
    flush = fields.flag("flush_cache", is_shared)
    mode, abort = fields.text("mode", None), fields.flag("abort_all_requests", None)
    if None not in (mode, abort) and abort != (mode == "abort"):
        raise Malformed(
            f"mode {mode!r:.80} contradicts abort_all_requests "
            f"{str(abort).lower()}: leave one of them out"
        )
    if mode is None:
        mode = "abort" if abort else "retract" if flush else None
    if flush and mode == "retract":
        counts = await control.ask("requests")
        if any(c["paused"] and c["num_running"] for c in counts):
            raise PauseConflict(
                "flush_cache cannot drop the KV of requests that are paused in place; "
                "pause with mode 'retract', or leave flush_cache out"
            )
    return {"mode": mode, "flush_cache": flush}
