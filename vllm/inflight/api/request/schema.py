"""What the control routes take, as JSON Schema for OpenAPI.

The handlers decide; this tells whoever reads `/openapi.json`, and names the fields of
the routes that are of no other project.
"""

from __future__ import annotations

import re
from typing import Any

from vllm.inflight.errors import BY_CODE
from vllm.inflight.update import MAX_LABEL_CHARS, MAX_NAME_CHARS, PauseMode

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
NAMES: Schema = {"type": "array", "items": TEXT}
LABEL: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_LABEL_CHARS}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
MODE: Schema = {"type": "string", "enum": [*(mode.value for mode in PauseMode), "keep"]}

OPENING: dict[str, Schema] = {
    "update_id": {"type": "string", "minLength": 1, "maxLength": 128},
    "weight_version": LABEL,
    "base_version": LABEL,
    "manifest": OBJECT,
    "deadline_s": {"type": "number", "exclusiveMinimum": 0},
    "allow_nonfinite": FLAG,
    "owner": NAME,
}
FINISHING: dict[str, Schema] = {
    "weight_version": LABEL,
    "mode": MODE,
    "flush_cache": FLAG,
    "expect_version": LABEL,
    "expect_digest": TEXT,
    "update_id": TEXT,
    "owner": NAME,
}
ROLLING_BACK: dict[str, Schema] = {"to_version": LABEL, "mode": MODE}
COMMITTING: dict[str, Schema] = {
    "mode": MODE,
    "flush_cache": FLAG,
    "abort_all_requests": FLAG,
}
PAUSING: dict[str, Schema] = {
    "mode": MODE,
    "flush_cache": FLAG,
    "lease_s": {"type": "number", "minimum": 0},
    "owner": NAME,
    "rid": TEXT,
}
TAGS: dict[str, Schema] = {
    "tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}
}

FIELDS: dict[str, dict[str, Schema]] = {
    "/pause": {
        "mode": MODE,
        "clear_cache": FLAG,
        "wait_for_inflight_requests": FLAG,
    },
    "/resume": {"owner": NAME},
    "/pause_generation": PAUSING,
    "/continue_generation": {"owner": NAME, "torch_empty_cache": FLAG, "rid": TEXT},
    "/init_weight_transfer_engine": {"init_info": OBJECT},
    "/start_weight_update": OPENING,
    "/start_draft_weight_update": OPENING,
    "/update_weights": {
        "update_info": {"anyOf": [OBJECT, {"type": "array", "items": OBJECT}]},
        "update_id": TEXT,
        "chunk": COUNT,
        "owner": NAME,
    },
    "/prepare_weight_update": {"update_id": TEXT, "owner": NAME},
    "/finish_weight_update": FINISHING,
    "/abort_weight_update": {"update_id": TEXT, "owner": NAME},
    "/rollback_weights": ROLLING_BACK,
    "/update_weights_from_disk": {
        **{"path": TEXT, "model_path": TEXT, "draft_path": TEXT, "subset": NAMES},
        **{"token_step": NUMBER, "keep_pause": FLAG, "expect_digest": TEXT},
        **OPENING,
        **COMMITTING,
    },
    "/update_weights_from_tensor": {
        "serialized_named_tensors": NAMES,
        "load_format": {"enum": ["flattened_bucket"]},
        "weight_version": LABEL,
        **COMMITTING,
    },
    "/init_weights_update_group": {
        **{"master_address": TEXT, "master_port": COUNT, "rank_offset": COUNT},
        **{"world_size": COUNT, "group_name": TEXT, "backend": TEXT},
        "timeout_s": NUMBER,
    },
    "/update_weights_from_distributed": {
        **{"names": NAMES, "dtypes": NAMES, "group_name": TEXT},
        "shapes": {"type": "array", "items": {"type": "array", "items": COUNT}},
        "load_format": {"enum": ["flattened_bucket"]},
        "weight_version": LABEL,
        **COMMITTING,
    },
    "/destroy_weights_update_group": {"group_name": TEXT},
    "/update_weight_version": {"new_version": LABEL, "abort_all_requests": FLAG},
    "/receive_weight_update": {
        "parameters_info": {"type": "array", "items": OBJECT},
        "version": COUNT,
    },
    "/init_actor_update_group": {
        **{"actor_idx": COUNT, "actor_ngpus": COUNT, "world_size": COUNT},
        "init_method": TEXT,
    },
    "/reset_prefix_cache": {"reset_running_requests": FLAG, "reset_external": FLAG},
    "/get_world_size": {"include_dp": FLAG},
    "/server_info": {"config_format": {"enum": ["text", "json"]}},
    "/abort_request": {"rid": TEXT, "abort_all": FLAG},
    "/abort_requests": {"request_ids": NAMES},
    "/get_weights_by_name": {"name": TEXT, "truncate_size": COUNT},
    "/weights_checker": {
        **{"action": TEXT, "skip_tensor_list": NAMES},
        **{"selector": {"enum": ["all", "target"]}, "allow_quant_error": FLAG},
    },
    "/weight_checker": {"action": TEXT, "baseline": OBJECT},
    "/release_memory_occupation": TAGS,
    "/resume_memory_occupation": TAGS,
}
"""Path → the fields of its body, or of the query of a GET; others take none."""

NEEDED: dict[str, tuple[str, ...]] = {
    "/init_weight_transfer_engine": ("init_info",),
    "/update_weights": ("update_info",),
    "/update_weights_from_tensor": ("serialized_named_tensors",),
    "/init_weights_update_group": (
        *("master_address", "master_port", "rank_offset", "world_size"),
    ),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes"),
    "/update_weight_version": ("new_version",),
    "/init_actor_update_group": (
        *("actor_idx", "actor_ngpus", "init_method", "world_size"),
    ),
    "/receive_weight_update": ("parameters_info",),
    "/get_weights_by_name": ("name",),
    "/weight_checker": ("action",),
}

REFUSAL: Schema = {
    "type": "object",
    "required": ["success", "message", "error"],
    "properties": {
        "success": {"const": False},
        "message": TEXT,
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": TEXT, "message": TEXT},
        },
    },
}


def described(method: str, path: str) -> dict[str, Any]:
    """What FastAPI is told of a route: its fields, and how it refuses."""
    statuses = sorted({kind.status for kind in BY_CODE.values()})
    refusals: dict[int | str, Any] = {
        status: {
            "description": "Refused.",
            "content": {"application/json": {"schema": REFUSAL}},
        }
        for status in statuses
    }
    fields, needed = FIELDS.get(path, {}), NEEDED.get(path, ())
    if method == "POST":
        body = {"type": "object", "properties": fields}
        if needed:
            body["required"] = list(needed)
        content = {"application/json": {"schema": body}}
        return {
            "responses": refusals,
            "openapi_extra": {"requestBody": {"content": content}},
        }
    parameters = [
        {"name": name, "in": "query", "required": name in needed, "schema": schema}
        for name, schema in fields.items()
    ] + [
        {"name": name, "in": "path", "required": True, "schema": TEXT}
        for name in re.findall(r"{(\w+)}", path)
    ]
    return {"responses": refusals, "openapi_extra": {"parameters": parameters}}
