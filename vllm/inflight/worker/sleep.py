"""Sleep on a GPU: upstream's way for what lies in its pools, ours for the arena.

    level 1    the live set is copied to the host, and its memory given back
    level 2    only what is no weight is copied: buffers, and what lies between
    awake      memory at the same addresses, so that CUDA graphs stay valid; after
               level 2 the weights are zeros until an update has filled them

The second set is given back at either level, and with it the way back. It comes again
as a copy of the live set when the weights wake up, or if there is no room for it then,
when the next update begins.
"""

from __future__ import annotations

from vllm.inflight import upstream
from vllm.inflight.errors import ArenaTorn, ConfigError, OutOfDeviceMemory
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.memory.host_copy import HostCopy, beside, everything
from vllm.inflight.worker.memory.placement import is_wanted, placement_of, tensors
from vllm.inflight.worker.staging.worker import StagingWorker

logger = upstream.init_logger(__name__)


class SleepBackend(upstream.CuMemBackend):
    """Upstream's backend, for a worker with a second set of weights.

    Args:
        stager: of the worker.
        arena: where the live weights lie, if not in upstream's pools.

    """

    def __init__(self, stager: StagingWorker, arena: Arena | None) -> None:
        super().__init__()
        self._stager = stager
        self._shadow = stager.shadow
        self._arena = arena
        self._backup: HostCopy | None = None
        """What waits on the host while the weights sleep, or are about to."""
        self._is_asleep = False
        """Until the last byte is back."""

    def prepare(self, level: int) -> None:
        """Copy what a sleep will keep; level 0 lets go of it, as the sleep is off.

        Raises:
            RuntimeError: the host lacks the memory; nothing has changed.

        """
        if self._arena is not None and not self._is_asleep:
            self._backup = self._copy(self._arena, level == 1) if level else None

    def suspend(self, level: int = 1) -> None:
        """Give back the memory of the weights, and what upstream gives back."""
        self._give_back(keeps_weights=level == 1)
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring it again; of what `tags` do not name, only what upstream brings."""
        if tags is None or "weights" in tags:
            self._bring()
        super().resume(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give back what `tags` name; nothing of that is kept."""
        if "weights" in tags:
            self._give_back(keeps_weights=False)
        super().discard(tags)

    def _copy(self, arena: Arena, keeps_weights: bool) -> HostCopy:
        if keeps_weights:
            return HostCopy(arena, everything(arena))
        lost = (tensor for _, tensor in tensors(self._shadow.live))
        return HostCopy(arena, beside(arena, lost))

    def _give_back(self, *, keeps_weights: bool) -> None:
        if self._arena is None:
            self._stager.forget(served=not keeps_weights)
            self._shadow.behind.update(self._shadow.required)
            return
        if self._is_asleep:
            return
        self._backup = self._backup or self._copy(self._arena, keeps_weights)
        self._stager.forget(served=not keeps_weights)
        if self._arena.phase == "paired":
            self._arena.unpair()
        try:
            self._arena.suspend()
        finally:  # its memory may be gone although a call has failed
            self._is_asleep = self._arena.phase == "suspended"

    def _bring(self) -> None:
        if self._arena is not None and self._arena.phase == "torn":
            raise ArenaTorn("a sleep has failed, and what it had taken is not back")
        if self._arena is None or not self._is_asleep:
            self._backup = None  # of a sleep that failed: what is live goes on
            return
        assert self._backup is not None
        if self._arena.phase == "suspended":
            self._arena.resume()
        self._backup.restore()
        self._backup, self._is_asleep = None, False
        try:
            self._shadow.pair()
        except OutOfDeviceMemory as error:
            logger.warning(
                "awake with one set of weights, as there is no memory for a second "
                "one now; the next update tries again: %s",
                error,
            )


def backend_of(stager: StagingWorker) -> SleepBackend | None:
    """The backend of a worker; None if sleep is upstream's alone.

    Raises:
        ConfigError: its weights are where nothing could give their memory back.

    """
    residence = placement_of(stager.shadow.live)
    if residence.arena is None and is_wanted(stager.worker.vllm_config):
        raise ConfigError(
            "--enable-sleep-mode could not give the memory of these weights back: "
            f"{residence.reason}; --inflight-staging off leaves them to upstream"
        )
    if residence.arena is None and stager.shadow.reason is not None:
        return None
    return SleepBackend(stager, residence.arena)
