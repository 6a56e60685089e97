"""Changes in the API: flags, routes, and methods of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from vllm.inflight import upstream
from vllm.inflight.api.compat import pipelinerl
from vllm.inflight.api.control import methods
from vllm.inflight.config import (
    ADMIN_KEY_ENV,
    ALLOW_RUST_ENV,
    CONFIG_ENV,
    RUST_ENV,
    InflightConfig,
    check_keys_of_environment,
    with_environment,
)
from vllm.inflight.errors import ConfigError
from vllm.inflight.patch import ALLOW_UNTESTED_ENV
from vllm.inflight.patch.records.record import Original, Patch

SERVERS = ("API_SERVER", "OPENAI_API_SERVER")
"""Names of upstream's `UsageContext` for the engine of a server."""
OURS = frozenset({ADMIN_KEY_ENV, ALLOW_RUST_ENV, ALLOW_UNTESTED_ENV, CONFIG_ENV})
"""The environment variables of this package."""
FENCE = "--inflight-allowed-paths"
"""Part of every error message about a path outside of the allowed folders."""


def _with_flags(original: Original) -> Any:
    def add_cli_args(parser: Any) -> Any:
        from vllm.inflight.api.server.flags import add_flags

        parser = original(parser)
        add_flags(parser)
        return parser

    return add_cli_args


def _checked(original: Original) -> Any:
    def create_engine_config(
        self: upstream.EngineArgs, *args: object, **kwargs: object
    ) -> Any:
        usage = args[0] if args else kwargs.get("usage_context")
        check_keys_of_environment(serves=getattr(usage, "name", "") in SERVERS)
        self.additional_config = with_environment(self.additional_config)
        InflightConfig.of(self)
        rust = os.environ.get(RUST_ENV, "0").lower() not in ("", "0", "false")
        if rust and not os.environ.get(ALLOW_RUST_ENV):
            raise ConfigError(
                f"{RUST_ENV} is set, and that front end has no routes of "
                f"vllm-inflight and checks no key for upstream's. Unset it, or set "
                f"{ALLOW_RUST_ENV}=1 to use it without control routes."
            )
        return original(self, *args, **kwargs)

    return create_engine_config


def _knows_ours(original: Original) -> Any:
    def validate_environ(*args: object, **kwargs: object) -> None:
        from vllm import envs

        # Only now: upstream makes keys of its caches from all that it knows.
        known = envs.environment_variables
        ours = OURS - known.keys()  # a misspelt name is none of them
        known.update(dict.fromkeys(ours, lambda: None))
        try:
            original(*args, **kwargs)
        finally:
            for name in ours:
                del known[name]

    return validate_environ


def _with_routes(original: Original) -> Any:
    def load_endpoint_plugins(supported_tasks: Any = None) -> Any:
        from vllm.inflight.api.server.routes import InflightEndpoints

        plugins = list(original(supported_tasks))
        # For models of every task. A server that only renders has no engine.
        if set(supported_tasks or ()) - {"render"}:
            plugins.append(InflightEndpoints())
        return plugins

    return load_endpoint_plugins


def _in_place(original: Original) -> Any:
    def attach_endpoint_plugins(app: FastAPI, supported_tasks: tuple[str, ...]) -> None:
        from vllm.inflight.api.server.plugin_routes import in_place

        earlier = list(app.routes)
        original(app, supported_tasks)
        app.router.routes[:] = in_place(app.routes, earlier)

    return attach_endpoint_plugins


def _heard(original: Original) -> Any:
    async def check_health(self: upstream.AsyncLLM) -> None:
        from vllm.inflight.api.server.health import heartbeat_of

        await original(self)
        if (heartbeat := heartbeat_of(self)) is not None:
            await heartbeat.check()

    return check_health


def _admitted(original: Original) -> Any:
    async def add_request(
        self: upstream.AsyncLLM, *args: object, **kwargs: object
    ) -> Any:
        from vllm.inflight.api.server.admission import admit

        await admit(self)
        return await original(self, *args, **kwargs)

    return add_request


def _admitted_at_once(original: Original) -> Any:
    def _render_and_add_requests(
        self: upstream.LLM, *args: object, **kwargs: object
    ) -> Any:
        from vllm.inflight.api.control.core_client import run_sync
        from vllm.inflight.api.server.admission import admit

        run_sync(admit(self))
        return original(self, *args, **kwargs)

    return _render_and_add_requests


def _of_all_engines(original: Original) -> Any:
    async def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from vllm.inflight.api.compat import worker_calls

        if worker_calls.takes(self, method, args, kwargs):
            return await worker_calls.carry_out(self, method, args, kwargs)
        call = original(self, method, timeout, args, kwargs)
        return await worker_calls.compared(self, method, call)

    return collective_rpc


def _session_marked(original: Original) -> Any:
    async def _add_request(
        self: Any, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any
    ) -> None:
        from vllm.inflight.engine.scheduling.aborted_sessions import SessionQueue, mark

        # A session has one queue.
        session = SessionQueue.of(queue)
        if session.has_begun and not self.output_processor.has_request(
            request.request_id
        ):
            return  # the session was aborted, and its input does not know that yet
        if request.resumable and not session.has_begun:
            session.has_begun = True
            mark(request)
        await original(self, request, prompt, parent_req, index, queue)

    return _add_request


def _loaded_once(original: Original) -> Any:
    async def load_lora_adapter(
        self: upstream.OpenAIServingModels,
        request: Any,
        *args: object,
        **kwargs: object,
    ) -> Any:
        answer = await original(self, request, *args, **kwargs)
        error = getattr(answer, "error", None)
        if error is not None and FENCE in error.message:
            # Only the message of an engine core's error arrives here.
            error.code, error.type = HTTPStatus.FORBIDDEN.value, "Forbidden"
        # Otherwise each request would load the adapter again at every step.
        if (loaded := self.lora_requests.get(request.lora_name)) is not None:
            loaded.load_inplace = False
        return answer

    return load_lora_adapter


_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_LLM = "vllm.entrypoints.llm:LLM"
_OFFLINE = "vllm.entrypoints.common.offline:OfflineInferenceMixin"

METHODS: dict[Any, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    methods.init_weight_transfer_engine: (("self", "request"), ("self", "request")),
    methods.shutdown_weight_transfer_engine: (("self",), ("self",)),
    methods.start_weight_update: (("self",), ("self",)),
    methods.start_draft_weight_update: (("self",), ("self",)),
    methods.update_weights: (("self", "request"), ("self", "request")),
    methods.prepare_weight_update: (None, None),
    methods.finish_weight_update: (
        ("self", "weight_version"),
        ("self", "weight_version"),
    ),
    methods.pause_generation: (("self", "mode", "clear_cache"), None),
    methods.resume_generation: (("self",), None),
    methods.is_paused: (("self",), None),
    methods.continue_generation: (None, None),
    methods.update_weights_from_disk: (None, None),
    methods.abort_weight_update: (None, None),
    methods.rollback_weights: (None, None),
    methods.restore_weights: (None, None),
    methods.weight_update_status: (None, None),
    methods.weight_info: (None, None),
    methods.verify_weights: (None, None),
    methods.weight_names: (None, None),
    methods.release_memory_occupation: (None, None),
    pipelinerl.pause_and_update: (None, None),
}
"""Method → upstream's parameters on (AsyncLLM, LLM); None where upstream has none."""


def _instead(method: Callable[..., Any]) -> Any:
    return lambda _: method


def _method_patches() -> list[Patch]:
    patches = []
    for method, expected in METHODS.items():
        for owner, expects in zip((_ASYNC, _LLM), expected, strict=True):
            made = method if owner == _ASYNC else methods.blocking(method)
            patches.append(
                Patch(
                    target=f"{owner}.{method.__name__}",
                    expects=expects,
                    why=(inspect.getdoc(method) or "").split("\n")[0].rstrip("."),
                    remove_when="upstream's updates are transactional",
                    around=_instead(made),
                )
            )
    return patches


PATCHES = [
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        expects=("parser",),
        why="the options of `InflightConfig` are flags of `vllm serve`",
        remove_when="upstream lets plugins add flags",
        around=_with_flags,
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        expects=("self", "usage_context", "headless"),
        why="an invalid option is rejected before the engine starts",
        remove_when="upstream lets plugins check their configuration",
        around=_checked,
    ),
    Patch(
        target="vllm.platforms.interface:Platform.validate_environ",
        expects=("cls", "hard_fail"),
        why="the environment variables of vllm-inflight are not unknown",
        remove_when="upstream lets plugins name environment variables",
        around=_knows_ours,
        since="0.31.0",
    ),
    Patch(
        target="vllm.envs:validate_environ",
        expects=("hard_fail",),
        why="the environment variables of vllm-inflight are not unknown",
        remove_when="0.31 is the oldest supported release",
        around=_knows_ours,
        before="0.31.0",
    ),
    Patch(
        target="vllm.plugins:load_endpoint_plugins",
        expects=("supported_tasks",),
        why="the control routes are added without an entry in VLLM_PLUGINS",
        remove_when="upstream loads the endpoints of a general plugin",
        around=_with_routes,
    ),
    Patch(
        target="vllm.entrypoints.launchers.app:attach_endpoint_plugins",
        expects=("app", "supported_tasks"),
        why="upstream's routes hide those of a plugin before 0.32",
        remove_when="0.32 is the oldest supported release",
        around=_in_place,
        before="0.32.0",
    ),
    Patch(
        target=f"{_ASYNC}.check_health",
        expects=("self",),
        why="`/health` detects an engine core that hangs",
        remove_when="upstream's health check calls the engine core",
        around=_heard,
    ),
    Patch(
        target=f"{_ASYNC}.add_request",
        expects=(
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
            "kv_hints",
        ),
        why="a paused engine can reject requests",
        remove_when="upstream can reject requests in every pause mode",
        around=_admitted,
    ),
    Patch(
        target=f"{_ASYNC}.collective_rpc",
        expects=("self", "method", "timeout", "args", "kwargs"),
        why="worker calls that update the weights of several engines become one "
        "transaction",
        remove_when="upstream's updates are transactional",
        around=_of_all_engines,
    ),
    Patch(
        target=f"{_ASYNC}._add_request",
        expects=("self", "request", "prompt", "parent_req", "index", "queue"),
        why="a new session differs from late chunks of an aborted one of the same id",
        remove_when="upstream marks the first chunk of a session",
        around=_session_marked,
    ),
    Patch(
        target=f"{_OFFLINE}._render_and_add_requests",
        expects=("self", "prompts", "params", "lora_requests", "priorities"),
        why="a paused engine can reject requests",
        remove_when="upstream can reject requests in every pause mode",
        around=_admitted_at_once,
        since="0.32.0",
    ),
    Patch(
        target="vllm.entrypoints.offline_utils:"
        "OfflineInferenceMixin._render_and_add_requests",
        expects=("self", "prompts", "params", "lora_requests", "priorities"),
        why="a paused engine can reject requests",
        remove_when="0.32 is the oldest supported release",
        around=_admitted_at_once,
        before="0.32.0",
    ),
    Patch(
        target="vllm.entrypoints.openai.models.serving:"
        "OpenAIServingModels.load_lora_adapter",
        expects=("self", "request", "base_model_name"),
        why="an adapter with `load_inplace` is not loaded again at every step",
        remove_when="upstream resets load_inplace after the load",
        around=_loaded_once,
    ),
    *_method_patches(),
]
