"""The parts of a model that are built at start, and that no tensor can change.

The rope, the heads, the kinds of layers and their constants are read once from the
model's configuration. A version with another configuration would be computed with the
old one: right in every byte and wrong in every token.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import CAUSES, Cause, Malformed, WeightsMismatch
from vllm.inflight.transport.files.allowed_paths import read_json

CONFIG = "config.json"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
"""Names of one setting; transformers keeps the last."""
COMPARED = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
        *("q_lora_rank", "kv_lora_rank"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        *("hidden_act", "hidden_activation", "attention_bias", "mlp_bias"),
        *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
        *("logits_scaling", "logit_scale", "norm_topk_prob"),
        *(
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts_per_tok",
        ),
        ROPE[-1],
    }
)
"""Fields that decide how tokens are computed, and that vLLM does not change.

Not listed: tied embeddings, windows, vocabularies (shapes tell), and fields that only
training or a tokenizer reads.
"""
MOST_LAYERS = 1 << 16
"""transformers makes a list of as many entries before anything is compared."""
MODELS_IN_A_MODEL = "_config"
"""Ending of fields that hold a configuration: `text_config`, `vision_config`."""


def require_same_config(folder: Path, model_config: upstream.ModelConfig) -> None:
    """Compare the `config.json` of a checkpoint, if there is one, with the model.

    Raises:
        Malformed: the file is no model's configuration.
        WeightsMismatch: the file describes another model.

    """
    file = folder / CONFIG
    if not file.is_file():
        return
    stated = read_json(file)
    if not isinstance(stated, dict):
        raise Malformed(f"{file} is not a model's configuration: it is no object")
    require_same_architecture(stated, model_config)


def require_same_architecture(
    stated: Mapping[str, Any], model_config: upstream.ModelConfig
) -> None:
    """Compare fields of a `config.json` with the configuration that the model was built
    from.

    Args:
        stated: the fields; fields that are missing or set by `--hf-overrides` are not
            compared.
        model_config: vLLM's, of the live model.

    Raises:
        Malformed: the fields are no model's configuration.
        WeightsMismatch: they describe another model; the message lists the differences.

    """
    live = model_config.hf_config
    if getattr(model_config, "hf_config_path", None):
        return  # the model was built from another file than the checkpoint's
    layers = stated.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise Malformed(f"not a model's configuration: {layers:.3g} layers")
    kind = stated.get("model_type", live.model_type)
    if kind == live.model_type or model_config.hf_overrides:
        differing = list(
            _differing(stated, _read(stated, model_config), live.to_dict())
        )
    else:
        differing = [f"model_type is {live.model_type!r} here and {kind!r} there"]
    if differing:
        raise WeightsMismatch(
            f"the model of these weights is another one: {'; '.join(differing)}. That "
            "is built in when an engine starts, whatever becomes of requests and KV; "
            "start one on the new checkpoint",
            remedy=CAUSES[Cause.MODEL][1],
        )


def _read(
    stated: Mapping[str, Any], model_config: upstream.ModelConfig
) -> dict[str, Any]:
    """The whole configuration, read as the model's own was.

    So spellings and defaults do not matter. Fields that are not stated are the model's.
    """
    overrides = model_config.hf_overrides
    own = model_config.hf_config.to_dict()
    whole = _without(own, stated) | dict(stated)
    if isinstance(overrides, Mapping):
        # Fields set by overrides keep their value, whatever the checkpoint says.
        kept = _without(own, overrides)
        whole = {**_without(whole, overrides), **{n: own[n] for n in own.keys() - kept}}
    if "auto_map" in whole:
        return whole  # the class that reads it is in another folder
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(whole, default=str))
        try:
            read = upstream.get_config(
                folder,
                model_config.trust_remote_code,
                hf_overrides_fn=overrides if callable(overrides) else None,
            )
        except Exception as error:  # transformers raises many kinds of errors
            raise Malformed(f"not a model's configuration: {error}") from error
    found: dict[str, Any] = read.to_dict()
    return found


def _without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """`config` without the fields of these names, in any spelling."""
    gone = {*names, *(ROPE if not set(names).isdisjoint(ROPE) else ())}
    return {name: value for name, value in config.items() if name not in gone}


def _differing(
    stated: Mapping[str, Any], read: Mapping[str, Any], live: Mapping[str, Any]
) -> Iterator[str]:
    for name in {ROPE[-1] if name in ROPE else name: None for name in stated}:
        here, there = live.get(name), read.get(name)
        if name.endswith(MODELS_IN_A_MODEL):
            if isinstance(here, Mapping) and isinstance(there, Mapping):
                value_there = stated[name]
                inner = value_there if isinstance(value_there, Mapping) else {}
                yield from _differing(inner, there, here)
        elif name in COMPARED and not _is_same(here, there):
            yield f"{name} is {here!r} here and {there!r} there"


def _is_same(here: object, there: object) -> bool:
    """Whether two values agree; a value that is missing agrees with any."""
    if here is None or there is None:
        return True
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        # Models add fields to their own rope when they are built.
        return all(here.get(name) == value for name, value in there.items())
    return bool(here == there)
