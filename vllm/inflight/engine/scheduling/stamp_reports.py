"""How the stamp of a step reaches the front end.

From 0.32 on, upstream's outputs of a step have a field for it. In earlier releases, the
output of a request carries the stamp, whenever it differs from the one before.
"""

from __future__ import annotations

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.version_stamp import STAMP_FIELD


class StepStamps:
    """Stamps the outputs of a step as a whole."""

    def tell(self, outputs: upstream.EngineCoreOutputs, stamp: str | None) -> None:
        """Add the stamp of a step to its outputs."""
        outputs.weight_version = stamp

    def forget(self, request_id: str) -> None:
        """Do nothing: no request is remembered."""


class RequestStamps:
    """Stamps the outputs of the requests that were told another stamp, or none."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        """The last stamp, by request id."""

    def tell(self, outputs: upstream.EngineCoreOutputs, stamp: str | None) -> None:
        """Add the stamp of a step to its outputs."""
        if stamp is None:
            return
        told = self._told
        for output in outputs.outputs:
            name = output.request_id
            is_sampled = output.new_token_ids or output.pooling_output is not None
            if is_sampled and told.get(name) != stamp:
                params = output.kv_transfer_params or {}
                output.kv_transfer_params = params | {STAMP_FIELD: stamp}
                if output.finish_reason is None:
                    told[name] = stamp

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._told.pop(request_id, None)
