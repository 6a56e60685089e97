"""What frameworks' code finds in the place of a GPU, in a process that has none.

NCCL becomes the store of the same group, and memory of a GPU memory of the host.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

UNPACKED = "BENCH_UNPACKED"
"""In the environment: whether vLLM's CPU build leaves weights unpacked, as a GPU does.
Without this package a framework can write into no others."""


@cache
def use_host() -> None:
    """Let code for CUDA use the host, from here on."""
    from vllm.distributed.device_communicators import pynccl

    for name in ("synchronize", "empty_cache", "ipc_collect", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    torch.empty = empty
    pynccl.PyNcclCommunicator = StoreCommunicator
    if os.environ.get(UNPACKED):
        from tests.support.engines.unpacked import unpack

        unpack()


class StoreCommunicator:
    """One end of a group, with the interface of `PyNcclCommunicator`.

    The group is vLLM's `StatelessProcessGroup`, whose store carries the tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send `tensor` to the group, or fill it with what rank `src` sends."""
        is_sender = self.group.rank == src
        sent = self.group.broadcast_obj(tensor if is_sender else None, src=src)
        if not is_sender:
            tensor.copy_(sent)
