"""A family of models: what it takes to be made tiny, and what is particular of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

# FlashAttention 3, vLLM's choice on a GPU, has no smaller heads than 64.
HEAD_DIM = 64 if torch.cuda.is_available() else 32
WINDOW = 64
"""Shorter than the tests' prompts and outputs together."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its class, of transformers and of vLLM.
        particular: what there is in it that is not in others.
        config: the class of its configuration; by default of the same stem.
        fields: of that, beside or instead of the common ones; None leaves one out.
        odd: patterns of tensors that are small and easily forgotten.
        embedding: a factor for the embedding; where it is scaled up again, a random
            model would else repeat its prompt.

    """

    architecture: str
    particular: str
    config: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    odd: tuple[str, ...] = ("*norm*",)
    embedding: float = 1.0

    def make(self, **common: Any) -> Any:
        """A random model of it, in float32."""
        stem = self.architecture.partition("For")[0]
        configure = getattr(transformers, self.config or f"{stem}Config")
        fields = {**common, **self.fields}
        given = {n: v for n, v in fields.items() if v is not None or n in KEPT}
        model = getattr(transformers, self.architecture)(configure(**given))
        model.get_input_embeddings().weight.data *= self.embedding
        return model


KEPT = ("bos_token_id", "q_lora_rank")
"""Fields for which None is a value."""


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
CORRECTED = "a router with a correction bias"
