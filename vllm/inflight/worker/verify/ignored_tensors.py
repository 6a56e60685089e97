"""Spares: what comes with many checkpoints, and is of no use to an engine.

Buffers of older checkpoints, a head that is tied to the embedding, what a drafter was
trained with. And what the engine was built without: towers, if it is to see nothing
(`--language-model-only`, or limits of 0), MTP layers, if it does not draft with them.
An update may bring it, and nothing of it is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.model import quantized
from vllm.inflight.worker.model.classifier import Classifier
from vllm.inflight.worker.model.drafter import ModelWithDrafter, trees
from vllm.inflight.worker.model.layers import parameters

ROTARY: tuple[str, ...] = (".rotary_emb.inv_freq",)
HEAD = "lm_head.weight"
FROM_TARGET = "draft.t2d"
"""Which tokens of the model a drafter has; its loader reads the opposite, `d2t`."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of configurations that say how many MTP layers there are."""


@dataclass(frozen=True, slots=True)
class IgnoredTensors:
    """The spares of one model, by their names in a checkpoint.

    Attributes:
        endings: of names that may come with any update.
        headless: prefixes of the model, and of its drafter, that have no head, or one
            that is another layer's weight.
        has_tied_head: whether the model's is, and is the embedding.
        towers: prefixes, under the model's names, of what it was built without.
        mtp: matches the names of MTP layers that nobody drafts with.
        mapper: from a checkpoint's names to the model's; None if they are the same.
        is_mtp: whether what the mapper drops is for the drafter.

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
        model_config: Any,
        classifier: Classifier | None = None,
    ) -> Self:
        """Those of a model, and its drafter if it has one.

        Args:
            live: the model, as it was loaded.
            model_config: vLLM's, of it.
            classifier: what its score is made of, if that is made; the head is no
                spare then.

        """
        heads = [n for n, *_ in parameters(live) if n.endswith(HEAD)]
        drafts = [name for name in heads if name.startswith(DRAFT)]
        is_tied = getattr(model_config.hf_config, "tie_word_embeddings", False) or (
            # Upstream has found the two to be one; see build.py.
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

    def is_tied(self, name: str) -> bool:
        """Whether it is the model's head, which is the embedding."""
        is_head = name.endswith(HEAD) and not name.startswith(DRAFT)
        return self.has_tied_head and is_head

    def has_left_out(self, name: str) -> bool:
        """Whether it is of a part that may come with all the rest, and not alone."""
        if self.mtp is not None and self.mtp.match(name):
            return True
        mapped = self.mapper.apply_list([name]) if self.mapper else [name]
        if not mapped:
            return not self.is_mtp
        return any(path.startswith(self.towers) for path in mapped)


def mtp_names(config: Any) -> re.Pattern[str] | None:
    """How the tensors of MTP layers are named; None if a model has none.

    By themselves (`mtp.fc.weight`, `model.mtp_block.0.*`), or as layers behind the
    model's last. No more of these than there are: the checkpoint of a deeper model is
    none of this one.
    """
    num_mtp = next((n for f in MTP_LAYERS if (n := getattr(config, f, None))), 0)
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_mtp or num_layers is None:
        return None
    numbers = "|".join(str(num_layers + n) for n in range(num_mtp))
    prefix = r"(?:model\.|language_model\.)*"
    return re.compile(rf"{prefix}(?:mtp(?:_\w+)?|layers\.(?:{numbers}))\.")
