"""The fields that the control routes take, as JSON Schema for OpenAPI.

The handlers check the fields; these schemas describe them in `/openapi.json`. The
handlers of routes that only this package has also take the names of the fields here.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight.update import MAX_LABEL_CHARS, MAX_NAME_CHARS, PauseMode

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OFF: Schema = FLAG | {"default": False}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
NAMES: Schema = {"type": "array", "items": TEXT}
LABEL: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_LABEL_CHARS}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
MODE: Schema = {"type": "string", "enum": [*(mode.value for mode in PauseMode), "keep"]}

ONE_OR_EACH = " A list has a value for each prompt."
TEXTS = {
    "abort_all": "Whether to end all requests.",
    "abort_all_requests": "Whether to end running and waiting requests, so that they "
    "report no token of the new version. The same as mode `abort`.",
    "action": "What to do.",
    "actor_idx": "Index of this engine among PipelineRL's actors.",
    "actor_ngpus": "Number of GPUs of each actor.",
    "allow_nonfinite": "Whether NaN and Inf are accepted.",
    "allow_quant_error": "Accepted for SGLang's clients; it has no effect.",
    "backend": "Backend of `torch.distributed`.",
    "base_version": "The call is rejected unless this is the label of the live "
    "version.",
    "baseline": "Checksums of an earlier call with action `checksum`.",
    "chunk": "Number of the chunk, from 0. A chunk with a number is received once, so "
    "the call may be repeated.",
    "clear_cache": "Whether to drop the prefix cache. Left out: true for the modes of "
    "upstream, false for `in_place` and `retract`.",
    "config_format": "Format of the configuration in the reply.",
    "deadline_s": "Seconds until the commit. A later update is aborted. Left out: "
    "`--inflight-update-deadline-s`.",
    "cache_salt": "Requests share cached prefixes only with requests of the same salt.",
    "data_parallel_rank": "The data-parallel engine that has to serve the request.",
    "dp_rank": "The data-parallel engine to report. Left out: all.",
    "draft_path": "Checkpoint of the speculative drafter, on the engine's host.",
    "dtypes": "Dtypes of the tensors, in the order of `names`.",
    "expect_digest": "The commit is rejected unless the new version has this digest.",
    "expect_version": "The commit is rejected unless this is the label of the live "
    "version.",
    "finish": "Commits the update with this call: the body of `/finish_weight_update`, "
    "whose reply is then the reply of this call.",
    "flush_cache": "Whether to drop the caches at the commit. Without a mode it means "
    "`retract`.",
    "group_name": "Name of the group.",
    "format": "Format of the reply.",
    "include": "Accepted for SGLang's clients; every section is sent.",
    "input_ids": "Token ids of the prompt, or a list of such lists.",
    "include_dp": "Whether to count the ranks of all data-parallel engines.",
    "init_info": "How to connect; the weight transfer backend defines the fields. "
    "`local` has none.",
    "init_method": "Address of the rendezvous, `tcp://host:port`.",
    "keep_pause": "Whether to pause in place before the commit, and to stay paused.",
    "lease_s": "Seconds after which the pause ends, unless the same call renews it. 0: "
    "never. Left out: `--inflight-pause-lease-s`.",
    "load_format": "Format of the tensors. Left out: one by one.",
    "logprob_start_len": "First prompt token whose log-probability is reported. -1: "
    "output tokens alone." + ONE_OR_EACH,
    "lora_path": "Name of a loaded adapter." + ONE_OR_EACH,
    "manifest": "Which tensors will be sent; see docs/protocol.md.",
    "master_address": "Host of the trainer, which is rank 0.",
    "master_port": "Port of the trainer's rendezvous.",
    "mode": "What happens to running requests: they stay (`in_place`, also called "
    "`keep`), go back to the queue without their KV (`retract`), end (`abort`), or are "
    "waited for (`wait`).",
    "model_path": "SGLang's name for `path`.",
    "name": "Name of the tensor, as in the checkpoint.",
    "names": "Names of the tensors, in the order in which the trainer sends them.",
    "new_version": "The new label.",
    "owner": "Name of the caller. Calls with another owner are rejected with 423.",
    "parameters_info": "Name, shape and dtype of each tensor, in the order in which "
    "the trainer broadcasts them.",
    "path": "A safetensors file, or a directory of them, on the engine's host.",
    "post_process_quantization": "Accepted for SGLang's clients; it has no effect.",
    "rank_offset": "Rank of this engine's first worker in the group.",
    "request_ids": "Ids of the requests to end. Left out: all requests.",
    "reset_external": "Whether to reset the external caches too.",
    "reset_running_requests": "Whether to preempt running requests first.",
    "restore_weights_before_load": "Accepted for SGLang's clients; it has no effect.",
    "return_logprob": "Whether the reply has log-probabilities." + ONE_OR_EACH,
    "return_routed_experts": "Whether the reply has the experts of each token.",
    "return_text_in_logprobs": "Whether log-probabilities have the token's text.",
    "rid": "Id of the request.",
    "routed_dp_rank": "The same as `data_parallel_rank`.",
    "routed_experts_start_len": "First token whose experts are reported.",
    "sampling_params": "SGLang's sampling parameters." + ONE_OR_EACH,
    "selector": "Which models: target model and drafter, or the target alone.",
    "serialized_named_tensors": "Base64 of safetensors bytes: one string for all "
    "ranks, or one string for each rank. Of SGLang's pickles, if the server was "
    "started for them.",
    "shapes": "Shapes of the tensors, in the order of `names`.",
    "skip_tensor_list": "Names of tensors to leave out.",
    "start": "Opens the update with this call: the body of `/start_weight_update`. If "
    "the call then fails, the update is aborted.",
    "stream": "Whether to send server-sent events, each with the whole output so far.",
    "subset": "Patterns of the names in the checkpoint, if it does not have all "
    "tensors. The other tensors keep their live values.",
    "tags": "What to release or to resume. Left out: everything.",
    "text": "The prompt, or a list of prompts.",
    "timeout_s": "Seconds to wait for the trainer.",
    "to_version": "The rollback is rejected unless the rollback target has this label.",
    "token_ids_logprob": "Tokens whose log-probability is reported at each position.",
    "token_step": "Training step of the version, for SGLang's clients. 0: unknown.",
    "top_logprobs_num": "How many of the likeliest tokens are reported." + ONE_OR_EACH,
    "torch_empty_cache": "Accepted for SGLang's clients; it has no effect.",
    "truncate_size": "Number of rows in the reply.",
    "update_id": "Id of the update. Left out: the update under way.",
    "update_info": "Where the tensors are; the weight transfer backend defines the "
    "fields. `local` takes `path` or `shm`.",
    "version": "Number of the version, which becomes its label.",
    "wait_for_inflight_requests": "Argument of vLLM 0.15 to 0.31. True: mode `wait`.",
    "weight_version": "Label of the new version. Left out: `update-<epoch>`.",
    "world_size": "Number of ranks in the group, with the trainer.",
    "zmq_handles": "Address of a checkpoint-engine's process for the UUID of each GPU.",
}
"""Field -> its description on every route that takes it."""


def _explained(fields: dict[str, Schema], **texts: str) -> dict[str, Schema]:
    """The fields with their descriptions; `texts` has those of one route alone."""
    return {
        name: schema | {"description": (TEXTS | texts)[name]}
        for name, schema in fields.items()
    }


OPENING: dict[str, Schema] = _explained(
    {
        "update_id": {"type": "string", "minLength": 1, "maxLength": 128},
        "weight_version": LABEL,
        "base_version": LABEL,
        "manifest": OBJECT,
        "deadline_s": {"type": "number", "exclusiveMinimum": 0},
        "allow_nonfinite": OFF,
        "owner": NAME,
    },
    update_id="Id of the update, chosen by the caller. The same id with the same body "
    "is the same update. Left out: the engine chooses one.",
)
FINISHING: dict[str, Schema] = _explained(
    {
        "weight_version": LABEL,
        "mode": MODE,
        "flush_cache": OFF,
        "expect_version": LABEL,
        "expect_digest": TEXT,
        "update_id": TEXT,
        "owner": NAME,
    },
    weight_version="Label of the new version, if its start gave none.",
)
ROLLING_BACK: dict[str, Schema] = _explained({"to_version": LABEL, "mode": MODE})
COMMITTING: dict[str, Schema] = _explained(
    {"mode": MODE, "flush_cache": FLAG, "abort_all_requests": FLAG},
    flush_cache="Whether to drop the prefix cache at the commit, which needs mode "
    "`retract` or `abort`. Left out: true with `--inflight-prefix-cache shared`, else "
    "false.",
)
PAUSING: dict[str, Schema] = _explained(
    {
        "mode": MODE | {"default": "abort"},
        "flush_cache": OFF,
        "lease_s": {"type": "number", "minimum": 0},
        "owner": NAME,
        "rid": TEXT,
    },
    flush_cache="Whether to drop the caches.",
    rid="Accepted for SGLang's clients; it has no effect.",
)
MEMORY_TAGS: dict[str, Schema] = _explained(
    {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}
)
RELEASING: dict[str, Schema] = MEMORY_TAGS | _explained(
    {"mode": {"type": "string", "enum": ["abort", "retract", "in_place"]}},
    mode="What happens to requests: they end (`abort`), go back to the queue without "
    "their KV (`retract`), or stay with it (`in_place`, only with tag `weights` alone "
    "while they run). Left out: as in a pause `in_place` or `retract`, else `abort`.",
)
SAMPLING: dict[str, Schema] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBER | {"minimum": 0}),
    "top_k": {"type": "integer", "minimum": -1},
    "max_new_tokens": COUNT | {"default": 128},
    "min_new_tokens": COUNT,
    "stop": {"type": ["string", "array"], "items": TEXT},
    "stop_token_ids": {"type": "array", "items": COUNT},
    "ignore_eos": OFF,
    "skip_special_tokens": FLAG | {"default": True},
    "spaces_between_special_tokens": FLAG | {"default": True},
    "no_stop_trim": OFF
    | {"description": "Whether the text has the stop string or token."},
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "n": {"type": "integer", "minimum": 1},
    "regex": TEXT,
    "json_schema": {"type": ["string", "object"]},
    "ebnf": TEXT,
    "structural_tag": TEXT,
    "logit_bias": OBJECT,
    "sampling_seed": {"type": "integer"},
}
"""The fields of SGLang's `sampling_params`."""

GENERATING: dict[str, Schema] = _explained(
    {
        "text": {"type": ["string", "array"], "items": TEXT},
        "input_ids": {"type": "array"},
        "sampling_params": {"type": "object", "properties": SAMPLING},
        "rid": {"type": ["string", "array"], "items": TEXT},
        "stream": OFF,
        "return_logprob": OFF,
        "logprob_start_len": {"type": "integer", "minimum": -1, "default": -1},
        "top_logprobs_num": COUNT | {"default": 0},
        "token_ids_logprob": {"type": "array", "items": COUNT},
        "return_text_in_logprobs": OFF,
        "return_routed_experts": OFF,
        "routed_experts_start_len": COUNT,
        "lora_path": TEXT,
        "cache_salt": TEXT,
        "data_parallel_rank": COUNT,
        "routed_dp_rank": COUNT,
    },
    rid="Id of the request, or of each prompt. Left out: the server chooses one.",
)

FIELDS: dict[str, dict[str, Schema]] = {
    "/pause": _explained(
        {
            "mode": MODE | {"default": "abort"},
            "clear_cache": FLAG,
            "wait_for_inflight_requests": FLAG,
        }
    ),
    "/resume": _explained({"owner": NAME}),
    "/pause_generation": PAUSING,
    "/continue_generation": _explained(
        {"owner": NAME, "torch_empty_cache": FLAG, "rid": TEXT},
        rid="Accepted for SGLang's clients; it has no effect.",
    ),
    "/init_weight_transfer_engine": _explained({"init_info": OBJECT}),
    "/start_weight_update": OPENING,
    "/start_draft_weight_update": OPENING,
    "/update_weights": _explained(
        {
            "update_info": {"anyOf": [OBJECT, {"type": "array", "items": OBJECT}]},
            "update_id": TEXT,
            "chunk": COUNT,
            "owner": NAME,
            "start": OBJECT | {"properties": OPENING},
            "finish": OBJECT | {"properties": FINISHING},
        }
    ),
    "/prepare_weight_update": _explained({"update_id": TEXT, "owner": NAME}),
    "/finish_weight_update": FINISHING,
    "/abort_weight_update": _explained({"update_id": TEXT, "owner": NAME}),
    "/rollback_weights": ROLLING_BACK,
    "/update_weights_from_disk": {
        **_explained(
            {
                **{"path": TEXT, "model_path": TEXT, "draft_path": TEXT},
                **{"subset": NAMES, "token_step": NUMBER | {"default": 0}},
                **{"keep_pause": OFF, "expect_digest": TEXT},
            }
        ),
        **OPENING,
        **COMMITTING,
    },
    "/update_weights_from_tensor": {
        **_explained(
            {
                "serialized_named_tensors": NAMES,
                "load_format": {"enum": ["flattened_bucket"]},
                "chunk": COUNT,
                "expect_digest": TEXT,
            },
            chunk="Number of the chunk of the update `update_id`, from 0. With it the "
            "call is that chunk alone. A chunk is received once, so the call may be "
            "repeated.",
        ),
        **OPENING,
        "manifest": OPENING["manifest"]
        | {
            "description": "Which tensors the body has; see docs/protocol.md. With it "
            "the call is a whole update, of a version or of a delta."
        },
        **COMMITTING,
    },
    "/update_weights_from_ipc": {
        **_explained({"zmq_handles": OBJECT, "weight_version": LABEL}),
        **COMMITTING,
    },
    "/init_weights_update_group": _explained(
        {
            **{"master_address": TEXT, "master_port": COUNT, "rank_offset": COUNT},
            "world_size": COUNT,
            "group_name": TEXT | {"default": "weight_update_group"},
            "backend": TEXT | {"default": "nccl"},
            "timeout_s": NUMBER | {"default": 300},
        }
    ),
    "/update_weights_from_distributed": {
        **_explained(
            {
                **{"names": NAMES, "dtypes": NAMES},
                "group_name": TEXT | {"default": "weight_update_group"},
                "shapes": {"type": "array", "items": {"type": "array", "items": COUNT}},
                "load_format": {"enum": ["flattened_bucket"]},
                "weight_version": LABEL,
            }
        ),
        **COMMITTING,
    },
    "/destroy_weights_update_group": _explained(
        {"group_name": TEXT | {"default": "weight_update_group"}}
    ),
    "/update_weight_version": _explained(
        {"new_version": LABEL, "abort_all_requests": OFF}
    ),
    "/receive_weight_update": _explained(
        {
            "parameters_info": {"type": "array", "items": OBJECT},
            "version": COUNT,
        }
    ),
    "/init_actor_update_group": _explained(
        {
            **{"actor_idx": COUNT, "actor_ngpus": COUNT, "world_size": COUNT},
            "init_method": TEXT,
        }
    ),
    "/reset_prefix_cache": _explained(
        {"reset_running_requests": OFF, "reset_external": OFF}
    ),
    "/get_world_size": _explained({"include_dp": FLAG | {"default": True}}),
    "/server_info": _explained(
        {"config_format": {"enum": ["text", "json"], "default": "text"}}
    ),
    "/get_server_info": _explained(
        {"config_format": {"enum": ["text", "json"], "default": "text"}}
    ),
    "/abort_request": _explained({"rid": TEXT, "abort_all": OFF}),
    "/abort_requests": _explained({"request_ids": NAMES}),
    "/get_weights_by_name": _explained(
        {"name": TEXT, "truncate_size": COUNT | {"default": 100}}
    ),
    "/weights_checker": _explained(
        {
            "action": TEXT | {"default": "checksum"},
            "skip_tensor_list": NAMES,
            "selector": {"enum": ["all", "target"]},
            "allow_quant_error": FLAG,
        },
        action="`checksum`: the digest of every parameter. `verify`: compare the live "
        "weights with the digest of their label.",
    ),
    "/weight_checker": _explained(
        {"action": TEXT, "baseline": OBJECT},
        action="`checksum`: the digest of every parameter. `compare`: compare the "
        "digests with `baseline`.",
    ),
    "/post_process_weights": _explained(
        {"restore_weights_before_load": FLAG, "post_process_quantization": FLAG}
    ),
    "/generate": GENERATING,
    "/v1/loads": _explained(
        {"dp_rank": COUNT, "include": TEXT, "format": {"enum": ["json"]}}
    ),
    "/release_memory_occupation": RELEASING,
    "/resume_memory_occupation": MEMORY_TAGS,
}
"""Path → the fields of its body, or of the query of a GET; other paths take none."""

NEEDED: dict[str, tuple[str, ...]] = {
    "/init_weight_transfer_engine": ("init_info",),
    "/update_weights": ("update_info",),
    "/update_weights_from_tensor": ("serialized_named_tensors",),
    "/update_weights_from_ipc": ("zmq_handles",),
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
"""Path → the fields that a request must have."""

ONE_OF: dict[str, tuple[str, ...]] = {
    "/update_weights_from_disk": ("path", "model_path", "draft_path"),
    "/abort_request": ("rid", "abort_all"),
    "/generate": ("text", "input_ids"),
}
"""Path → the fields, one of which a request must have."""
