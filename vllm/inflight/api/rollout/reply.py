"""A reply of SGLang's `/generate`: text, token ids, and `meta_info`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm.inflight import upstream
from vllm.inflight.api.rollout.request import Ask, Logprobs
from vllm.inflight.outputs.openai import KV_FIELD
from vllm.inflight.outputs.spans import as_dicts

LEAST_LOGPROB = -9999.0
"""The value of an impossible token, since JSON has no infinity; upstream's too."""

Entry = list[Any]
"""SGLang's form of a log-probability: `[logprob, token id, text or null]`."""


def written(
    ask: Ask,
    result: upstream.RequestOutput,
    output: upstream.CompletionOutput,
    *,
    live: str,
) -> dict[str, Any]:
    """The reply to one prompt, or to one choice of several.

    Args:
        ask: the prompt.
        result: its output.
        output: the choice.
        live: the label of the live weights, for a reply without tokens.

    """
    tokens = [] if ask.scores_only else list(output.token_ids)
    spans = output.weight_versions or []
    prompt_ids: Sequence[int] = result.prompt_token_ids or []
    meta: dict[str, Any] = {
        "id": ask.rid,
        "finish_reason": finish_reason(ask, output, tokens),
        "prompt_tokens": len(prompt_ids),
        "weight_version": spans[-1].version if spans else live,
        "weight_versions": [] if ask.scores_only else as_dicts(spans),
        "completion_tokens": len(tokens),
        "cached_tokens": result.num_cached_tokens or 0,
    }
    if (read := getattr(output, KV_FIELD, None)) is not None:
        meta[KV_FIELD] = as_dicts(read)
    if ask.logprobs is not None:
        meta |= _logprobs(ask, ask.logprobs, result, output, tokens)
    if output.routed_experts is not None:
        meta["routed_experts"] = routing(output.routed_experts)
    text = "" if ask.scores_only else output.text
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def finish_reason(
    ask: Ask, output: upstream.CompletionOutput, tokens: Sequence[int]
) -> dict[str, Any] | None:
    """Why a choice ended, as SGLang says it; None while it goes on."""
    reason, matched = output.finish_reason, output.stop_reason
    if reason is None:
        return None
    if reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    if reason == "length" or ask.scores_only:
        return {"type": "length", "length": len(tokens)}
    if matched is None and tokens:
        matched = tokens[-1]  # the model's own end token
    return {"type": "stop", "matched": matched}


def _logprobs(
    ask: Ask,
    wanted: Logprobs,
    result: upstream.RequestOutput,
    output: upstream.CompletionOutput,
    tokens: Sequence[int],
) -> dict[str, Any]:
    outputs: Sequence[Any] = (output.logprobs or [])[: len(tokens)]
    said: list[Entry] = [
        _entry(found, token, wanted)
        for found, token in zip(outputs, tokens, strict=False)
    ]
    prompt_ids = list(result.prompt_token_ids or [])
    read: Sequence[Any] = []
    if wanted.start is not None:
        read = (result.prompt_logprobs or [])[wanted.start :]
        prompt_ids = prompt_ids[wanted.start :]
    # SGLang does not compute the first one, and its clients skip it.
    inputs: list[Entry] = [
        [None, token, None] if n == 0 else _entry(found, token, wanted)
        for n, (found, token) in enumerate(zip(read, prompt_ids, strict=False))
    ]
    meta: dict[str, Any] = {
        "input_token_logprobs": inputs,
        "output_token_logprobs": said,
        "output_token_logprobs_length": len(said),
    }
    if wanted.num_top:
        meta["input_top_logprobs"] = [
            None if n == 0 else _top(found, wanted) for n, found in enumerate(read)
        ]
        meta["output_top_logprobs"] = [_top(found, wanted) for found in outputs]
    if wanted.token_ids is not None:
        meta["input_token_ids_logprobs"] = []
        meta["output_token_ids_logprobs"] = [
            [_entry(found, token, wanted) for token in wanted.token_ids]
            for found in outputs
        ]
    return meta


def _entry(found: Mapping[int, Any], token: int, wanted: Logprobs) -> Entry:
    one = found[token]
    text = one.decoded_token if wanted.has_text else None
    return [max(one.logprob, LEAST_LOGPROB), token, text]


def _top(found: Mapping[int, Any], wanted: Logprobs) -> list[Entry]:
    likeliest = sorted(found, key=lambda token: found[token].rank)[: wanted.num_top]
    return [_entry(found, token, wanted) for token in likeliest]


def returns_routing(config: upstream.VllmConfig) -> bool:
    """Whether an engine was started with `--enable-return-routed-experts`."""
    # Until vLLM 0.30 the flag is the model's.
    holder = getattr(config, "aux_output_config", config.model_config)
    return bool(getattr(holder, "enable_return_routed_experts", False))


def routing(experts: Any) -> str:
    """The experts of each token and layer, as base64 of 32-bit integers."""
    return base64.b64encode(np.asarray(experts, np.int32).tobytes()).decode()
