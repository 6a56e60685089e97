"""Sleep on a GPU: upstream handles memory in its own pools, and this backend the arena.

| state | what happens |
|---|---|
| level 1 | the live weights are copied to the host, and their memory is given back |
| level 2 | only buffers and gaps are copied; the weights are lost |
| awake | memory at the same addresses, so that CUDA graphs stay valid |

After level 2 the weights are zeros, which the tripwire marks as blank, until an update
has filled them. It learns from here which weights sleep, whoever calls.

Either level gives the shadow weights back, and with them the rollback target. When the
engine wakes up, they get memory again, as a copy of the live weights. If there is no
room then, the next update tries again. With delta staging, the log of changed elements
is given back in this way, and upstream's pools hold the live weights.

Memory of a trainer is unmapped, so that the trainer can use what it has freed of it.
So it is before memory is taken again: an update may have come between two wake-ups.
"""

from __future__ import annotations

from vllm.inflight import upstream
from vllm.inflight.errors import ArenaTorn, ConfigError, OutOfDeviceMemory
from vllm.inflight.update import WEIGHTS
from vllm.inflight.worker.integrity.outside_writes import note_asleep, note_awake
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.memory.host_copy import HostCopy, beside, everything
from vllm.inflight.worker.memory.placement import is_wanted, placement_of, tensors
from vllm.inflight.worker.staging.worker import StagingWorker

logger = upstream.init_logger(__name__)


class SleepBackend(upstream.CuMemBackend):
    """Upstream's backend, for a worker with shadow weights.

    Args:
        staging: the staging worker.
        arena: where the live weights lie; None if they lie in upstream's pools.

    """

    def __init__(self, staging: StagingWorker, arena: Arena | None) -> None:
        super().__init__()
        self._staging = staging
        self._shadow = staging.shadow
        self._arena = arena
        self._backup: HostCopy | None = None
        """The host copy while the weights sleep, or are about to."""
        self._keeps_weights = False
        """Whether the host copy has the weights, or only what is beside them."""
        self._is_asleep = False
        """True until the last byte is back."""

    def prepare(self, level: int) -> None:
        """Copy what a sleep will keep; level 0 frees the copy, as the sleep is called
        off.

        Raises:
            RuntimeError: the host lacks the memory; nothing has changed.

        """
        self._keeps_weights = level == 1
        if self._arena is not None and not self._is_asleep:
            self._backup = self._copy(self._arena, level == 1) if level else None

    def suspend(self, level: int = 1) -> None:
        """Give back the memory of the weights, and upstream's memory."""
        self._give_back(keeps_weights=level == 1)
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Get the memory again; without the tag `weights`, only upstream's memory."""
        self._staging.unmap()
        if tags is None or WEIGHTS in tags:
            self._restore()
        super().resume(tags)
        note_awake(self._staging.worker, tags)
        if self._arena is None and (tags is None or WEIGHTS in tags):
            self._pair()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give back the memory that `tags` name; its content is lost.

        Weights of the arena that `prepare` has copied come back with their content.
        """
        if WEIGHTS in tags:
            has_copy = self._backup is not None and self._keeps_weights
            self._give_back(keeps_weights=has_copy)
        super().discard(tags)

    def _copy(self, arena: Arena, keeps_weights: bool) -> HostCopy:
        if keeps_weights:
            return HostCopy(arena, everything(arena))
        lost = (tensor for _, tensor in tensors(self._shadow.live))
        return HostCopy(arena, beside(arena, lost))

    def _give_back(self, *, keeps_weights: bool) -> None:
        self._staging.unmap()
        kept = (WEIGHTS,) if keeps_weights else ()
        if self._arena is None or self._is_asleep:
            note_asleep(self._staging.worker, (WEIGHTS,), kept)
            return
        backup = self._backup or self._copy(self._arena, keeps_weights)
        note_asleep(self._staging.worker, (WEIGHTS,), kept)
        self._backup = backup
        if self._arena.phase == "paired":
            self._arena.unpair()
        try:
            self._arena.suspend()
        finally:  # the memory may be gone although the call failed
            self._is_asleep = self._arena.phase == "suspended"

    def _restore(self) -> None:
        if self._arena is not None and self._arena.phase == "torn":
            raise ArenaTorn("a sleep failed, and the weights are not restored")
        if self._arena is None:
            return
        if not self._is_asleep:
            self._backup = None  # a sleep failed, and the live weights are intact
            return
        assert self._backup is not None
        if self._arena.phase == "suspended":
            self._arena.resume()
        self._backup.restore()
        self._backup, self._is_asleep = None, False
        self._pair()

    def _pair(self) -> None:
        """Get memory for the shadow weights, or for the log, if there is some."""
        try:
            self._shadow.pair()
        except OutOfDeviceMemory as error:
            logger.warning(
                "awake without shadow weights, as there is no memory for them now; "
                "the next update tries again: %s",
                error,
            )


def backend_of(staging: StagingWorker) -> SleepBackend | None:
    """The sleep backend of a worker; None if upstream's own backend is enough.

    Raises:
        ConfigError: the weights lie in memory that cannot be given back.

    """
    placement = placement_of(staging.shadow.live)
    if placement.arena is None and is_wanted(staging.worker.vllm_config):
        raise ConfigError(
            "--enable-sleep-mode could not give the memory of these weights back: "
            f"{placement.reason}; --inflight-staging off leaves them to upstream"
        )
    if placement.arena is None and staging.shadow.reason is not None:
        return None
    return SleepBackend(staging, placement.arena)
