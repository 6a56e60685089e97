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
from vllm.inflight.errors import Malformed, WeightsMismatch

CONFIG = "config.json"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
"""Spellings of one thing; transformers keeps the last."""
OF_NO_CONCERN = frozenset({"architectures", "dtype", "torch_dtype", "use_cache"})
"""Besides names, versions, special tokens and what only training reads."""
MODELS_IN_A_MODEL = "_config"
"""How their fields end: `text_config`, `vision_config`."""
ENDINGS_OF_NO_CONCERN = ("_name_or_path", "_version", "_token_id", "dropout", "_range")


def require_same_config(folder: Path, model_config: Any) -> None:
    """Compare the `config.json` of a checkpoint, if it has one; see `require_same`.

    Raises:
        Malformed: it is no model's configuration.
        WeightsMismatch: it states another model.

    """
    file = folder / CONFIG
    if not file.is_file():
        return
    try:
        stated = json.loads(file.read_text())
    except ValueError as error:
        raise Malformed(f"{file} is no JSON: {error}") from error
    if not isinstance(stated, dict):
        raise Malformed(f"{file} is not a model's configuration: it is no object")
    require_same(stated, model_config)


def require_same(stated: Mapping[str, Any], model_config: Any) -> None:
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
    kind = stated.get("model_type", live.model_type)
    if kind == live.model_type:
        differing = list(
            _differing(stated, _read(stated, model_config), live.to_dict())
        )
    else:
        differing = [f"model_type is {live.model_type!r} here and {kind!r} there"]
    if differing:
        raise WeightsMismatch(
            f"the model of these weights is another one: {'; '.join(differing)}. That "
            "is built in when an engine starts, whatever becomes of requests and KV; "
            "start one on the new checkpoint"
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
        except (ValueError, TypeError, AttributeError, OSError) as error:
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
    named = {ROPE[-1] if name in ROPE else name: None for name in stated}
    for name in named:
        if name in OF_NO_CONCERN or name.endswith(ENDINGS_OF_NO_CONCERN):
            continue
        if name not in live or name not in read or read[name] == live[name]:
            continue
        is_model = isinstance(live[name], dict) and name.endswith(MODELS_IN_A_MODEL)
        if is_model and isinstance(stated.get(name), dict):
            yield from _differing(stated[name], read[name], live[name])
            continue
        yield f"{name} is {live[name]!r} here and {read[name]!r} there"
