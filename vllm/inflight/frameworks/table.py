"""The table of known calls: one row for each, and the rows of a user's packages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm.inflight.errors import ConfigError
from vllm.inflight.frameworks.known_call import Arguments, KnownCall, Role

ENTRY_POINTS = "vllm_inflight.known_calls"
"""The group of entry points by which a package adds rows."""


def _has_empty_cache(arguments: Arguments) -> bool:
    return arguments.get("empty_cache") is True


def _one_name(arguments: Arguments) -> list[str]:
    return [str(arguments.get("name"))]


OPENRLHF = (
    KnownCall(
        framework="OpenRLHF",
        method="update_weight",
        parameters=("name", "dtype", "shape", "empty_cache"),
        role=Role.PART,
        is_last=_has_empty_cache,
        names=_one_name,
        is_single=True,
        may_lack=True,
    ),
    KnownCall(
        framework="OpenRLHF",
        method="update_weight_cuda_ipc",
        parameters=("name", "dtype", "shape", "ipc_handles", "empty_cache"),
        role=Role.PART,
        is_last=_has_empty_cache,
        names=_one_name,
        is_single=True,
        may_lack=True,
    ),
)


def _adapter(arguments: Arguments) -> str | None:
    """Why an adapter is not adopted; None if the call brings no adapter."""
    if arguments.get("peft_config") and arguments.get("base_sync_done"):
        return "it brings an adapter, and no weights of the model"
    return None


VERL = (
    KnownCall(
        framework="verl",
        method="update_weights_from_ipc",
        parameters=("peft_config", "base_sync_done", "use_shm"),
        role=Role.VERSION,
        obstacle=_adapter,
        load_steps=tuple(
            f"verl.utils.vllm.vllm_quant_utils:{when}"
            for when in (
                "prepare_quanted_weights_for_loading",
                "process_quanted_weights_after_loading",
            )
        ),
    ),
)


def _names_of_bucket(arguments: Arguments) -> list[str]:
    return [str(told["name"]) for told in arguments.get("metadatas") or ()]


SWIFT = (
    KnownCall(
        framework="ms-swift",
        method="update_weights_from_ipc",
        parameters=(
            "use_shm",
            "zmq_handle",
            "timeout_s",
            "peft_config",
            "base_sync_done",
        ),
        role=Role.VERSION,
        obstacle=_adapter,
        is_alone=True,
    ),
    KnownCall(
        framework="ms-swift",
        method="update_named_param",
        parameters=("name", "dtype", "shape"),
        role=Role.PART,
        names=_one_name,
        is_single=True,
        may_lack=True,
    ),
    KnownCall(
        framework="ms-swift",
        method="update_flattened_params",
        parameters=("metadatas",),
        role=Role.PART,
        names=_names_of_bucket,
        may_lack=True,
    ),
    KnownCall(
        framework="ms-swift",
        method="process_weights_after_loading",
        parameters=(),
        role=Role.END,
        may_lack=True,
    ),
)

CHECKPOINT_ENGINE = (
    KnownCall(
        framework="checkpoint-engine",
        method="update_weights_from_ipc",
        parameters=("zmq_handles",),
        role=Role.VERSION,
    ),
)


def _folder_name(parameter: str) -> Callable[[Arguments], str | None]:
    """The name of the folder that an argument is the path of."""
    return lambda arguments: Path(str(arguments.get(parameter) or "")).name or None


PRIME_RL = (
    # Its worker for NIXL keeps the tensors of the live model, and writes into them.
    KnownCall(
        framework="prime-rl",
        method="update_weights_from_path",
        parameters=("weight_dir",),
        role=Role.IN_PLACE,
        besides=("apply_transfer_plan",),
    ),
    *(
        KnownCall(
            framework="prime-rl",
            method="update_weights_from_path",
            parameters=(parameter,),
            role=Role.VERSION,
            label=_folder_name(parameter),
        )
        for parameter in ("weight_dir", "weight_path")
    ),
)


def _kernel_format(arguments: Arguments) -> str | None:
    """Why tensors in kernel format are not adopted; None for a checkpoint's format."""
    if arguments.get("is_checkpoint_format", True):
        return None
    return "its tensors are in kernel format, which load_weights does not take"


SKYRL = (
    KnownCall(
        framework="SkyRL",
        method="skyrl_start_weight_update",
        parameters=("is_checkpoint_format",),
        role=Role.BEGIN,
        obstacle=_kernel_format,
    ),
    *(
        KnownCall(
            framework="SkyRL",
            method=method,
            parameters=("update_info",),
            role=Role.PART,
        )
        for method in ("update_weights_ipc", "update_weights_nccl")
    ),
    KnownCall(
        framework="SkyRL",
        method="skyrl_finish_weight_update",
        parameters=(),
        role=Role.END,
    ),
)


def _false_and_why(result: object) -> str | None:
    """Why a pair of success and text says that a call has failed."""
    if isinstance(result, tuple | list) and result and result[0] is False:
        return str(result[1]) if len(result) > 1 else "it returned False"
    return None


AREAL = (
    KnownCall(
        framework="AReaL",
        method="areal_update_weight_xccl",
        parameters=(),
        role=Role.COMPLETING,
        failure=_false_and_why,
    ),
    KnownCall(
        framework="AReaL",
        method="areal_update_weights",
        parameters=("model_path",),
        role=Role.VERSION,
        label=_folder_name("model_path"),
        failure=_false_and_why,
    ),
)


def _false(result: object) -> str | None:
    return "it returned False" if result is False else None


NEMO_RL = (
    *(
        KnownCall(
            framework="NeMo-RL",
            method=method,
            parameters=(),
            role=Role.VERSION,
            failure=_false,
            takes_quantised=False,
            private=("_nrl_named_parameters",),
        )
        for method in ("update_weights_from_collective", "update_weights_via_ipc_zmq")
    ),
    KnownCall(
        framework="NeMo-RL",
        method="nccl_reshard_refit",
        parameters=(),
        role=Role.IN_PLACE,
        failure=_false,
    ),
    # A sparse delta changes few numbers of each parameter.
    KnownCall(
        framework="NeMo-RL",
        method="update_weights_from_decoded_sparse_payload",
        parameters=("*payloads",),
        role=Role.IN_PLACE,
    ),
)


def _adapter_of_roll(arguments: Arguments) -> str | None:
    if arguments.get("is_lora"):
        return "it brings an adapter, and no weights of the model"
    return None


ROLL = (
    KnownCall(
        framework="ROLL",
        method="broadcast_parameter",
        parameters=("names", "dtypes", "shapes", "group_name", "is_lora"),
        role=Role.PART,
        names=lambda arguments: [str(name) for name in arguments.get("names") or ()],
        obstacle=_adapter_of_roll,
        takes_quantised=False,
    ),
    KnownCall(
        framework="ROLL",
        method="update_parameter_in_bucket",
        parameters=("serialized_named_tensors", "is_lora"),
        role=Role.PART,
        obstacle=_adapter_of_roll,
        takes_quantised=False,
    ),
    KnownCall(
        framework="ROLL",
        method="process_weights_after_loading",
        parameters=(),
        role=Role.END,
        takes_quantised=False,
    ),
)


def _version_of_request(arguments: Arguments) -> str | None:
    """The version that PipelineRL's request names; None if it names none."""
    try:
        version = json.loads(str(arguments.get("request_json"))).get("version")
    except (ValueError, AttributeError):  # the method rejects it in its own words
        return None
    return None if version is None else str(version)


PIPELINE_RL = (
    KnownCall(
        framework="PipelineRL",
        method="receive_weight_update",
        parameters=("request_json",),
        role=Role.VERSION,
        label=_version_of_request,
    ),
)

DIRECT = KnownCall(
    framework="code beside the engine",
    method="load_weights",
    parameters=("weights",),
    role=Role.PART,
)
"""Calls of `load_weights` of the model by code in the engine's own process, as TRL and
ms-swift make them. A cache reset or the next step ends the version."""

BUILT_IN: tuple[KnownCall, ...] = (
    *OPENRLHF,
    *VERL,
    *SWIFT,
    *CHECKPOINT_ENGINE,
    *PRIME_RL,
    *SKYRL,
    *AREAL,
    *NEMO_RL,
    *ROLL,
    *PIPELINE_RL,
)
"""The rows of this package."""


@cache
def known_calls() -> tuple[KnownCall, ...]:
    """All rows: those of users' packages first, which so can replace ours.

    Raises:
        ConfigError: an entry point cannot be loaded, or names something else.

    """
    rows: list[KnownCall] = []
    for point in entry_points(group=ENTRY_POINTS):
        try:
            found = point.load()
        except Exception as error:  # importing a package can raise anything
            raise ConfigError(
                f"the entry point {point.name!r} of {ENTRY_POINTS} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        of_point = found if isinstance(found, list | tuple) else [found]
        if not all(isinstance(row, KnownCall) for row in of_point):
            raise ConfigError(
                f"the entry point {point.name!r} of {ENTRY_POINTS} must be a KnownCall "
                f"or a list of them, got {found!r:.200}"
            )
        rows += of_point
    return (*rows, *BUILT_IN)


def matched(methods: Mapping[str, Iterable[str]]) -> tuple[KnownCall, ...]:
    """The rows that fit workers with these methods, see `methods_of`."""
    listed: dict[str, Any] = {name: tuple(found) for name, found in methods.items()}
    return tuple(row for row in known_calls() if row.is_of(listed))
