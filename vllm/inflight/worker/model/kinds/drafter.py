"""A model and its drafter as one module tree, which is staged and flipped as one.

The layers of the model keep their names, and those of the drafter are under `draft.`,
as in upstream's sleep mode. The same holds for the tensors of an update. A layer that
the drafter shares with its model (an embedding, a head) counts as the model's and has
the model's name. A tensor for it that comes with the drafter is skipped, since the
model may be of a newer version.

MTP layers are a drafter whose tensors are among the model's. They come once, under the
model's names, and both loaders get each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.layers import layers

Pair = tuple[str, torch.Tensor]

BLOCK = ".mtp_block."
"""Name part of the layers of DeepSeek's MTP block that are like a layer of the model; a
checkpoint does not have it."""

RENAMED = "model.", "mtp."
"""Prefix in the module tree, and prefix in the checkpoint, of drafters like
Qwen3-Next's. Such a drafter tells which names it does not read, and all names with the
first prefix are among them."""


class ModelWithDrafter(torch.nn.Module):
    """The root of such a tree; it is walked and loaded into, and never run.

    Attributes:
        target: the model.
        draft: its drafter.
        is_mtp: whether the drafter's tensors come among the model's.
        is_drafting: whether the drafter's loader runs now.

    """

    target: torch.nn.Module
    draft: torch.nn.Module

    def __init__(
        self, target: torch.nn.Module, draft: torch.nn.Module, *, is_mtp: bool = False
    ) -> None:
        super().__init__()
        self.is_mtp = is_mtp
        # Not through __setattr__: the model is this root, and not a child of it.
        vars(self)["target"] = target
        self._parameters, self._buffers = target._parameters, target._buffers
        self._non_persistent_buffers_set = target._non_persistent_buffers_set
        self._modules = {**target._modules, DRAFT.removesuffix("."): draft}
        self.is_drafting = False
        self.packed_modules_mapping = {
            name: shards
            for model in (draft, target)
            for name, shards in getattr(model, "packed_modules_mapping", {}).items()
        }

    def load_weights(self, weights: Iterable[Pair]) -> Any:
        """Give each loader its tensors, in the order of arrival."""
        return self.target.load_weights(self._of_target(weights))  # type: ignore[operator]

    def _of_target(self, weights: Iterable[Pair]) -> Iterator[Pair]:
        for name, tensor in weights:
            if self.is_mtp:
                self._draft(name, tensor)
            elif name.startswith(DRAFT):
                self._draft(name.removeprefix(DRAFT), tensor)
                continue
            yield name, tensor
            del tensor  # a transport reuses memory that no tensor refers to

    def _draft(self, name: str, tensor: torch.Tensor) -> None:
        # One by one: loaders of drafters collect their tensors before they load. Some
        # then check that each layer has come, which a stream of tensors cannot pass.
        # The checks of the update look at completeness.
        self.is_drafting = True
        try:
            with upstream.disable_mtp_completeness_check():
                self.draft.load_weights([(name, tensor)])  # type: ignore[operator]
        finally:
            self.is_drafting = False

    def sent_name(self, name: str) -> str:
        """The checkpoint name of the tensor that fills `name` of the tree."""
        if not self.is_mtp or not name.startswith(DRAFT):
            return name
        # The reverse of the drafter's loader.
        name = name.removeprefix(DRAFT)
        mapper: Any = getattr(self.draft, "hf_to_vllm_mapper", None)
        if mapper is None:
            is_unread = getattr(self.draft, "is_unused_checkpoint_weight", None)
            if is_unread is not None and is_unread(name):
                return name.replace(*RENAMED, 1)
            return name.replace(BLOCK, ".")
        read = mapper.orig_to_new_substr | mapper.orig_to_new_prefix
        for sent, known in read.items():
            if known is not None:  # None: the loader drops it
                name = name.replace(known, sent, 1)
        return name


def drafter_of(worker: upstream.WorkerBase) -> Any:
    """A worker's drafter, if it has weights; the models have to be loaded."""
    runner = getattr(worker, "model_runner", None)
    drafter: Any = getattr(runner, "get_draft_model", lambda: None)()
    if not hasattr(drafter, "parameters"):
        return None  # it finds drafts without weights
    return drafter if next(drafter.parameters(), None) is not None else None


def served_by(worker: upstream.WorkerBase) -> torch.nn.Module:
    """The model of a worker; with its drafter, if that has weights."""
    model: torch.nn.Module = worker.model_runner.get_model()
    drafter = drafter_of(worker)
    if drafter is None:
        return model
    return ModelWithDrafter(model, drafter, is_mtp=has_mtp(worker.vllm_config))


def has_mtp(vllm_config: upstream.VllmConfig) -> bool:
    """Whether the drafter consists of layers of its model's checkpoint."""
    return getattr(vllm_config.speculative_config, "method", None) == "mtp"


def sent_names(root: torch.nn.Module, names: list[str]) -> list[str]:
    """The checkpoint names of the tensors that fill these names of the tree."""
    if not isinstance(root, ModelWithDrafter):
        return names
    return [root.sent_name(name) for name in names]


def of_mtp_alone(root: torch.nn.Module, params: Collection[str]) -> set[str]:
    """Those of all parameters that no tensor of the model without MTP layers fills.

    An embedding of the drafter's own may be filled by the model's tensor.
    """
    if not isinstance(root, ModelWithDrafter) or not root.is_mtp:
        return set()
    drafters = {name for name in params if name.startswith(DRAFT)}
    return {name for name in drafters if root.sent_name(name) not in params}


def trees(root: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The models of a tree: one, or a model and its drafter."""
    return (root.target, root.draft) if isinstance(root, ModelWithDrafter) else (root,)


def share(
    live: ModelWithDrafter, target: torch.nn.Module, draft: torch.nn.Module
) -> None:
    """Let the second drafter share the layers with the second model that the live ones
    share."""
    own = {id(layer): name for name, layer in layers(live.target)}

    def walk(layer: torch.nn.Module, second: torch.nn.Module) -> None:
        for key, child in layer._modules.items():
            while isinstance(child, upstream.BaseLayerWithLoRA):
                child = child.base_layer
            if child is None:
                continue
            name, built = own.get(id(child)), second._modules.get(key)
            if name is not None:
                second._modules[key] = target.get_submodule(name)
            elif built is not None:
                walk(child, built)
        # In the same order, since the two trees are walked side by side.
        built_of = second._modules
        order = [key for key in layer._modules if key in built_of]
        second._modules = {key: built_of[key] for key in order} | built_of

    walk(live.draft, draft)
