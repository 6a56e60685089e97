"""The table of known calls: one row for each, and the rows of a user's packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
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
        may_lack=True,
    ),
    KnownCall(
        framework="OpenRLHF",
        method="update_weight_cuda_ipc",
        parameters=("name", "dtype", "shape", "ipc_handles", "empty_cache"),
        role=Role.PART,
        is_last=_has_empty_cache,
        names=_one_name,
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
        takes_quantised=False,
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

BUILT_IN: tuple[KnownCall, ...] = (*OPENRLHF, *VERL, *SWIFT, *CHECKPOINT_ENGINE)
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
        of_point = [found] if isinstance(found, KnownCall) else list(found)
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
