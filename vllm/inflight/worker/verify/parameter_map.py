"""Places: which parameters a checkpoint's tensor fills, and what fills a parameter.

Told by names alone, without calling a loader: by what parameters are called in a
checkpoint, and by the mapping of names that most models have. A loader that renames by
itself is not seen through; of its tensors nothing is known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.classifier import Classifier, tensor_names
from vllm.inflight.worker.model.drafter import ModelWithDrafter
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint
from vllm.inflight.yielding import with_breaks


class ParameterMap:
    """The places of one model's tensors.

    Args:
        made_of: parameter → the names that fill it in a checkpoint, as far as the
            model's own names tell.
        origin: the checkpoint that the engine started from, whose names are told.
        images: what the model calls a tensor of a checkpoint.

    """

    def __init__(
        self,
        made_of: Mapping[str, Sequence[str]],
        origin: StartCheckpoint,
        images: Callable[[str], Iterable[str]] = lambda name: (name,),
    ) -> None:
        self._made_of = made_of
        self._origin = origin
        self._images = images

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        required: Iterable[str],
        origin: StartCheckpoint,
        classifier: Classifier | None = None,
    ) -> ParameterMap:
        """Those of a tree whose parameters are `required`."""
        made_of = {p: tensor_names(module, p, classifier) for p in required}
        return cls(made_of, origin, functools.partial(_images, module))

    @property
    def params(self) -> Iterable[str]:
        """All parameters, in the order of the model."""
        return self._made_of

    def params_of(self, name: str) -> set[str]:
        """The parameters that a tensor fills, if that is known; else none."""
        found: set[str] = set()
        for image in (name, *self._images(name)):
            if image in self._made_of:
                found.add(image)
            found.update(self._by_name.get(image, ()))
        return found

    def names_of(self, param: str) -> Sequence[str]:
        """What fills a parameter, by the names of a checkpoint where they are known."""
        return self._of_origin.get(param) or self._made_of.get(param) or [param]

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[str, ...]]:
        # Collections pass tuples of names over, unlike lists.
        found: dict[str, tuple[str, ...]] = {}
        for param, names in with_breaks(self._made_of.items()):
            for name in names:
                found[name] = (*found.get(name, ()), param)
        return found

    @functools.cached_property
    def _of_origin(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in with_breaks(self._origin.known):
            for param in self.params_of(name):
                found.setdefault(param, []).append(name)
        return found


def _images(module: torch.nn.Module, name: str) -> list[str]:
    """What a tree calls a tensor; nothing if its mapping of names drops it."""
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
