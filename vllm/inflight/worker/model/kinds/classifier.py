"""Classifiers that upstream makes of a causal model when it loads one.

Upstream's loader gives the model a head during the load. It computes the weight of the
`score` layer from a few rows of the head, and deletes the head again. At an update, it
would do so in every call, with a new head that was never filled. So an update loads all
other tensors with the loader below that one, and computes the score here, when the
tensor with those rows comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model.kinds import moe

HEAD = "lm_head.weight"
SCORE = "score.weight"
DIFFERENCE = "from_2_way_softmax"
"""The method that serves the second of two tokens' rows minus the first."""
METHODS = (DIFFERENCE, "no_post_processing")
PREFIXES = ("", "model.")
"""Prefixes that upstream adds to a checkpoint's names, whichever fits."""
BASE_LOADER = "_load_pooling_model_weights"
"""The method that loads a classifier, except its score."""
INNER = ("language_model", "lm", "text_model")
"""Attributes in which a multimodal model has the model that classifies."""


@dataclass(frozen=True, slots=True)
class Classifier:
    """How the weight of a `score` layer is computed.

    Attributes:
        source: the tensor that has its rows, under the model's name.
        is_tied: whether that is the embedding, which is loaded as well.
        rows: the row numbers, one for each of the classifier's tokens.
        method: upstream's name of the method.
        dtype: of the model, in which upstream holds those rows.
        mapper: from a checkpoint's names to the model's; None if they are the same.

    """

    source: str
    is_tied: bool
    rows: tuple[int, ...]
    method: str
    dtype: torch.dtype
    mapper: Any = None

    @classmethod
    def of(
        cls, live: torch.nn.Module, model_config: upstream.ModelConfig
    ) -> Self | None:
        """The classifier of a model; None if its score is loaded, or it has none."""
        if (method := method_of(live, model_config)) is None:
            return None
        config = model_config.hf_config.get_text_config()
        tokenizer = upstream.get_tokenizer(
            model_config.tokenizer,
            revision=model_config.tokenizer_revision,
            tokenizer_mode=model_config.tokenizer_mode,
            trust_remote_code=model_config.trust_remote_code,
        )
        tokens = _setting(model_config, "classifier_from_token")
        return cls(
            source=_embedding(live) if config.tie_word_embeddings else HEAD,
            is_tied=bool(config.tie_word_embeddings),
            rows=tuple(tokenizer.convert_tokens_to_ids(token) for token in tokens),
            method=method,
            dtype=model_config.dtype,
            mapper=getattr(live, "hf_to_vllm_mapper", None),
        )

    def reads(self, name: str) -> bool:
        """Whether the tensor of this checkpoint name has the rows."""
        if not self.is_tied:
            return name.endswith(HEAD)
        mapped = self.mapper.apply_list([name]) if self.mapper else [name]
        return any(
            prefix + known == self.source for known in mapped for prefix in PREFIXES
        )

    def score(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight of the score layer.

        Args:
            tensor: the head or the embedding, [vocabulary, hidden].

        Returns:
            [1, hidden] in float32 for `from_2_way_softmax`, else [tokens, hidden].

        Raises:
            ValueError: the tensor has no such rows.

        """
        if tensor.dim() != 2 or tensor.shape[0] <= max(self.rows):
            raise ValueError(
                f"its shape is {list(tensor.shape)}, and the classifier is made of its "
                f"rows {', '.join(map(str, self.rows))}"
            )
        # In the order of upstream's arithmetic, so that the bits equal those of a fresh
        # engine.
        rows = tensor[list(self.rows)].to(self.dtype)
        if self.method != DIFFERENCE:
            return rows
        no, yes = rows.to(torch.float32)
        return (yes - no).unsqueeze(0)


def method_of(live: torch.nn.Module, model_config: upstream.ModelConfig) -> str | None:
    """The method by which upstream computes the score; None if it does not."""
    if not hasattr(live, BASE_LOADER) or model_config.runner_type != "pooling":
        return None
    method: str | None = _setting(model_config, "method")
    return method if _setting(model_config, "classifier_from_token") else None


def classifier_obstacle(
    live: torch.nn.Module, vllm_config: upstream.VllmConfig
) -> str | None:
    """Why such a classifier cannot be updated; None if it can, or is none."""
    model_config = vllm_config.model_config
    if (method := method_of(live, model_config)) is None:
        return None
    parallel = vllm_config.parallel_config
    made = f"its score is computed from rows of the head at load ({method})"
    if method not in METHODS:
        return f"{made}, by a method that has not been tested"
    if parallel.world_size > 1:
        return f"{made}, which has not been tested on {parallel.world_size} ranks"
    if model_config.quantization is not None:
        return f"{made}, which has not been tested with quantised weights"
    is_inner = any(
        isinstance(getattr(live, name, None), torch.nn.Module) for name in INNER
    )
    if is_inner or getattr(live, "supports_multimodal", False):
        return f"{made}, which has not been tested in a multimodal model"
    return None


def loader_of(
    module: torch.nn.Module, classifier: Classifier | None
) -> Callable[..., Any]:
    """The method that loads the tensors of an update into a tree.

    It is the method of the class: during an update, the instance has the update loader.
    """
    kind: Any = type(module)
    load: Callable[..., Any] = (
        kind.load_weights if classifier is None else getattr(kind, BASE_LOADER)
    )
    return load


def tensor_names(
    module: torch.nn.Module, param: str, classifier: Classifier | None
) -> list[str]:
    """The checkpoint names of the tensors that fill a parameter of any model."""
    if classifier is not None and param == SCORE:
        return [classifier.source]
    return moe.tensor_names(module, param)


def drop_left_out(module: torch.nn.Module, live: torch.nn.Module) -> None:
    """Remove layers from a shadow model that are never run, and that `live` has
    removed."""
    for name, layer in list(module.named_modules()):
        parent, _, key = name.rpartition(".")
        if isinstance(layer, upstream.StageMissingLayer) and not _has(live, name):
            del module.get_submodule(parent)._modules[key]


def _has(model: torch.nn.Module, name: str) -> bool:
    layer: Any = model
    for key in name.split("."):
        layer = layer._modules.get(key)
        if layer is None:
            return False
    return True


def _embedding(live: Any) -> str:
    """The name of the embedding weight, to which the head is tied."""
    backbone = live.model
    layer = getattr(backbone, "embed_tokens", None) or backbone.get_input_embeddings()
    return next(
        f"{name}.weight" for name, found in live.named_modules() if found is layer
    )


def _setting(model_config: upstream.ModelConfig, name: str) -> Any:
    """A setting of the model's configuration, or of its text configuration."""
    config = model_config.hf_config
    return getattr(config, name, getattr(config.get_text_config(), name, None))
