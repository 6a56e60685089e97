"""The stamps on what an engine core puts out, in every release of vLLM."""

from typing import Any

from vllm.inflight.engine.scheduling.version_stamp import STAMP_FIELD, Stamp


class Stamps:
    """Reads the stamp of each output; before 0.32, an output has it if it is new."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def label(self, group: Any, output: Any) -> str:
        """The label of the version that sampled an output of a group."""
        stamp = getattr(group, "weight_version", None)
        if stamp is None:
            name, params = output.request_id, output.kv_transfer_params or {}
            stamp = self._told.get(name, "")
            stamp = self._told[name] = params.get(STAMP_FIELD, stamp)
        return Stamp.decode(stamp).label
