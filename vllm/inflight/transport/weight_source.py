"""What a `Publisher` takes as source, for upstream's trainer interface.

Upstream's `ModuleSource` sends a module's parameters under their names in memory. A
`Weights` sends what a checkpoint of the module has: checkpoint names and layouts,
buffers too, no tensor twice, and sharded tensors gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.releases.table import adapter
from vllm.inflight.trainer.sources import stream as sources
from vllm.inflight.trainer.sources.cast import Cast, check_cast
from vllm.inflight.trainer.sources.shards import OwnShard
from vllm.inflight.update import renamer

_Source: Any = adapter("weight source")


class Weights(_Source):
    """The `source` of `trainer_init`, made of any source of a `Publisher`."""

    def __init__(
        self,
        source: sources.Source,
        *,
        name_map: Mapping[str, str] | Callable[[str], str] | None = None,
        dtype: Cast = None,
    ) -> None:
        """Check the kind of source; nothing is read yet.

        Args:
            source: a module, a state dict, an iterable of (name, tensor), or a
                callable that returns one of these. Every update reads it again.
            name_map: translates names of the source to names of the model; a dict or
                a function of a name.
            dtype: what floating-point tensors are cast to before they are compared and
                sent; or a function from a name of the source to such a dtype, or None.

        Raises:
            ConfigError: the source cannot be read, or only once. Or nothing can be cast
                to `dtype`.

        """
        sources.check_source(source)
        check_cast(dtype)
        self._cast = dtype
        self._source = source
        self._rename = renamer(name_map)

    def read_facts(self) -> list[upstream.ParamMeta]:
        """Name, dtype and shape of every tensor, in the order of iteration.

        This is collective if reading the source is: a callable is called, and modules
        of FSDP1 are gathered.

        Raises:
            Malformed: an entry of the source cannot be sent; the error names it.

        """
        return [
            upstream.ParamMeta(self._rename(name), it.dtype, it.shape)
            for name, it in sources.facts(self._source, self._cast)
        ]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, gathered and detached, one tensor or layer at a time.

        This is collective if the source is sharded over ranks.
        """
        for name, tensor in sources.tensors(self._source, self._cast):
            yield self._rename(name), tensor

    def read_shards(self) -> list[OwnShard]:
        """What this rank has of the tensors, without gathering; not collective.

        Raises:
            ConfigError: the tensors are not shared out in boxes.

        """
        found = sources.shards(self._source, self._cast)
        return [replace(shard, name=self._rename(shard.name)) for shard in found]
