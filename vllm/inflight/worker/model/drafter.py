"""A model and its drafter as one tree, so that they are staged and flipped as one.

The layers of the model keep their names, those of the drafter are under `draft.`, as in
upstream's sleep mode; so are the tensors that come for it. A layer that the drafter
shares with its model (an embedding, a head) is the model's: it has the model's name,
and what comes for it with a drafter is passed over, since the model may have moved on.

MTP layers are a drafter whose tensors are among the model's: those come once, under the
model's names, and both loaders are shown each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.layers import layers

Pair = tuple[str, torch.Tensor]

BLOCK = ".mtp_block."
"""Where the layers of DeepSeek's kind keep what is like a layer of the model; their
checkpoints have it beside the rest."""

RENAMED = "model.", "mtp."
"""What the tree of Qwen3-Next's kind has for a prefix, and its checkpoint. A drafter of
that kind tells which names it does not read; of those is every one with the first."""


class ModelWithDrafter(torch.nn.Module):
    """The root of such a tree; it is walked and loaded into, and never run.

    Attributes:
        target: the model.
        draft: its drafter.
        is_mtp: whether the drafter's tensors come among the model's.
        is_drafting: whether the drafter's loader is at work at this moment.

    """

    target: torch.nn.Module
    draft: torch.nn.Module

    def __init__(
        self, target: torch.nn.Module, draft: torch.nn.Module, *, is_mtp: bool = False
    ) -> None:
        super().__init__()
        self.is_mtp = is_mtp
        # Not through __setattr__: the model is to be this root, and not below it.
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
        """Give each its own, in the order in which they come."""
        return self.target.load_weights(self._of_target(weights))  # type: ignore[operator]

    def _of_target(self, weights: Iterable[Pair]) -> Iterator[Pair]:
        for name, tensor in weights:
            if self.is_mtp:
                self._draft(name, tensor)
            elif name.startswith(DRAFT):
                self._draft(name.removeprefix(DRAFT), tensor)
                continue
            yield name, tensor
            del tensor  # a transport uses memory again that nobody looks into

    def _draft(self, name: str, tensor: torch.Tensor) -> None:
        # One by one: loaders of drafters collect what they are given before they load.
        # Some look then whether each layer has come, which a stream of them cannot
        # pass; that all have come is looked at by the audit.
        self.is_drafting = True
        try:
            with upstream.disable_mtp_completeness_check():
                self.draft.load_weights([(name, tensor)])  # type: ignore[operator]
        finally:
            self.is_drafting = False

    def sent_name(self, name: str) -> str:
        """What a tensor is sent as that fills `name` of the tree, shards told apart."""
        if not self.is_mtp or not name.startswith(DRAFT):
            return name
        # As the drafter's loader reads it, backwards.
        name = name.removeprefix(DRAFT)
        mapper: Any = getattr(self.draft, "hf_to_vllm_mapper", None)
        if mapper is None:
            is_unread = getattr(self.draft, "is_unused_checkpoint_weight", None)
            if is_unread is not None and is_unread(name):
                return name.replace(*RENAMED, 1)
            return name.replace(BLOCK, ".")
        read = mapper.orig_to_new_substr | mapper.orig_to_new_prefix
        for sent, known in read.items():
            if known is not None:  # else it is dropped
                name = name.replace(known, sent, 1)
        return name


def drafter_of(worker: Any) -> Any:
    """The drafter of a worker that has loaded its models, if it has weights."""
    runner = getattr(worker, "model_runner", None)
    drafter: Any = getattr(runner, "get_draft_model", lambda: None)()
    if not hasattr(drafter, "parameters"):
        return None  # one that looks drafts up
    return drafter if next(drafter.parameters(), None) is not None else None


def served_by(worker: Any) -> torch.nn.Module:
    """The model of a worker; with its drafter, if that has weights."""
    model: torch.nn.Module = worker.model_runner.get_model()
    drafter = drafter_of(worker)
    if drafter is None:
        return model
    return ModelWithDrafter(model, drafter, is_mtp=has_mtp(worker.vllm_config))


def has_mtp(vllm_config: Any) -> bool:
    """Whether the drafter of an engine is layers of its model's checkpoint."""
    return getattr(vllm_config.speculative_config, "method", None) == "mtp"


def sent_names(root: torch.nn.Module, names: list[str]) -> list[str]:
    """As what tensors come that have these names in the tree."""
    if not isinstance(root, ModelWithDrafter):
        return names
    return [root.sent_name(name) for name in names]


def trees(root: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The models that a tree consists of: one, or a model and its drafter."""
    return (root.target, root.draft) if isinstance(root, ModelWithDrafter) else (root,)


def share(
    live: ModelWithDrafter, target: torch.nn.Module, draft: torch.nn.Module
) -> None:
    """Let a second drafter share with a second model what the live ones share."""
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
        # In the same order: the two trees are walked side by side.
        built_of = second._modules
        order = [key for key in layer._modules if key in built_of]
        second._modules = {key: built_of[key] for key in order} | built_of

    walk(live.draft, draft)
