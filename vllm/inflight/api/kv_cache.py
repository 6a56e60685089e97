"""The KV cache's memory given back alone, while the weights stay.

Upstream has two calls for that, a pause and a release, and refuses the second one if
something has happened in between. Here that leaves no engine paused.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight import upstream
from vllm.inflight.api.methods import control_of
from vllm.inflight.errors import EngineAsleep, EngineFault, PauseConflict

NOT_AT_REST = "requires a completed pause"
NOT_RESIDENT = "requires all executor memory to be resident"
"""How upstream refuses it: of an engine in another process only the words arrive."""


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
    was_paused = (await control.paused())["is_paused"]
    await engine.sleep(level=0, mode="abort")
    try:
        await engine.release_kv_cache_memory()
    except upstream.EngineDeadError:
        raise
    except Exception as error:
        said = str(error)
        if NOT_RESIDENT in said:
            return  # the weights are, so it is the KV cache that is not
        if not was_paused:
            # With the tag: of several engines some may have released theirs.
            await engine.wake_up(["kv_cache"])
        so_far = "requests were aborted" + (
            "" if was_paused else ", and the pause that this call began is over"
        )
        if NOT_AT_REST in said:
            raise PauseConflict(
                "the KV cache was not released: somebody has continued meanwhile, or "
                f"a request came and was given up; {so_far}. Call again"
            ) from error
        raise EngineFault(
            f"the KV cache could not be released: {said}; {so_far}. POST "
            "/resume_memory_occupation wakes up what sleeps, the server's log says more"
        ) from error
