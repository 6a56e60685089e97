"""PipelineRL's worker calls, as calls of the controller.

The calls join the trainer's group, and receive and load a version. The engine core
executes them if its workers have no such methods. The trainer then opens its group with
`torch.distributed`. PipelineRL's own package adds these methods to its workers through
`worker_extension_cls`, for a group of another kind. So the engine core does not
intercept methods that the workers have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed

GROUP = "actor"
"""PipelineRL's name for the group of its trainer and its engines."""

JOIN, RECEIVE = "init_actor_update_group", "receive_weight_update"
LEAVE = ("destroy_actor_update_group", "close_communicator")


def takes(
    vllm_config: upstream.VllmConfig,
    method: str,
    args: tuple[Any, ...],
    *,
    has_actor_group: bool,
) -> bool:
    """Whether this is a worker call of PipelineRL that the workers do not have."""
    if method == JOIN:
        is_its = len(args) == 4 and isinstance(args[2], str)
    elif method == RECEIVE:
        is_its = len(args) == 1 and _is_request(plain(args[0], strict=False))
    else:
        is_its = method in LEAVE and has_actor_group
    return is_its and not _workers_have(vllm_config, method)


def _workers_have(vllm_config: upstream.VllmConfig, method: str) -> bool:
    """Whether an extension of the workers, or a user's own worker, has this method."""
    parallel = vllm_config.parallel_config
    classes = [parallel.worker_extension_cls, parallel.worker_cls]
    if str(classes[1]).partition(".")[0] in ("auto", "vllm"):
        # Upstream's worker class keeps extensions of earlier engines of this process.
        classes.pop()
    found = (
        upstream.resolve_obj_by_qualname(each) if isinstance(each, str) else each
        for each in classes
        if each
    )
    return any(hasattr(each, method) for each in found)


def group(
    actor_idx: Any, actor_ngpus: Any, init_method: Any, world_size: Any
) -> dict[str, Any]:
    """The group to join: the trainer is rank 0, the actors follow one by one."""
    numbers = (actor_idx, actor_ngpus, world_size)
    if any(type(number) is not int for number in numbers):
        raise Malformed("actor_idx, actor_ngpus and world_size must be whole numbers")
    return {
        "init_method": init_method,
        "world_size": world_size,
        "rank_offset": 1 + actor_idx * actor_ngpus,
        "group_name": GROUP,
        "backend": "auto",
    }


def announced(request: Any, announcement: str) -> tuple[str, dict[str, Any]]:
    """The label of a `WeightUpdateRequest`, and the `update_info` of its broadcast.

    Args:
        request: the request as a dict.
        announcement: an id of this call.

    Raises:
        Malformed: it is no such request, or it lists slices of tensors.

    """
    if not _is_request(request):
        raise Malformed("the request needs 'version' and the list 'parameters_info'")
    version, infos = request.get("version"), request["parameters_info"]
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise Malformed(f"version must be a number or a string, got {version!r}")
    for info in infos:
        if not isinstance(info, dict) or not {"name", "shape", "dtype"} <= info.keys():
            raise Malformed("parameters_info needs 'name', 'shape' and 'dtype' of each")
        if info.get("shard") is not None:
            raise Malformed(
                f"{info['name']}: 'shard' is not supported; broadcast whole tensors, "
                "of which every rank takes its part"
            )
    return str(version), {
        "names": [info["name"] for info in infos],
        "dtype_names": [str(info["dtype"]).removeprefix("torch.") for info in infos],
        "shapes": [info["shape"] for info in infos],
        "group_name": GROUP,
        "announcement": announcement,
    }


def plain(request: object, *, strict: bool = True) -> Any:
    """A request as a dict, from a pydantic model, JSON or a dict."""
    if hasattr(request, "model_dump"):
        return request.model_dump()
    if isinstance(request, str | bytes):
        try:
            return json.loads(request)
        except ValueError as error:
            if strict:
                raise Malformed(f"the request is not JSON: {error}") from None
    return request


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    JOIN: lambda *args: {"command": "join", "init_info": group(*args)},
    **{name: lambda: {"command": "leave", "init_info": GROUP} for name in LEAVE},
}
"""Worker calls that become commands of the transport `groups`."""


def _is_request(request: object) -> bool:
    return isinstance(request, dict) and isinstance(
        request.get("parameters_info"), list
    )
