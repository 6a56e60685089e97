"""The KV cache's memory given back alone, while the weights stay.

Upstream has two calls for that, a pause and a release, and refuses the second one if
something has happened in between. Here that leaves no engine paused, unless one of
them was in a sleep of level 0 before, which nobody else may end. Of several engines
each is asked: upstream would tell of one alone, and that one may be asleep already.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight.api.methods import control_of
from vllm.inflight.errors import EngineAsleep, EngineFault, PauseConflict


async def release_kv_cache(engine: Any) -> None:
    """Abort requests, pause, and give the memory back; twice is as good as once.

    Raises:
        EngineAsleep: the weights are asleep, and with them most likely the KV cache.
        PauseConflict: the pause was over, or a request ended, before the release.
        EngineFault: the memory could not be given back.

    """
    control = control_of(engine)
    if any(reply["weights"] == "asleep" for reply in await control.ask("info")):
        raise EngineAsleep(
            "the weights are asleep, and so is the KV cache unless it was woken up "
            "alone; it can be released by itself once the weights have been woken up"
        )
    before = await control.ask("rest")
    await engine.sleep(level=0, mode="abort")
    try:
        await engine.renderer.clear_mm_cache_async()  # the engines drop theirs
        await control.ask("release_kv_cache")
    except (PauseConflict, EngineFault) as error:
        if not any(each["ends_on_waking"] for each in before):
            # A pause that was asked for outlives it, and ends as it would have. With
            # the tag: of several engines some may have released theirs.
            await engine.wake_up(["kv_cache"])
        error.message += "; requests were aborted"
        if not any(each["is_paused"] for each in before):
            error.message += ", and the pause that this call began is over"
        error.message += (
            ". Call again"
            if isinstance(error, PauseConflict)
            else ". POST /resume_memory_occupation wakes up what sleeps, the server's "
            "log says more"
        )
        raise
