"""The sources of a `Publisher`, for upstream's trainer interface.

Upstream's own `ModuleSource` sends a module's parameters under the names that they have
in memory. This sends what a checkpoint has: the names and layouts of one, buffers too,
nothing twice, and everything gathered that ranks share out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from vllm.inflight import upstream
from vllm.inflight.trainer.sources import stream as sources
from vllm.inflight.update import renamer


class Weights(upstream.WeightSource):
    """What `trainer_init` takes as `source`, of anything that a `Publisher` takes."""

    def __init__(
        self,
        source: sources.Source,
        *,
        name_map: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            source: a module, a state dict, an iterable of (name, tensor), or a
                callable that returns one of these; read anew at every update.
            name_map: from the names of the source to those of the model: a dict, or
                a function of a name.

        Raises:
            ConfigError: the source can be read only once, or not at all.

        """
        sources.check_source(source)
        self._source = source
        self._rename = renamer(name_map)

    def metadata(self) -> list[upstream.ParamMeta]:
        """Name, dtype and shape of every tensor, in the order of iteration.

        Collective where the source is: a callable is called for it, and modules of
        FSDP's first version are gathered.

        Raises:
            Malformed: something in the source cannot be sent; it is named.

        """
        return [
            upstream.ParamMeta(self._rename(name), it.dtype, it.shape)
            for name, it in sources.facts(self._source)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, whole and detached; one at a time, or a layer. Collective."""
        for name, tensor in sources.tensors(self._source):
            yield self._rename(name), tensor
