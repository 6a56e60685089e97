"""The stamp of a step: which version sampled its tokens, as one string.

Upstream carries one string per step, `EngineCoreOutputs.weight_version`, from
the engine to the output processor. The stamp puts label and epoch into it, so
that two updates with one label stay apart, and takes them out again there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

SEPARATOR = "\x1f"

KV_OPTION = "kv_versions"
"""The extra argument by which a request asks whose KV it reads."""
KV_FIELD = "inflight_kv_trail"
"""Where the answer travels, in the `kv_transfer_params` of an output."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Label and epoch of the version that a step was scheduled with."""

    label: str
    epoch: int

    def encode(self) -> str:
        """As it travels."""
        return f"{self.epoch}{SEPARATOR}{self.label}"

    @classmethod
    @lru_cache(maxsize=64)  # it is asked for at every token of every stream
    def decode(cls, text: str) -> Stamp:
        """The stamp in `text`; a plain label, from elsewhere, has epoch 0."""
        epoch, separator, label = text.partition(SEPARATOR)
        return cls(label, int(epoch)) if separator else cls(text, 0)
