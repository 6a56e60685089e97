"""The version stamp of a step: which version sampled its tokens, as one string.

Upstream carries one string per step, `EngineCoreOutputs.weight_version`, from the
engine core to the output processor; `stamp_reports.py` knows the releases without it.
The stamp encodes label and epoch in that string, so that two updates with the same
label differ. It also has the load number of each adapter that was loaded again. The
output processor decodes the stamp.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

SEPARATOR = "\x1f"

KV_OPTION = "kv_versions"
"""The extra argument by which a request asks for its KV provenance."""
KV_FIELD = "inflight_kv_trail"
"""The key of the provenance in the `kv_transfer_params` of an output."""
STAMP_FIELD = "inflight_stamp"
"""The key of the stamp there, in releases whose steps have no field for it."""


Loads = tuple[tuple[str, int, int], ...]
"""Triples of adapter name, adapter number and load number; the first load is 0."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Label and epoch of the version that a step was scheduled with."""

    label: str
    epoch: int
    adapters: Loads = ()
    """The adapters that were loaded more than once."""

    def encode(self) -> str:
        """The stamp as a string."""
        loads = json.dumps(self.adapters) if self.adapters else ""
        return f"{self.epoch}{loads}{SEPARATOR}{self.label}"

    def load_of(self, name: str, number: int) -> int:
        """The load number of an adapter; 0 for its first load."""
        loads = (load for *key, load in self.adapters if key == [name, number])
        return next(loads, 0)

    @classmethod
    @lru_cache(maxsize=64)  # called for every token of every stream
    def decode(cls, text: str) -> Stamp:
        """The stamp in `text`; a plain label without an epoch gets epoch 0."""
        head, separator, label = text.partition(SEPARATOR)
        if not separator:
            return cls(text, 0)
        epoch, bracket, loads = head.partition("[")
        adapters = json.loads(bracket + loads) if bracket else ()
        return cls(label, int(epoch), tuple((a, n, load) for a, n, load in adapters))
