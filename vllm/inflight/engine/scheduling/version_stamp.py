"""The stamp of a step: which version sampled its tokens, as one string.

Upstream carries one string per step, `EngineCoreOutputs.weight_version`, from
the engine to the output processor. The stamp puts label and epoch into it, so
that two updates with one label stay apart, and takes them out again there; and
which load of each adapter that was replaced was in its slot.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

SEPARATOR = "\x1f"

KV_OPTION = "kv_versions"
"""The extra argument by which a request asks whose KV it reads."""
KV_FIELD = "inflight_kv_trail"
"""Where the answer travels, in the `kv_transfer_params` of an output."""


Loads = tuple[tuple[str, int, int], ...]
"""(name, number, which load of the name it is) of adapters; the first load is 0."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Label and epoch of the version that a step was scheduled with."""

    label: str
    epoch: int
    adapters: Loads = ()
    """Those that were loaded more than once."""

    def encode(self) -> str:
        """As it travels."""
        loads = json.dumps(self.adapters) if self.adapters else ""
        return f"{self.epoch}{loads}{SEPARATOR}{self.label}"

    def load_of(self, name: str, number: int) -> int:
        """Which load of its name an adapter was; 0 for the first."""
        loads = (load for *key, load in self.adapters if key == [name, number])
        return next(loads, 0)

    @classmethod
    @lru_cache(maxsize=64)  # it is asked for at every token of every stream
    def decode(cls, text: str) -> Stamp:
        """The stamp in `text`; a plain label, from elsewhere, has epoch 0."""
        head, separator, label = text.partition(SEPARATOR)
        if not separator:
            return cls(text, 0)
        epoch, bracket, loads = head.partition("[")
        adapters = json.loads(bracket + loads) if bracket else ()
        return cls(label, int(epoch), tuple((a, n, load) for a, n, load in adapters))
