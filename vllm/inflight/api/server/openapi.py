"""What `/openapi.json` says of the control routes: groups, replies, errors, the key.

FastAPI makes the document. The handlers read their requests themselves, so this module
tells FastAPI what it cannot see: fields, replies, and the statuses of each route.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from vllm.inflight import upstream
from vllm.inflight.api.request.schema import (
    COUNT,
    FIELDS,
    FLAG,
    NEEDED,
    NUMBER,
    OBJECT,
    ONE_OF,
    TEXT,
    Schema,
)
from vllm.inflight.errors import BY_CODE

KEY = HTTPBearer(
    scheme_name="control key",
    description="The key of `--inflight-admin-key`, or without that the key of "
    "`--api-key`. A server without a key answers callers on its own host only, and no "
    "browser. So this page cannot call these routes then.",
    auto_error=False,
)

API_KEY = HTTPBearer(
    scheme_name="API key",
    description="The key of `--api-key`. A server without one answers every caller.",
    auto_error=False,
)

CORE, PAUSE = "in-flight: weights", "in-flight: pause"
SGLANG, VLLM, PIPELINERL = (
    "in-flight: SGLang's calls",
    "in-flight: vLLM's calls",
    "in-flight: PipelineRL's calls",
)
ROLLOUT = "in-flight: SGLang's rollouts"
TAGS: list[dict[str, str]] = [
    {"name": CORE, "description": "Update the weights, roll back, read the version."},
    {"name": PAUSE, "description": "Stop decoding between two steps, and go on."},
    {"name": SGLANG, "description": "For clients that were written for SGLang."},
    {"name": VLLM, "description": "Paths of vLLM's development mode, with a key."},
    {"name": PIPELINERL, "description": "For PipelineRL's trainer."},
    {"name": ROLLOUT, "description": "Tokens, for clients written for SGLang."},
]

PATHS: dict[str, tuple[str, ...]] = {
    CORE: (
        "/update_weights_from_disk",
        "/weight_info",
        "/weight_names",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/prepare_weight_update",
        "/finish_weight_update",
        "/abort_weight_update",
        "/weight_update",
        "/weight_update/{update_id}",
        "/rollback_weights",
        "/restore_weights",
        "/get_world_size",
    ),
    PAUSE: (
        "/pause",
        "/resume",
        "/is_paused",
        "/pause_generation",
        "/continue_generation",
    ),
    VLLM: (
        "/weight_checker",
        "/abort_requests",
        "/reset_prefix_cache",
        "/server_info",
    ),
    PIPELINERL: ("/receive_weight_update", "/init_actor_update_group"),
    ROLLOUT: ("/generate", "/health_generate", "/v1/loads", "/get_load"),
}
TAG_OF = {path: tag for tag, paths in PATHS.items() for path in paths}

ALWAYS = (400, 401, 403)
"""Statuses of every route: the request is malformed, or its caller may not call."""

_UPDATE = (404, 409, 422, 423, 500, 504)
_WHOLE_UPDATE = (*_UPDATE, 429)
_TRANSPORT = (409, 500, 504)
STATUSES: dict[str, tuple[int, ...]] = {
    "/pause": (409, 423, 500),
    "/resume": (409, 423, 500),
    "/is_paused": (500,),
    "/pause_generation": (404, 409, 423, 500),
    "/continue_generation": _UPDATE,
    "/init_weight_transfer_engine": _TRANSPORT,
    "/shutdown_weight_transfer_engine": _TRANSPORT,
    "/start_weight_update": (409, 422, 423, 429, 500, 504),
    "/start_draft_weight_update": (409, 422, 423, 429, 500, 504),
    "/update_weights": _WHOLE_UPDATE,
    "/prepare_weight_update": _UPDATE,
    "/finish_weight_update": _UPDATE,
    "/abort_weight_update": (404, 409, 423, 500),
    "/rollback_weights": (409, 500, 504),
    "/restore_weights": _WHOLE_UPDATE,
    "/weight_update": (500,),
    "/weight_update/{update_id}": (404, 500),
    "/weight_info": (500,),
    "/weight_names": (409, 500),
    "/get_world_size": (),
    "/update_weights_from_disk": _WHOLE_UPDATE,
    "/update_weights_from_tensor": _WHOLE_UPDATE,
    "/update_weights_from_distributed": _WHOLE_UPDATE,
    "/init_weights_update_group": (404, *_TRANSPORT),
    "/destroy_weights_update_group": (404, *_TRANSPORT),
    "/begin_weight_update": (404, 409, 500),
    "/end_weight_update": _UPDATE,
    "/update_weights_from_ipc": _WHOLE_UPDATE,
    "/update_weight_version": (409, 500),
    "/receive_weight_update": _WHOLE_UPDATE,
    "/init_actor_update_group": _TRANSPORT,
    "/post_process_weights": (),
    "/generate": (500, 503),
    "/health_generate": (503,),
    "/v1/loads": (500,),
    "/get_load": (500,),
    "/flush_cache": (409, 500),
    "/abort_request": (500,),
    "/weight_version": (500,),
    "/get_weight_version": (500,),
    "/model_info": (500,),
    "/get_model_info": (500,),
    "/get_weights_by_name": (409, 500),
    "/weights_checker": (409, 500),
    "/release_memory_occupation": (409, 500),
    "/resume_memory_occupation": (409, 500),
    "/weight_checker": (409, 500),
    "/abort_requests": (500,),
    "/reset_prefix_cache": (500,),
    "/server_info": (),
    "/get_server_info": (),
}
"""Path → the statuses of its errors, beside `ALWAYS`."""

EXAMPLES: dict[str, dict[str, Any]] = {
    "/resume": {"owner": "trainer"},
    "/pause_generation": {"mode": "retract", "lease_s": 60},
    "/continue_generation": {},
    "/init_weight_transfer_engine": {"init_info": {}},
    "/start_weight_update": {"update_id": "run7-200", "weight_version": "step-200"},
    "/start_draft_weight_update": {"weight_version": "step-200"},
    "/update_weights": {
        "update_id": "run7-200",
        "chunk": 0,
        "update_info": {"path": "/models/step-200"},
    },
    "/prepare_weight_update": {"update_id": "run7-200"},
    "/finish_weight_update": {"update_id": "run7-200"},
    "/abort_weight_update": {"update_id": "run7-200"},
    "/rollback_weights": {},
    "/update_weights_from_disk": {
        "path": "/models/step-100",
        "weight_version": "step-100",
    },
    "/init_weights_update_group": {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": 2,
    },
    "/update_weights_from_distributed": {
        "names": ["lm_head.weight"],
        "dtypes": ["bfloat16"],
        "shapes": [[260, 128]],
    },
    "/update_weight_version": {"new_version": "step-100"},
    "/generate": {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 16, "temperature": 0.8},
        "return_logprob": True,
    },
    "/abort_request": {"rid": "request-1"},
    "/abort_requests": {"request_ids": ["request-1"]},
    "/get_weights_by_name": {"name": "lm_head.weight", "truncate_size": 2},
    "/weights_checker": {"action": "verify"},
    "/weight_checker": {"action": "checksum"},
}
"""Path → a body that the route accepts."""

ERROR: Schema = {
    "type": "object",
    "required": ["success", "message", "error"],
    "properties": {
        "success": {"const": False},
        "message": TEXT,
        "error": {
            "type": "object",
            "required": ["code", "message", "remedy"],
            "properties": {
                "code": {"type": "string", "enum": sorted(BY_CODE)},
                "message": TEXT,
                "remedy": TEXT | {"description": "What the caller can do."},
                "update_id": TEXT,
                "phase": TEXT,
                "tensors": {
                    "type": "array",
                    "items": TEXT,
                    "description": "The first tensors that are not accepted.",
                },
                "num_tensors": COUNT
                | {"description": "How many tensors are not accepted."},
                "retry_after_s": NUMBER,
            },
        },
    },
}

_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
_PHASE: dict[str, Schema] = {"update_id": TEXT, "phase": TEXT}
_VERSION: dict[str, Schema] = {
    "weight_version": TEXT,
    "epoch": COUNT | {"description": "Grows at every commit, rollback and rename."},
    "digest": _TEXT_OR_NULL,
    "step": _NUMBER_OR_NULL,
    "committed_at": _NUMBER_OR_NULL | {"description": "Seconds since 1970."},
}
_COMMIT: dict[str, Schema] = _VERSION | {
    "gap_ms": NUMBER | {"description": "How long the flip took, between two steps."},
    "update_id": TEXT,
    "seconds": OBJECT,
    "drift": {
        "type": ["object", "null"],
        "description": "How far the commit moved the weights; null where unknown.",
    },
}
_INFO: dict[str, Schema] = _VERSION | {
    "previous": {"type": ["object", "null"], "properties": _VERSION},
    "weights": TEXT | {"description": "`live`, or why nothing is decoded."},
    "weights_detail": _TEXT_OR_NULL,
    "scrub": {"type": ["object", "null"]},
    "staging": {
        "type": "object",
        "properties": {
            "bytes": COUNT
            | {"description": "Of the shadow weights, or of the change logs."},
            "host_bytes": COUNT
            | {"description": "The most host memory that the logs go on in."},
            "bucket_bytes": COUNT
            | {"description": "Reserved on GPUs for buckets, beside the logs."},
            "dtype": _TEXT_OR_NULL
            | {"description": "Of all floating-point tensors; null: of several."},
            "has_logs": FLAG,
            "unproved": COUNT
            | {"description": "Tensors whose places the next update proves first."},
            "reason": _TEXT_OR_NULL | {"description": "Why there is no staging."},
        },
    },
    "worker_extension": {
        "type": ["object", "null"],
        "properties": {
            "name": _TEXT_OR_NULL,
            "calls": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "framework": TEXT,
                        "call": TEXT,
                        "role": TEXT,
                        "why": _TEXT_OR_NULL
                        | {"description": "Why it is not adopted; null if it is."},
                    },
                },
            },
        },
    },
}
_PAUSE: dict[str, Schema] = {
    "paused": FLAG,
    "absorbed": FLAG,
    "mode": _TEXT_OR_NULL,
    "owner": _TEXT_OR_NULL,
    "lease_s": _NUMBER_OR_NULL,
    "num_running": COUNT,
    "num_waiting": COUNT,
    "seconds": NUMBER,
    "weight_version": TEXT,
}
_DROPPED: dict[str, Schema] = {
    "num_aborted": COUNT,
    "num_retracted": COUNT,
    "dropped": {"type": ["object", "null"]},
}
_MESSAGE: dict[str, Schema] = {"success": {"const": True}, "message": TEXT}
_STATUS: dict[str, Schema] = _PHASE | {
    "weight_version": _TEXT_OR_NULL,
    "seconds": OBJECT,
}

REPLIES: dict[str, dict[str, Schema]] = {
    "/update_weights_from_disk": _COMMIT | _MESSAGE | {"num_paused_requests": COUNT},
    "/weight_info": _INFO,
    "/restore_weights": _INFO,
    "/weight_names": {
        "of": {"enum": ["checkpoint", "model"]},
        "num_tensors": COUNT,
        "tensors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": TEXT,
                    "shape": {"type": ["array", "null"], "items": COUNT},
                    "dtype": _TEXT_OR_NULL,
                },
            },
        },
    },
    "/init_weight_transfer_engine": {"message": TEXT},
    "/shutdown_weight_transfer_engine": {"message": TEXT},
    "/start_weight_update": _PHASE,
    "/start_draft_weight_update": _PHASE,
    "/update_weights": _PHASE
    | {
        "bytes": COUNT,
        "parameters": {
            "type": "object",
            "properties": {"total": COUNT, "begun": COUNT, "complete": COUNT},
        },
    },
    "/prepare_weight_update": _PHASE
    | {"digest": _TEXT_OR_NULL, "sent": _TEXT_OR_NULL, "base": _TEXT_OR_NULL},
    "/finish_weight_update": _COMMIT,
    "/abort_weight_update": {"update_id": _TEXT_OR_NULL, "phase": TEXT},
    "/weight_update": {
        "active": {"type": ["object", "null"], "properties": _STATUS},
        "outcomes": {
            "type": "array",
            "items": {"type": "object", "properties": _STATUS},
        },
        "rollback": {"type": ["object", "null"]},
        "pause_detail": _TEXT_OR_NULL,
    },
    "/weight_update/{update_id}": _STATUS,
    "/rollback_weights": _VERSION | {"gap_ms": NUMBER, "flip_s": NUMBER},
    "/get_world_size": {"world_size": COUNT},
    "/pause": _PAUSE | _DROPPED | {"status": TEXT},
    "/resume": _PAUSE | {"status": TEXT},
    "/is_paused": {
        "is_paused": FLAG,
        "mode": _TEXT_OR_NULL,
        "owner": _TEXT_OR_NULL,
        "absorbed": FLAG,
        "for_commit": FLAG,
        "is_draining": FLAG,
        "lease_left_s": _NUMBER_OR_NULL,
        "leases_expired": COUNT,
        "weights_detail": _TEXT_OR_NULL,
    },
    "/pause_generation": _PAUSE | _DROPPED | _MESSAGE | {"status": TEXT},
    "/continue_generation": _PAUSE | _MESSAGE | {"status": TEXT},
}
"""Path → the fields of its reply, with one engine. Replies may get more fields."""


def serve_docs_offline(app: FastAPI) -> None:
    """Have `/docs` load its scripts from this server, as `--enable-offline-docs` does.

    vLLM has the scripts. By default FastAPI's page loads them from the internet, and
    stays blank on a server that cannot be reached from there.
    """
    args = app.state.args
    if app.docs_url is None or getattr(args, "enable_offline_docs", True):
        return
    args.enable_offline_docs = True
    upstream.attach_offline_docs(app)
    pages = [r for r in app.routes if getattr(r, "path", None) == app.docs_url]
    for page in pages[:-1]:
        app.router.routes.remove(page)


def described(method: str, path: str) -> dict[str, Any]:
    """The description of a route for FastAPI, as arguments of `add_api_route`."""
    responses: dict[int | str, Any] = {
        status: _json(_reasons(status), ERROR)
        for status in sorted((*ALWAYS, *STATUSES[path]))
    }
    reply = OBJECT
    if fields := REPLIES.get(path):
        reply = {"type": "object", "properties": fields}
    responses[200] = _json("Done.", reply if path not in _LISTS else {})
    return {
        "tags": [TAG_OF.get(path, SGLANG)],
        "dependencies": [Security(_key(path))],
        "responses": responses,
        "openapi_extra": _request(method, path),
    }


def _key(path: str) -> HTTPBearer:
    """The key that opens a route."""
    return API_KEY if TAG_OF.get(path) == ROLLOUT else KEY


IN_QUERY = ("/pause",)
"""Paths of POST whose fields upstream's clients send in the query."""

_LISTS = ("/get_weights_by_name", "/get_load", "/generate")
"""Paths whose reply is a list, or can be one."""


def _json(description: str, schema: Schema) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": schema}},
    }


def _reasons(status: int) -> str:
    """The codes of the errors that have this status."""
    kinds = [kind for kind in BY_CODE.values() if kind.status == status]
    return f"Rejected: {', '.join(sorted(kind.code for kind in kinds))}."


def _request(method: str, path: str) -> dict[str, Any]:
    fields, needed = FIELDS.get(path, {}), NEEDED.get(path, ())
    if method == "POST" and path not in IN_QUERY:
        body: Schema = {"type": "object", "properties": fields}
        if needed:
            body["required"] = list(needed)
        if path in ONE_OF:
            body["anyOf"] = [{"required": [name]} for name in ONE_OF[path]]
        if path in EXAMPLES:
            body["examples"] = [EXAMPLES[path]]
        return {"requestBody": {"content": {"application/json": {"schema": body}}}}
    parameters = [
        {"name": name, "in": "query", "required": name in needed, "schema": schema}
        for name, schema in fields.items()
    ] + [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall(r"{(\w+)}", path)
    ]
    return {"parameters": parameters}
