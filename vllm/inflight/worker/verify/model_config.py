"""What a model has built in when it starts, and no tensor can change.

The rope, the heads, the layers' kinds and their constants are read from the model's
configuration once. A version that states another configuration would be computed with
the old one: right in every byte and wrong in every token.
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
"""Spellings of one thing; transformers keeps the last."""
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
"""What decides how tokens are computed, and vLLM does not change after reading it.

Not here, for one of these reasons: tied embeddings, windows, vocabularies (shapes
tell), and all that only training or a tokenizer reads.
"""
MOST_LAYERS = 1 << 16
"""transformers makes a list of as many before anything is compared."""
MODELS_IN_A_MODEL = "_config"
"""How their fields end: `text_config`, `vision_config`."""


def require_same_config(folder: Path, model_config: Any) -> None:
    """Compare the `config.json` of a checkpoint, if it has one; see `require_same`.

    Raises:
        Malformed: it is no model's configuration.
        WeightsMismatch: it states another model.

    """
    file = folder / CONFIG
    if not file.is_file():
        return
    stated = read_json(file)
    if not isinstance(stated, dict):
        raise Malformed(f"{file} is not a model's configuration: it is no object")
    require_same_architecture(stated, model_config)


def require_same_architecture(stated: Mapping[str, Any], model_config: Any) -> None:
    """Compare fields of a `config.json` with what the model was built from.

    Args:
        stated: the fields; those left out are not compared, nor those that
            `--hf-overrides` set.
        model_config: vLLM's, of the model that is served.

    Raises:
        Malformed: they are no model's configuration.
        WeightsMismatch: they are another model's; the message says how they differ.

    """
    live = model_config.hf_config
    if getattr(model_config, "hf_config_path", None):
        return  # it was built from another file than its checkpoint's
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


def _read(stated: Mapping[str, Any], model_config: Any) -> dict[str, Any]:
    """The whole configuration, read as the model's own was.

    So spellings and defaults do not matter. What is not stated is the model's.
    """
    overrides = model_config.hf_overrides
    own = model_config.hf_config.to_dict()
    whole = _without(own, stated) | dict(stated)
    if isinstance(overrides, Mapping):
        # What they set is the model's own, whatever a checkpoint says.
        kept = _without(own, overrides)
        whole = {**_without(whole, overrides), **{n: own[n] for n in own.keys() - kept}}
    if "auto_map" in whole:
        return whole  # the class that reads it lies in another folder
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(whole, default=str))
        try:
            read = upstream.get_config(
                folder,
                model_config.trust_remote_code,
                hf_overrides_fn=overrides if callable(overrides) else None,
            )
        except Exception as error:  # transformers has errors of many kinds
            raise Malformed(f"not a model's configuration: {error}") from error
    found: dict[str, Any] = read.to_dict()
    return found


def _without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Without the fields of these names, in whatever spelling."""
    gone = {*names, *(ROPE if not set(names).isdisjoint(ROPE) else ())}
    return {name: value for name, value in config.items() if name not in gone}


def _differing(
    stated: Mapping[str, Any], read: Mapping[str, Any], live: Mapping[str, Any]
) -> Iterator[str]:
    for name in {ROPE[-1] if name in ROPE else name: None for name in stated}:
        here, there = live.get(name), read.get(name)
        if name.endswith(MODELS_IN_A_MODEL):
            if isinstance(here, Mapping) and isinstance(there, Mapping):
                told = stated[name]
                inner = told if isinstance(told, Mapping) else {}
                yield from _differing(inner, there, here)
        elif name in COMPARED and not _is_same(here, there):
            yield f"{name} is {here!r} here and {there!r} there"


def _is_same(here: Any, there: Any) -> bool:
    """What is not said, on either side, is no difference."""
    if here is None or there is None:
        return True
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        # Models add to their own rope when they are built.
        return all(here.get(name) == value for name, value in there.items())
    return bool(here == there)
