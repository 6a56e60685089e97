"""What frameworks' code finds in the place of a GPU, in a process that has none.

NCCL becomes the store of the same group, memory of a GPU memory of the host, and a
handle of CUDA IPC the name of a file in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.distributed import distributed_c10d

JOB = "VERL_RAY_JOB_ID"
"""In the environment, which an engine and its trainer share: a part of the address
where the two ends of a framework meet."""
UNPACKED = "BENCH_UNPACKED"
"""In the environment: whether vLLM's CPU build leaves weights unpacked, as a GPU does.
Without this package a framework can write into no others."""


@cache
def use_host() -> None:
    """Let code for CUDA use the host, from here on."""
    from vllm.distributed.device_communicators import pynccl

    for name in ("synchronize", "empty_cache", "ipc_collect"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.Stream = HostStream
    torch.cuda.current_stream = lambda *_: HostStream()
    torch.cuda.stream = lambda _: nullcontext()
    torch.accelerator.synchronize = lambda *_: None
    # PipelineRL's module names the class, and its worker does not use it.
    vars(distributed_c10d).setdefault("ProcessGroupNCCL", object)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: Properties()
    torch.empty = _of_host(torch.empty)
    pynccl.PyNcclCommunicator = StoreCommunicator
    if os.environ.get(UNPACKED):
        from tests.support.engines.unpacked import unpack

        unpack()


def _of_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors, and makes those of a GPU in the host's memory."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # all of it is
        return make(*args, **kwargs)

    return made


def use_host_for_checkpoint_engine(extension: type | None = None) -> None:
    """Let checkpoint-engine's code use the host as well, at one of its ends.

    Args:
        extension: of the workers; None: it is the end of the parameter server.

    """
    from checkpoint_engine.device_utils import DeviceManager

    DeviceManager._detect_device_type = lambda _: "cuda"
    if extension is not None:
        vars_of: Any = extension
        vars_of._device_uuid = f"GPU-{Properties().uuid}"
        return
    from checkpoint_engine import ps

    DeviceManager.backend = "gloo"
    ps.reduce_tensor = share
    torch.tensor, torch.zeros = _of_host(torch.tensor), _of_host(torch.zeros)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _: None
    vars(torch._C).setdefault("_host_emptyCache", lambda: None)
    torch.cuda.mem_get_info = lambda *_: (Properties.total_memory,) * 2


class Properties:
    """Those of a GPU that has an identity and nothing else."""

    total_memory = 1 << 30

    @property
    def uuid(self) -> str:
        """As the engine of this job and its trainer know it, and nobody else."""
        return f"host-{os.environ.get(JOB, '')}"

    def __getattr__(self, name: str) -> Any:
        # As torch's own function does without a GPU; its compiler relies on it.
        raise AssertionError(f"there is no GPU that has {name}")


class HostStream:
    """A stream whose work is done when it is launched."""

    def synchronize(self) -> None:
        """Return at once."""


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


@cache
def _lent_memory(num_bytes: int, buffer: int) -> tuple[str, torch.Tensor]:
    """A file in memory, which ends with this process, and its bytes.

    It is lent again and again, as memory of a GPU is that torch keeps.
    """
    handle = os.memfd_create("lent")
    os.truncate(handle, num_bytes)
    name = f"/proc/{os.getpid()}/fd/{handle}"
    return name, torch.from_file(name, True, num_bytes, dtype=torch.uint8)


def lend(tensor: torch.Tensor, buffer: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """What `reduce_tensor` returns for a tensor of a GPU, for one of the host.

    Tensors of one size share memory unless `buffer` differs. The seventh argument is
    the device, as there.
    """
    name, memory = _lent_memory(tensor.nbytes, buffer)
    memory.copy_(tensor.reshape(-1).view(torch.uint8))
    return lent, (name, tensor.nbytes, tensor.dtype, tensor.shape, None, None, None)


def share(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """As `lend`, but what is written into the tensor later is seen as well."""
    handle = lend(tensor)
    _, memory = _lent_memory(tensor.nbytes, 0)
    tensor.data = memory.view(tensor.dtype).view(tensor.shape)
    return handle


def lent(
    name: str, num_bytes: int, dtype: torch.dtype, shape: torch.Size, *_: object
) -> torch.Tensor:
    """The memory that another process has lent, as a tensor."""
    found = torch.from_file(name, True, num_bytes, dtype=torch.uint8)
    return found.view(dtype).view(shape)
