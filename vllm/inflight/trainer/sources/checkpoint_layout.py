"""The names and layouts of a checkpoint, from a model of transformers in memory.

transformers 5 renames, fuses and transposes tensors when it loads a checkpoint, and
undoes that in `save_pretrained`. Here the same is undone for tensors that are on their
way to an engine, layer by layer, so that there is never a second copy of the model.
transformers is not imported unless the module is one of its models.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from vllm.inflight.errors import Malformed
from vllm.inflight.trainer.sources.modules import Fact, fact, imported, layers

BY_HAND = (
    "write the names and layouts of the checkpoint yourself (a callable as source, or "
    "name_map=), or call model.save_pretrained(folder) and update_weights_from_disk"
)

Revert = Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]

logger = logging.getLogger(__name__)


class CheckpointLayout:
    """From the tensors of one model to those of its checkpoint.

    Attributes:
        groups: names of the model's that are converted together, in order.
        facts: what comes out of all groups, in order.

    """

    def __init__(
        self, model: torch.nn.Module, revert: Revert, groups: list[list[str]]
    ) -> None:
        self._model, self._revert = model, revert
        self.groups = groups
        self.facts: dict[str, Fact] = {}

    @classmethod
    def of(
        cls, model: torch.nn.Module, facts: Mapping[str, Fact]
    ) -> CheckpointLayout | None:
        """How to convert a model's tensors; None if they are those of its checkpoint.

        It is tried with tensors that have these facts and no content.

        Raises:
            Malformed: this transformers cannot undo what it did to this model.

        """
        revert = undoing(model)
        if revert is None:
            return None
        meta = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in facts.items()
        }
        at_once = cls(model, revert, [list(meta)])
        if (whole := at_once(meta)) is meta:
            return None
        by_layer = cls(model, revert, layers(meta))
        parts: dict[str, torch.Tensor] = {}
        for group in by_layer.groups:
            parts |= by_layer({name: meta[name] for name in group})
        for one, converted in ((by_layer, parts), (at_once, whole)):
            one.facts = {name: fact(tensor) for name, tensor in converted.items()}
        if by_layer.facts == at_once.facts:
            return by_layer
        logger.warning(
            "%s is converted all at once, which takes a second copy of it: its "
            "conversion goes across layers",
            type(model).__name__,
        )
        return at_once

    def __call__(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a checkpoint has of these tensors, which are all of one group or more.

        Returns `tensors` itself if there is nothing to convert.

        Raises:
            Malformed: this transformers cannot undo what it did to this model.

        """
        model = _AsPublished(self._model)
        try:
            return self._revert(model, tensors)
        except torch.OutOfMemoryError:
            # A trainer's GPU may be full; the host has room for one layer.
            logger.info("a layer is converted on the CPU: the GPU has no room for it")
            return self._revert(model, {n: t.cpu() for n, t in tensors.items()})
        except Exception as error:
            raise Malformed(
                f"transformers cannot convert this {type(self._model).__name__} back "
                f"to the tensors of its checkpoint ({type(error).__name__}: {error}); "
                f"{BY_HAND}"
            ) from error


class _AsPublished:
    """The model, as transformers is to see it when it undoes a conversion.

    Some layouts it only undoes where the tensor has not the shape of the parameter,
    which here it always has. Its loader did the opposite, and so do engines.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def get_parameter(self, name: str) -> Any:
        """No parameter that anything could have the shape of."""
        return SimpleNamespace(shape=None)


def undoing(model: torch.nn.Module) -> Revert | None:
    """What undoes the conversion of a model of transformers; None if there was none.

    Raises:
        Malformed: there was one, of a transformers that does not offer this.

    """
    kind = imported("transformers.modeling_utils", "PreTrainedModel")
    if kind is None or not isinstance(model, kind):
        return None
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # before 5.0 few models were converted
        if not getattr(model, "_checkpoint_conversion_mapping", None):
            return None
        loading = None
    revert: Revert | None = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        version = imported("transformers", "__version__")
        raise Malformed(
            f"the names of this {type(model).__name__} in memory are not those of its "
            f"checkpoint, and transformers {version} does not tell how they were "
            f"converted; use a release that does (5.0 and later), or {BY_HAND}"
        )
    return revert
