"""A request of SGLang's `/generate`, as prompts with vLLM's sampling parameters.

A field that this server cannot honour is rejected by name. A value that asks for
nothing (`false`, null, an empty list) is accepted, because clients send such fields
with their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.api.request.fields import Fields
from vllm.inflight.api.request.schema import GENERATING, SAMPLING
from vllm.inflight.errors import Malformed
from vllm.inflight.wording import nearest

WITHOUT_EFFECT = (
    *("log_metrics", "no_logs", "custom_labels", "received_time", "routing_key"),
    *("external_trace_header", "conversation_id", "session_id"),
)
"""Fields for logs, metrics and routers, which do not change a reply."""

UNSUPPORTED: dict[str, str] = {
    "image_data": "use /v1/chat/completions for images",
    "video_data": "use /v1/chat/completions for videos",
    "audio_data": "use /v1/chat/completions for audio",
    "input_embeds": "send 'text' or 'input_ids'",
    "session_params": "send the whole prompt; the prefix cache has its KV",
    "custom_logit_processor": "it is a pickle, which can run anything",
    "return_hidden_states": "vLLM does not return them here",
    "return_indexer_topk": "vLLM does not return it",
    "return_sampling_mask": "use /inference/v1/generate on a server that returns it",
    "return_entropy": "ask for 'top_logprobs_num', and compute it",
    "return_flat_raw_top_logprobs": "leave it out for nested lists",
    "return_flat_raw_top_logprobs_b64": "leave it out for nested lists",
    "return_bytes": "this server returns text and token ids",
    "positional_embed_overrides": "send 'text' or 'input_ids'",
    "bootstrap_host": "vLLM's own connectors hand KV over",
    "bootstrap_port": "vLLM's own connectors hand KV over",
    "bootstrap_room": "vLLM's own connectors hand KV over",
    "bootstrap_pair_key": "vLLM's own connectors hand KV over",
    "require_reasoning": "use /v1/chat/completions with a reasoning parser",
    "max_thinking_tokens": "use /v1/chat/completions with a reasoning parser",
    "priority": "SGLang and vLLM order priorities the opposite way; leave it out",
    "extra_key": "use 'cache_salt'",
    "multi_item_delimiter_indices": "use /generative_scoring",
    "background": "keep the connection open until the reply",
}
"""Field -> what to do instead of it."""

UNSUPPORTED_SAMPLING: dict[str, str] = {
    "custom_params": "there are no custom logit processors here",
    "stop_regex": "use 'stop' or 'stop_token_ids'",
    "stream_interval": "start the server with --stream-interval",
}
"""Field of `sampling_params` -> what to do instead of it."""

GRAMMARS = {
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""SGLang's name of a constraint -> that of vLLM's structured outputs."""

RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
"""SGLang's name of a sampling parameter -> vLLM's, where they differ."""

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default; null means up to the model's length."""

KINDS: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities that a reply has."""

    num_top: int = 0
    """How many of the likeliest tokens there are at each position."""
    token_ids: tuple[int, ...] | None = None
    """Tokens whose log-probability is wanted at each position."""
    start: int | None = None
    """The first prompt token that is reported; None for output tokens alone."""
    has_text: bool = False
    """Whether each entry has the text of its token."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a request."""

    rid: str
    prompt: dict[str, Any]
    params: upstream.SamplingParams
    logprobs: Logprobs | None
    adapter: str | None
    scores_only: bool = False
    """Whether no output is wanted: `max_new_tokens` is 0."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A whole request.

    Attributes:
        asks: one for each prompt.
        is_list: whether the reply is a list, for several prompts or choices.
        streams: whether the reply is a stream.
        data_parallel_rank: the engine that has to serve it; None for any.
        has_routing: whether the reply has the experts of each token.

    """

    asks: list[Ask]
    is_list: bool
    streams: bool
    data_parallel_rank: int | None
    has_routing: bool


def read(body: dict[str, Any], rid: str) -> Rollout:
    """Read a request.

    Args:
        body: its fields.
        rid: the id of the request, if the body has none.

    Raises:
        Malformed: a field is unknown or unsupported, or its value is wrong.

    """
    left = dict(body)
    for name, remedy in UNSUPPORTED.items():
        if left.pop(name, None) not in (None, False, 0, "", [], {}):
            raise Malformed(f"{name} is not supported by this server: {remedy}")
    for name in WITHOUT_EFFECT:
        left.pop(name, None)
    fields = Fields(left)
    prompts, is_batch = _prompts(fields)
    count = len(prompts)
    streams = fields.flag("stream", False)
    has_text = fields.flag("return_text_in_logprobs", False)
    has_routing = fields.flag("return_routed_experts", False)
    first_routed = _one(fields, "routed_experts_start_len")
    ranks = [_one(fields, n) for n in ("routed_dp_rank", "data_parallel_rank")]
    salt = fields.text("cache_salt", None)
    per_prompt = [
        dict(zip(PER_PROMPT, values, strict=True))
        for values in zip(*(_each(fields, n, count) for n in PER_PROMPT), strict=True)
    ]
    rids = _rids(fields.take("rid"), rid, count, is_batch=is_batch)
    fields.only()
    asks = []
    for prompt, own, each in zip(prompts, per_prompt, rids, strict=True):
        logprobs = _logprobs(own, has_text)
        params, scores_only = sampling(own["sampling_params"] or {}, logprobs)
        params.output_kind = (
            upstream.RequestOutputKind.CUMULATIVE
            if streams
            else upstream.RequestOutputKind.FINAL_ONLY
        )
        if has_routing and first_routed:
            params.routed_experts_prompt_start = first_routed
        if salt is not None:
            prompt["cache_salt"] = salt
        asks.append(Ask(each, prompt, params, logprobs, own["lora_path"], scores_only))
    is_list = is_batch or any(ask.params.n > 1 for ask in asks)
    rank = next((each for each in ranks if each is not None), None)
    return Rollout(asks, is_list, streams, rank, has_routing)


PER_PROMPT = (
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "lora_path"),
)
"""Fields that a batch may have as a list, with an entry for each prompt."""


def _prompts(fields: Fields) -> tuple[list[dict[str, Any]], bool]:
    """The prompts as vLLM takes them, and whether they were sent as a list."""
    text, ids = fields.take("text"), fields.take("input_ids")
    if (text is None) == (ids is None):
        raise Malformed("the body needs either 'text' or 'input_ids'")
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(each, str) and each for each in texts):
            raise Malformed("text must be a string, or a list of strings, not empty")
        return [{"prompt": each} for each in texts], isinstance(text, list)
    is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    batch = ids if is_batch else [ids]
    if not all(map(_are_ids, batch)):
        raise Malformed("input_ids must be a list of token ids, or a list of them")
    return [{"prompt_token_ids": each} for each in batch], is_batch


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(each) is int and each >= 0 for each in value)
    )


def _each(fields: Fields, name: str, count: int) -> list[Any]:
    """The values of a field for every prompt."""
    value = fields.take(name)
    is_nested = GENERATING[name].get("type") == "array"  # of one prompt a list already
    inner = value[0] if isinstance(value, list) and value else None
    if isinstance(value, list) and (not is_nested or isinstance(inner, list)):
        if len(value) != count:
            raise Malformed(f"{name} has {len(value)} entries for {count} prompts")
        values = value
    else:
        values = [value] * count
    for each in values:
        _check(name, each, GENERATING[name])
    return values


def _one(fields: Fields, name: str) -> int | None:
    value = fields.take(name)
    _check(name, value, GENERATING[name])
    number: int | None = value
    return number


def _rids(given: object, own: str, count: int, *, is_batch: bool) -> list[str]:
    """The id of each prompt."""
    if isinstance(given, list):
        if len(given) != count or not all(isinstance(r, str) and r for r in given):
            raise Malformed(f"rid must have an id for each of the {count} prompts")
        if len(set(given)) != count:
            raise Malformed("rid has the same id twice")
        return [str(each) for each in given]
    if given is not None and not (isinstance(given, str) and given):
        raise Malformed("rid must be a string, or a list of strings")
    prefix = own if given is None else str(given)
    return [f"{prefix}_{n}" for n in range(count)] if is_batch else [prefix]


def _logprobs(own: Mapping[str, Any], has_text: bool) -> Logprobs | None:
    if not own["return_logprob"]:
        return None
    start = own["logprob_start_len"]
    token_ids, num_top = own["token_ids_logprob"], own["top_logprobs_num"] or 0
    if token_ids is not None:
        if not _are_ids(token_ids):
            raise Malformed("token_ids_logprob must be a list of token ids")
        if num_top:
            raise Malformed(
                "token_ids_logprob and top_logprobs_num exclude each other in vLLM"
            )
        if start not in (None, -1):
            raise Malformed(
                "token_ids_logprob is for output tokens here: leave out "
                "logprob_start_len"
            )
        token_ids = tuple(token_ids)
    return Logprobs(
        num_top, token_ids, None if start in (None, -1) else start, has_text
    )


def sampling(
    given: dict[str, Any], logprobs: Logprobs | None
) -> tuple[upstream.SamplingParams, bool]:
    """SGLang's `sampling_params` as vLLM's, and whether no output is wanted.

    vLLM has to sample a token even if none is wanted.
    """
    left = {name: value for name, value in given.items() if value is not None}
    for name, remedy in UNSUPPORTED_SAMPLING.items():
        if left.pop(name, None):
            raise Malformed(f"sampling_params.{name} is not supported: {remedy}")
    for name, value in left.items():
        if name not in SAMPLING:
            raise Malformed(
                f"unknown field 'sampling_params.{name}'{nearest(name, SAMPLING)}; "
                f"known are {', '.join(SAMPLING)}"
            )
        _check(f"sampling_params.{name}", value, SAMPLING[name])
    is_open = "max_new_tokens" in given and given["max_new_tokens"] is None
    wanted = left.pop("max_new_tokens", None if is_open else DEFAULT_MAX_NEW_TOKENS)
    asked: dict[str, Any] = {"max_tokens": 1 if wanted == 0 else wanted}
    limits = {GRAMMARS[n]: left.pop(n) for n in GRAMMARS if n in left}
    if len(limits) > 1:
        raise Malformed(f"only one of {', '.join(GRAMMARS)} can be set")
    if limits:
        asked["structured_outputs"] = _built(upstream.StructuredOutputsParams, limits)
    if (ids := left.pop("stop_token_ids", None)) is not None:
        # SGLang's clients put the end token of a tokenizer without one there.
        asked["stop_token_ids"] = [each for each in ids if each is not None]
    if (bias := left.pop("logit_bias", None)) is not None:
        try:
            asked["logit_bias"] = {int(token): float(b) for token, b in bias.items()}
        except (TypeError, ValueError):
            raise Malformed(
                "sampling_params.logit_bias must map token ids to numbers"
            ) from None
    asked |= {RENAMED.get(name, name): value for name, value in left.items()}
    if logprobs is not None:
        if logprobs.token_ids is None:
            asked["logprobs"] = logprobs.num_top
        else:
            asked["logprob_token_ids"] = list(logprobs.token_ids)
        if logprobs.start is not None:
            asked["prompt_logprobs"] = logprobs.num_top
    return _built(upstream.SamplingParams, asked), wanted == 0


def _built(kind: Any, asked: dict[str, Any]) -> Any:
    """An object of upstream, whose rejection of a value becomes ours."""
    try:
        return kind(**asked)
    except (ValueError, TypeError, upstream.VLLMClientError) as error:
        raise Malformed(f"sampling_params: {error}") from None


def _check(name: str, value: object, schema: Mapping[str, Any]) -> None:
    """Raise `Malformed` if a value is not null and not of its schema's type."""
    kinds = schema["type"]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None:
        return
    allowed = tuple(kind for each in kinds for kind in KINDS[each])
    is_wrong_bool = isinstance(value, bool) and bool not in allowed
    least = schema.get("minimum")
    if not isinstance(value, allowed) or is_wrong_bool:
        wanted = " or ".join(kinds)
        raise Malformed(f"{name} must be of type {wanted}, got {value!r:.80}")
    if least is not None and isinstance(value, int | float) and value < least:
        raise Malformed(f"{name} must be at least {least}, got {value}")
    if isinstance(value, list) and "items" in schema:
        for each in value:
            _check(f"an entry of {name}", each, schema["items"])
