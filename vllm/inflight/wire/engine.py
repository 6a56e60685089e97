"""What the receiving engines of every backend have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import Cancelled, TransferFault
from vllm.inflight.wire.announcement import Pair
from vllm.inflight.wire.watch import never


class StagedEngine(upstream.WeightTransferEngine):
    """Receives into whatever model it is given, whose layers are packed as they fill.

    Attributes:
        cancelled: whether the update that is being received is not wanted any more;
            set by whoever receives, asked between two waits.

    """

    cancelled: Callable[[], bool] = staticmethod(never)

    def load_all(self, incoming: Iterator[Pair]) -> None:
        """Give the model all that arrives, whatever it makes of it.

        What it does not ask for, and what comes after an error of its own, is received
        all the same: buckets are in flight, and a group left early would break.
        """
        try:
            self.model.load_weights(incoming)
            for _ in incoming:
                pass
        except Exception:
            with suppress(TransferFault, Cancelled):
                for _ in incoming:
                    pass
            raise

    def folder_of(self, update_info: Any) -> Path | None:
        """Of the checkpoint that a chunk comes from, if it comes from one."""
        del update_info
        return None

    def preview(self, update_info: Any) -> AbstractContextManager[None]:
        """Around the receipt of a chunk: what can be read of it before is, on entry.

        Raises:
            InflightError: it cannot be received, and nothing has been written.

        """
        del update_info
        return nullcontext()

    @property
    def gauges(self) -> dict[str, float]:
        """What a status report says of the wire."""
        return {}

    def start_weight_update(self) -> None:
        """Let layers be packed as soon as they are complete."""
        upstream.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Pack the layers that wait for the end."""
        upstream.finalize_layerwise_reload(self.model, self.model_config)
