"""Whether deltas are sent, and what the last update was."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

from vllm.inflight.errors import (
    BaseMismatch,
    ConfigError,
    DeltaUnsupported,
    InflightError,
)
from vllm.inflight.trainer.deltas.delta import MOST_UNSUPPORTED, POLICIES

MEMORIES = ("device", "host")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """What the last update was."""

    is_delta: bool
    num_bytes: int
    """Bytes of the tensors that were sent."""
    search_s: float
    """Seconds to read the source, to find what has changed, and to digest it."""
    gathered_bytes: int = 0
    """With `delta_shards`, bytes of changes that other ranks have brought to rank 0."""


class DeltaPolicy:
    """Whether deltas are sent; engines that cannot apply them end that.

    Args:
        name: `auto`, `always` or `off`.
        memory: where the last version is kept: `device`, or `host`.
        client: the inference side; None on ranks that do not send.

    Raises:
        ConfigError: the policy or the memory is none of these, or deltas are to be sent
            `always` and the client takes no manifest.

    """

    def __init__(self, name: str, memory: str, client: Any) -> None:
        for value, option, choices in (
            (name, "delta", POLICIES),
            (memory, "delta_memory", MEMORIES),
        ):
            if value not in choices:
                raise ConfigError(f"{option} must be one of {choices}, got {value!r}")
        if name != "off" and client is not None and not _takes_manifest(client):
            why = (
                f"start_weight_update of {type(client).__name__} has no parameter "
                "'manifest', which deltas need"
            )
            if name == "always":
                raise ConfigError(why)
            logger.warning("whole versions are sent: %s", why)
            name = "off"
        self.name = name
        self._num_unsupported = 0

    def note_rejected(self, error: InflightError) -> None:
        """An engine has rejected a delta, and gets the whole version."""
        level = logging.INFO if isinstance(error, BaseMismatch) else logging.WARNING
        logger.log(level, "the whole version is sent in place of a delta: %s", error)
        self._num_unsupported += isinstance(error, DeltaUnsupported)
        if self._num_unsupported >= MOST_UNSUPPORTED:
            self.name = "off"
            logger.warning("whole versions are sent from now on")

    def note_committed(self) -> None:
        """A delta was committed."""
        self._num_unsupported = 0


def _takes_manifest(client: Any) -> bool:
    parameters = inspect.signature(client.start_weight_update).parameters.values()
    return any(
        one.name == "manifest" or one.kind is inspect.Parameter.VAR_KEYWORD
        for one in parameters
    )
