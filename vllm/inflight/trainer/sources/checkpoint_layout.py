"""Checkpoint names and layouts, for a model of transformers in memory.

Transformers 5 renames, fuses and transposes tensors when it loads a checkpoint, and
reverts that in `save_pretrained`. This module reverts it for tensors that are sent to
an engine. It works layer by layer, so that there is no second copy of the model.
Transformers is imported only if the module is one of its models.
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
    """Converts the tensors of one model to those of its checkpoint.

    Attributes:
        groups: the model's names, in groups that are converted together, in order.
        facts: dtype and shape of each converted tensor by name, in order.
        renames: the model's names -> those of the checkpoint, if no tensor changes
            otherwise; else None.

    """

    def __init__(
        self, model: torch.nn.Module, revert: Revert, groups: list[list[str]]
    ) -> None:
        self._model, self._revert = model, revert
        self.groups = groups
        self.facts: dict[str, Fact] = {}
        self.renames: dict[str, str] | None = None

    @classmethod
    def of(
        cls, model: torch.nn.Module, facts: Mapping[str, Fact]
    ) -> CheckpointLayout | None:
        """The conversion of a model's tensors; None if no tensor needs one.

        The conversion is tried on meta tensors with these facts.

        Raises:
            Malformed: this version of transformers cannot revert its conversion.

        """
        revert = find_revert(model)
        if revert is None:
            return None
        meta = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in facts.items()
        }
        at_once = cls(model, revert, [list(meta)])
        whole = at_once(meta)
        # A model that was loaded may have conversions that change none of its tensors.
        if whole.keys() == meta.keys() and all(whole[n] is t for n, t in meta.items()):
            return None
        by_layer = cls(model, revert, layers(meta))
        parts: dict[str, torch.Tensor] = {}
        for group in by_layer.groups:
            parts |= by_layer({name: meta[name] for name in group})
        before = {id(tensor): name for name, tensor in meta.items()}
        for one, converted in ((by_layer, parts), (at_once, whole)):
            one.facts = {name: fact(tensor) for name, tensor in converted.items()}
            if before.keys() == {id(tensor) for tensor in converted.values()}:
                one.renames = {before[id(t)]: name for name, t in converted.items()}
        if by_layer.facts == at_once.facts:
            return by_layer
        logger.warning(
            "%s is converted all at once, which takes a second copy of it: its "
            "conversion goes across layers",
            type(model).__name__,
        )
        return at_once

    def __call__(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert tensors, which must be all tensors of one or more groups.

        Returns `tensors` itself if there is nothing to convert.

        Raises:
            Malformed: this version of transformers cannot revert its conversion.

        """
        model = _ModelView(self._model)
        try:
            return self._revert(model, tensors)
        except torch.OutOfMemoryError:
            # A trainer's GPU may be full. The host has room for one layer.
            logger.info("a layer is converted on the CPU: the GPU has no room for it")
            return self._revert(model, {n: t.cpu() for n, t in tensors.items()})
        except Exception as error:
            raise Malformed(
                f"transformers cannot convert this {type(self._model).__name__} back "
                f"to the tensors of its checkpoint ({type(error).__name__}: {error}); "
                f"{BY_HAND}"
            ) from error


class _ModelView:
    """The model as transformers must see it to revert every conversion.

    Transformers reverts some layouts only if a tensor's shape differs from the
    parameter's. Here the shapes are always equal, so this hides the parameters' shapes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def get_parameter(self, name: str) -> SimpleNamespace:
        """A stand-in for the parameter, whose shape equals no tensor's."""
        return SimpleNamespace(shape=None)


def find_revert(model: torch.nn.Module) -> Revert | None:
    """The function that reverts the conversion of a model; None without a conversion.

    Raises:
        Malformed: there was one, but this version of transformers cannot revert it.

    """
    kind = imported("transformers.modeling_utils", "PreTrainedModel")
    if kind is None or not isinstance(model, kind):
        return None
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # before 5.0, few models were converted
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
