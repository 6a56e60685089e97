"""Ignored tensors: tensors that checkpoints contain and the engine does not use.

These are buffers of older checkpoints, a head that is tied to the embedding, and
tensors that a drafter was trained with. Others belong to parts that the engine was
built without: towers with `--language-model-only` or limits of 0, and MTP layers
without drafting. An update may contain them, and the engine does not keep them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.model.kinds.classifier import Classifier
from vllm.inflight.worker.model.kinds.drafter import ModelWithDrafter, trees
from vllm.inflight.worker.model.layers import parameters

ROTARY: tuple[str, ...] = (".rotary_emb.inv_freq",)
HEAD = "lm_head.weight"
FROM_TARGET = "draft.t2d"
"""Which of the model's tokens a drafter has; its loader reads the opposite, `d2t`."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of configurations that hold the number of MTP layers."""


@dataclass(frozen=True, slots=True)
class IgnoredTensors:
    """The ignored tensors of one model, by their names in a checkpoint.

    Attributes:
        endings: of names that may come with any update.
        headless: prefixes of the model and of its drafter, where the model or the
            drafter
            has no head, or a head that is another layer's weight.
        has_tied_head: whether the model's head is the embedding.
        towers: prefixes, under the model's names, of the parts it was built without.
        mtp: matches the names of MTP layers that no drafter uses.
        mapper: from a checkpoint's names to the model's; None if they are the same.
        is_mtp: whether tensors that the mapper drops are for the drafter.

    """

    endings: tuple[str, ...] = ()
    headless: tuple[str, ...] = ()
    has_tied_head: bool = False
    towers: tuple[str, ...] = ()
    mtp: re.Pattern[str] | None = None
    mapper: Any = None
    is_mtp: bool = False

    @classmethod
    def of(
        cls,
        live: torch.nn.Module,
        model_config: upstream.ModelConfig,
        classifier: Classifier | None = None,
    ) -> Self:
        """The ignored tensors of a model, and of its drafter if it has one.

        Args:
            live: the model, as it was loaded.
            model_config: vLLM's, of the model.
            classifier: how the score is computed, if it is; then the head is used.

        """
        heads = [n for n, *_ in parameters(live) if n.endswith(HEAD)]
        drafts = [name for name in heads if name.startswith(DRAFT)]
        is_tied = getattr(model_config.hf_config, "tie_word_embeddings", False) or (
            # Upstream has found head and embedding equal; see build.py.
            model_config.word_embeddings_untied_by_checkpoint and heads == drafts
        )
        is_pooling = model_config.runner_type == "pooling"
        if classifier is not None:
            is_tied, is_pooling = classifier.is_tied, False
        has_draft_head = bool(drafts) or not isinstance(live, ModelWithDrafter)
        towers = tuple(
            f"{path}."
            for path, layer in live.named_modules()
            if isinstance(layer, upstream.StageMissingLayer)
        )
        is_mtp = getattr(live, "is_mtp", False)
        return cls(
            endings=(
                *ROTARY,
                *((FROM_TARGET,) if isinstance(live, ModelWithDrafter) else ()),
                *quantized.unused_scales(live),
            ),
            headless=(
                *(("",) if is_tied or is_pooling else ()),
                *(() if has_draft_head else (DRAFT,)),
            ),
            has_tied_head=bool(is_tied) and not is_pooling,
            towers=towers,
            mtp=None if is_mtp else mtp_names(model_config.hf_text_config),
            mapper=getattr(trees(live)[0], "hf_to_vllm_mapper", None),
            is_mtp=is_mtp,
        )

    def __contains__(self, name: str) -> bool:
        if name.endswith(HEAD):
            return (DRAFT if name.startswith(DRAFT) else "") in self.headless
        return name.endswith(self.endings)

    def is_spare(self, name: str) -> bool:
        """Whether a tensor may come with a whole version although nothing uses it."""
        return name in self or self.has_left_out(name)

    def is_tied(self, name: str) -> bool:
        """Whether a tensor is the model's head, which is tied to the embedding."""
        is_head = name.endswith(HEAD) and not name.startswith(DRAFT)
        return self.has_tied_head and is_head

    def has_left_out(self, name: str) -> bool:
        """Whether a tensor belongs to a part that is ignored in whole updates only."""
        if self.mtp is not None and self.mtp.match(name):
            return True
        mapped = self.mapper.apply_list([name]) if self.mapper else [name]
        if not mapped:
            return not self.is_mtp
        return any(path.startswith(self.towers) for path in mapped)


def mtp_names(config: object) -> re.Pattern[str] | None:
    """A pattern for the names of MTP layers; None if a model has none.

    MTP layers have names of their own (`mtp.fc.weight`, `model.mtp_block.0.*`), or
    follow the model's last layer. The pattern covers exactly their number: a checkpoint
    of a deeper model does not fit this one.
    """
    num_mtp = next((n for f in MTP_LAYERS if (n := getattr(config, f, None))), 0)
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_mtp or num_layers is None:
        return None
    numbers = "|".join(str(num_layers + n) for n in range(num_mtp))
    prefix = r"(?:model\.|language_model\.)*"
    return re.compile(rf"{prefix}(?:mtp(?:_\w+)?|layers\.(?:{numbers}))\.")
