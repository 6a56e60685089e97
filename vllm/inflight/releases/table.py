"""The releases of vLLM that this package runs on, and how they differ.

Records of `patch/` and names of `upstream.py` describe the release `REFERENCE`. The
tables here say what differs in other releases; no other file asks for the release.

A table maps a key to entries `{release: value}`. An entry holds from its release on,
until the release of the next entry. The value for `REFERENCE` is not in the table: it
is in the record or in `upstream.NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

SUPPORTED = ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The releases of vLLM that this package runs on, oldest first."""

REFERENCE = "0.32.0"
"""The release that records and names describe."""

AS_IN_REFERENCE: Any = object()
"""The value of an entry from whose release on nothing differs."""

Value = TypeVar("Value")


def number_of(release: str) -> tuple[int, ...]:
    """A release as numbers: `0.32.0rc1` is (0, 32, 0). A name counts as `REFERENCE`."""
    try:
        return Version(release).release
    except InvalidVersion:
        return Version(REFERENCE).release


def is_between_releases(version: str) -> bool:
    """Whether a version is of a nightly build or a candidate, or has no number."""
    try:
        return Version(version).is_prerelease
    except InvalidVersion:
        return True


@cache
def installed() -> str:
    """The installed release of vLLM, without the name of its build: `0.32.0`."""
    from vllm.version import __version__

    return str(__version__).partition("+")[0]


def holds(since: str | None, before: str | None, release: str | None = None) -> bool:
    """Whether a release is in [`since`, `before`); None is no bound.

    Args:
        since: the first release.
        before: the first release after the last one.
        release: the release; None for the installed one.

    """
    number = number_of(installed() if release is None else release)
    is_early = since is not None and number < number_of(since)
    return not is_early and (before is None or number < number_of(before))


def differing(
    entries: Mapping[str, Value] | None, usual: Value, release: str | None = None
) -> Value:
    """The value of a key in a release.

    Args:
        entries: the entries of the key in a table of this file, if there are any.
        usual: the value in `REFERENCE`.
        release: the release; None for the installed one.

    """
    if not entries:
        return usual
    value = _entry({REFERENCE: usual} | dict(entries), release)
    return usual if value is AS_IN_REFERENCE else value


def _entry(entries: Mapping[str, Value], release: str | None = None) -> Value:
    """The newest entry that holds in a release; the oldest if none does."""
    number = number_of(installed() if release is None else release)
    oldest_first = sorted(entries, key=number_of)
    passed = [since for since in oldest_first if number_of(since) <= number]
    return entries[passed[-1] if passed else oldest_first[0]]


_OUTPUTS = "vllm.v1.engine.output_processor"
_OPENAI = "vllm.entrypoints.openai"
_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens"

SIGNATURES: dict[str, dict[str, tuple[str, ...] | None]] = {
    f"{_OUTPUTS}:OutputProcessor.process_outputs": {
        "0.29.0": (
            "self",
            "engine_core_outputs",
            "engine_core_timestamp",
            "iteration_stats",
        ),
    },
    f"{_OUTPUTS}:RequestState.make_request_output": {
        "0.29.0": (
            "self",
            "new_token_ids",
            "pooling_output",
            "finish_reason",
            "stop_reason",
            "kv_transfer_params",
            "ec_transfer_params",
        ),
    },
    f"{_OPENAI}.chat_completion.batch_serving:OpenAIServingChatBatch."
    "chat_completion_full_generator_batch": {
        "0.29.0": (
            "self",
            "request",
            "generators",
            "request_id",
            "model_name",
            "all_conversations",
            "tokenizer",
            "request_metadata",
            "parser",
        ),
    },
    f"{_ASYNC}.generate": {
        "0.29.0": (
            "self",
            "prompt",
            "sampling_params",
            "request_id",
            "prompt_text",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "session_id",
            "reasoning_ended",
            "reasoning_parser_kwargs",
        ),
        "0.31.0": AS_IN_REFERENCE,
    },
    f"{_ASYNC}.add_request": {
        "0.29.0": (
            "self",
            "request_id",
            "prompt",
            "params",
            "arrival_time",
            "lora_request",
            "tokenization_kwargs",
            "trace_headers",
            "priority",
            "data_parallel_rank",
            "session_id",
            "prompt_text",
            "reasoning_ended",
            "reasoning_parser_kwargs",
        ),
        "0.31.0": AS_IN_REFERENCE,
    },
    "vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator": {
        "0.29.0": (
            "engine_count",
            "front_publish_address",
            "back_output_address",
            "back_publish_address",
            "zmq_addr_pipe",
            "min_stats_update_interval_ms",
            "enable_wave_coordination",
        ),
        "0.31.0": AS_IN_REFERENCE,
    },
    f"{_OUTPUTS}:RequestState._weight_version_spans": {"0.29.0": None},
    f"{_ASYNC}.shutdown_weight_transfer_engine": {"0.29.0": None},
    "vllm.entrypoints.llm:LLM.shutdown_weight_transfer_engine": {"0.29.0": None},
    f"{_ASYNC}.pause_generation": {
        "0.29.0": ("self", "mode", "wait_for_inflight_requests", "clear_cache"),
    },
    f"{_TOKENS}.__init__": {
        "0.33.0": (
            "self",
            "engine_client",
            "models",
            "online_renderer",
            "online_derenderer",
            "request_logger",
            "force_no_detokenize",
            "return_tokens_as_token_ids",
            "enable_prompt_tokens_details",
            "enable_log_outputs",
        ),
    },
    f"{_TOKENS}.serve_tokens_full_generator": {
        "0.33.0": (
            "self",
            "request",
            "result_generator",
            "request_id",
            "model_name",
            "request_metadata",
            "derender_request",
        ),
    },
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": {
        "0.33.0": ("self", "request", "max_cache_hit_length"),
    },
}
"""Target of a record → its parameters, where they differ from those in the record.
None where the release lacks the method and we add it."""

_STAND_INS = "vllm.inflight.releases.stand_ins"

PLACES: dict[str, dict[str, str]] = {
    "get_watch_dog": {"0.33.0": "vllm.utils.watch_dog:get_watch_dog"},
    "FusedMMInputNorm": {
        "0.29.0": f"{_STAND_INS}:NoSuchClass",
        "0.31.0": AS_IN_REFERENCE,
    },
    "unpinned_nccl_env": {"0.29.0": f"{_STAND_INS}:unchanged_environment"},
    "WeightVersionSpan": {"0.29.0": f"{_STAND_INS}:WeightVersionSpan"},
    "RequestError": {"0.29.0": f"{_STAND_INS}:RequestError"},
    "RayDistributedExecutor": {"0.33.0": f"{_STAND_INS}:NoSuchClass"},
}
"""Name of `upstream.NAMES` → `module:attribute`, where it differs. A place in this
package is a stand-in for a name that the release lacks."""

_SCHEDULING = "vllm.inflight.engine.scheduling"
_TRANSPORT = "vllm.inflight.transport"

ADAPTERS: dict[str, dict[str, str]] = {
    "waiting requests": {
        "0.29.0": f"{_SCHEDULING}.waiting:SkippedRequests",
        "0.31.0": f"{_SCHEDULING}.waiting:HeldBackRequests",
        "0.32.0": f"{_SCHEDULING}.waiting:WaitingRequests",
    },
    "order of waiting requests": {
        "0.29.0": f"{_SCHEDULING}.waiting:InOrderByStatus",
        "0.31.0": f"{_SCHEDULING}.waiting:InOrder",
    },
    "stamps": {
        "0.29.0": f"{_SCHEDULING}.stamp_reports:RequestStamps",
        "0.32.0": f"{_SCHEDULING}.stamp_reports:StepStamps",
    },
    "weight source": {
        "0.29.0": f"{_TRANSPORT}.iterated_source:IteratedSource",
        "0.33.0": f"{_TRANSPORT}.owned_source:OwnedSource",
    },
}
"""What differs → `module:Class` of ours, by release. The classes of one entry have the
same methods."""


def adapter(name: str) -> Any:
    """The class of ours that fits the installed release.

    Args:
        name: a key of `ADAPTERS`.

    """
    module, _, attribute = _entry(ADAPTERS[name]).partition(":")
    return getattr(import_module(module), attribute)
