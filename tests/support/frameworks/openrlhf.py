"""A worker extension that makes the calls of OpenRLHF's `WorkerWrap`.

Each parameter comes in a call of its own, and the last one has `empty_cache`. The group
is vLLM's `StatelessProcessGroup`, whose store carries the tensors here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401 (registers the operators)
from vllm.distributed import get_tp_group
from vllm.distributed.utils import StatelessProcessGroup


def _with_the_operator() -> None:
    name = get_tp_group().unique_name
    torch.ops.vllm.all_reduce(_ones(), group_name=name)


def _ones() -> torch.Tensor:
    return torch.ones(2, device="cuda" if torch.cuda.is_available() else "cpu")


Way = tuple[str, Callable[[], Any]]
MEETINGS: dict[str, Way] = {
    "barrier": (
        "barrier",
        lambda: torch.distributed.barrier(group=get_tp_group().cpu_group),
    ),
    "operator": ("all_reduce", _with_the_operator),
    "object": ("broadcast_object", lambda: get_tp_group().broadcast_object("it")),
}
"""The ways in which a method may meet the other ranks that decode, and the collective
that each comes to."""

HAS_SHM = hasattr(torch.ops._C, "init_shm_manager")
"""Whether ranks of the CPU build meet in shared memory; with AVX2 alone they do not."""
ON_HOST: dict[str, Way] = {
    "reduction": (
        "shm_allreduce" if HAS_SHM else "allreduce",
        lambda: get_tp_group().all_reduce(_ones()),
    ),
    "gathering": (
        "shm_all_gather" if HAS_SHM else "allgather_base",
        lambda: get_tp_group().device_communicator.all_gather(_ones()),
    ),
}
ON_GPU: dict[str, Way] = {
    "reduction": ("all_reduce", lambda: get_tp_group().all_reduce(_ones())),
    "communicator": (
        "all_reduce",
        lambda: get_tp_group().device_communicator.all_reduce(_ones()),
    ),
    "NCCL": (
        "all_reduce",
        lambda: get_tp_group().device_communicator.pynccl_comm.all_reduce(_ones()),
    ),
}
MEETINGS |= ON_GPU if torch.cuda.is_available() else ON_HOST


class Extension:
    """Joins a trainer's group, and loads one tensor per call."""

    def init_process_group(
        self: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
    ) -> None:
        self.tests_group = StatelessProcessGroup.create(
            host=master_address,
            port=master_port,
            rank=self.rank + rank_offset,
            world_size=world_size,
        )

    def update_weight(
        self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> None:
        assert dtype == self.model_config.dtype, f"mismatch dtype: src {dtype}"
        weight: torch.Tensor = self.tests_group.broadcast_obj(None, src=0)
        assert weight.shape == torch.Size(shape)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def update_weight_cuda_ipc(
        self: Any,
        name: str,
        dtype: Any,
        shape: Any,
        ipc_handles: Any = None,
        empty_cache: bool = False,
    ) -> None:
        opened, arguments = ipc_handles["the GPU"]
        weight: torch.Tensor = opened(*arguments)
        self.model_runner.model.load_weights(weights=[(name, weight)])


class Meeting(Extension):
    """One whose ranks may meet in a group of those that decode.

    Before some tensors they meet in torch's default group, as AReaL's do. No step uses
    that group.
    """

    def update_weight(
        self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> None:
        if name in MEETINGS:
            MEETINGS[name][1]()
        if name.endswith("norm.weight"):
            torch.distributed.barrier()
        Extension.update_weight(self, name, dtype, shape, empty_cache)
