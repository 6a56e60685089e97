"""The parameter map: which parameters a checkpoint tensor fills, and the reverse.

It is made from names alone, without calling a loader: from the checkpoint names of
parameters, and from the name mapping that most models have. Renaming inside a loader is
not seen; for its tensors the map has no answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.kinds.classifier import Classifier, tensor_names
from vllm.inflight.worker.model.kinds.drafter import ModelWithDrafter
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint
from vllm.inflight.yielding import with_breaks


class ParameterMap:
    """The parameter map of one model.

    Args:
        made_of: parameter → the names that fill it in a checkpoint, according to
            the model.
        start_checkpoint: the checkpoint that the engine started from; its names are
            used.
        images: checkpoint name → the model's names of the tensor.

    """

    def __init__(
        self,
        made_of: Mapping[str, Sequence[str]],
        start_checkpoint: StartCheckpoint,
        images: Callable[[str], Iterable[str]] = lambda name: (name,),
    ) -> None:
        self._made_of = made_of
        self._start_checkpoint = start_checkpoint
        self._images = images

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        required: Iterable[str],
        start_checkpoint: StartCheckpoint,
        classifier: Classifier | None = None,
    ) -> ParameterMap:
        """The map of a module tree whose parameters are `required`."""
        made_of = {p: tensor_names(module, p, classifier) for p in required}
        return cls(made_of, start_checkpoint, functools.partial(_images, module))

    @property
    def params(self) -> Iterable[str]:
        """All parameters, in the order of the model."""
        return self._made_of

    def params_of(self, name: str) -> set[str]:
        """The parameters that a tensor fills; empty if that is not known."""
        found: set[str] = set()
        for image in (name, *self._images(name)):
            if image in self._made_of:
                found.add(image)
            found.update(self._by_name.get(image, ()))
        return found

    def names_of(self, param: str) -> Sequence[str]:
        """The tensors that fill a parameter, by checkpoint names where known."""
        return self._by_parameter.get(param) or self._made_of.get(param) or [param]

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[str, ...]]:
        # Garbage collections skip tuples of strings, but not lists.
        found: dict[str, tuple[str, ...]] = {}
        for param, names in with_breaks(self._made_of.items()):
            for name in names:
                found[name] = (*found.get(name, ()), param)
        return found

    @functools.cached_property
    def _by_parameter(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in with_breaks(self._start_checkpoint.known):
            for param in self.params_of(name):
                found.setdefault(param, []).append(name)
        return found


def _images(module: torch.nn.Module, name: str) -> list[str]:
    """The model's names of a tensor; empty if its name mapping drops the tensor."""
    if not isinstance(module, ModelWithDrafter):
        return _mapped(module, name)
    if module.is_mtp:
        drafted = (DRAFT + image for image in _mapped(module.draft, name))
        return [*_mapped(module.target, name), *drafted]
    if name.startswith(DRAFT):
        own = name.removeprefix(DRAFT)
        return [DRAFT + image for image in _mapped(module.draft, own)]
    return _mapped(module.target, name)


def _mapped(model: torch.nn.Module, name: str) -> list[str]:
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return [name] if mapper is None else list(mapper.apply_list([name]))
