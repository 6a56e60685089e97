"""Weight sources of vLLM's trainer interface from 0.33 on: ranks own their tensors.

See `iterated_source.py`, which is for the releases before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.transport.buckets.tensor_list import Pair


class OwnedSource(upstream.WeightSource):
    """A source that says which ranks own each tensor: from 0.33 on."""

    @cached_property
    def metadata(self) -> Any:
        """What `read_facts` says; `facts_of` reads it again."""
        return self.read_facts()

    def iter_full(self) -> Iterator[Pair]:
        """Every tensor, whole."""
        return iter(self.read_tensors())

    @staticmethod
    def facts_of(source: Any) -> Any:
        """Name, dtype and shape of every tensor of a source; may be collective."""
        # Each update may have other tensors, and all ranks are here at the same time.
        vars(source).pop("metadata", None)
        return source.metadata

    @staticmethod
    def tensors_of(source: Any) -> Iterator[Pair]:
        """Every tensor of a source, whole; may be collective.

        Raises:
            ValueError: rank 0, which sends, does not get every tensor whole. All ranks
                of the trainer raise it.

        """
        kind = type(source).__name__
        if not source.implements_iter_full():
            raise ValueError(
                f"{kind} has only iter_local, so each rank has a part of the tensors; "
                "rank 0 sends all, and needs iter_full"
            )
        owned = set(source.owned_names(0))
        missing = [fact.name for fact in source.metadata if fact.name not in owned]
        if missing:
            raise ValueError(
                f"rank 0 sends all tensors, and {kind} says that it does not own "
                f"{', '.join(map(repr, missing[:3]))}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            )
        return iter(source.iter_full())
