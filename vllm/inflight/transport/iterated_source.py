"""Weight sources of vLLM's trainer interface before 0.33: those that are iterated.

A source of ours has `read_facts` and `read_tensors`, and is derived of the class that
`releases.ADAPTERS` names for the installed release: this one, or `OwnedSource`. Any
source of that release can be read with `facts_of` and `tensors_of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.transport.buckets.tensor_list import Pair


class IteratedSource(upstream.WeightSource):
    """A source that is iterated, and whose `metadata` is a method: before 0.33."""

    def metadata(self) -> Any:
        """What `read_facts` says."""
        return self.read_facts()

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.read_tensors())

    @staticmethod
    def facts_of(source: Any) -> Any:
        """Name, dtype and shape of every tensor of a source; may be collective."""
        return source.metadata()

    @staticmethod
    def tensors_of(source: Any) -> Iterator[Pair]:
        """Every tensor of a source, whole; may be collective."""
        return iter(source)
