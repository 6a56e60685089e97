"""What a server logs at its start: what vLLM in-flight does in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import vllm.inflight
from vllm.inflight import upstream
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.request.auth import Arguments, control_keys
from vllm.inflight.calls import ReadStaging
from vllm.inflight.config import InflightConfig, admin_key
from vllm.inflight.wording import size

if TYPE_CHECKING:
    from vllm.inflight.upstream import EngineClient, VllmConfig

logger = upstream.init_logger(__name__)


async def log_start(engine: EngineClient, args: Arguments) -> None:
    """Log version, staging, transport, callers, prefix cache and pauses."""
    config = engine.vllm_config
    replies = await control_of(engine).ask(ReadStaging())
    logger.info(
        "vllm-inflight %s: %s; transport %s; control routes for %s; prefix cache %s; "
        "pauses: %s",
        vllm.inflight.__version__,
        _staging(config, replies),
        _transport(config),
        _callers(args),
        InflightConfig.of(config).prefix_cache,
        InflightConfig.of(config).pauses,
    )
    if any(reply.get("has_logs") for reply in replies) and _shares_process(config):
        logger.info(
            "vllm-inflight: the worker is in the process of the engine core, and delta "
            "staging takes time from both. With --distributed-executor-backend mp it "
            "has a process of its own: an update costs less decoding, and decoding "
            "alone is about 1 %% slower"
        )


def _shares_process(config: VllmConfig) -> bool:
    """Whether the worker of a GPU shares an interpreter with the engine core."""
    if _device_of(config) != "cuda":
        return False
    parallel = getattr(config, "parallel_config", None)
    return getattr(parallel, "distributed_executor_backend", None) == "uni"


def _staging(config: VllmConfig, replies: Sequence[Mapping[str, Any]]) -> str:
    reason = next((r["reason"] for r in replies if r["reason"] is not None), None)
    if reason is not None:
        return f"no updates in flight ({reason})"
    num_bytes = sum(reply["bytes"] for reply in replies)
    if any(reply.get("has_logs") for reply in replies):
        on_host = sum(reply.get("host_bytes", 0) for reply in replies)
        buckets = sum(reply.get("bucket_bytes", 0) for reply in replies)
        return (
            f"one set of weights, and a log of {size(num_bytes)}, which goes on in up "
            f"to {size(on_host)} of host memory; buckets take {size(buckets)} more"
        )
    chosen = InflightConfig.of(config).staging
    if chosen == "auto":
        chosen = "device" if _device_of(config) == "cuda" else "host"
    return f"shadow weights of {size(num_bytes)} in {chosen} memory"


def _device_of(config: VllmConfig) -> str | None:
    return getattr(getattr(config, "device_config", None), "device_type", None)


def _transport(config: VllmConfig) -> str:
    transport = getattr(config, "weight_transfer_config", None)
    return "none (files by path only)" if transport is None else str(transport.backend)


def _callers(args: Arguments) -> str:
    if not control_keys(args):
        return "this host only, without a key"
    return f"callers with the {'admin' if admin_key() is not None else 'API'} key"
