"""Frameworks whose repositories have their worker files: how each sends a version.

Each function joins the engine's worker, and returns what sends tensors to it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.trainers.store_group import HOST, StoreTrainer
from vllm.inflight.transport.waiting import in_background

Tensors = dict[str, torch.Tensor]
Send = Callable[[Tensors], Any]

BUCKET = 1 << 17
"""Bytes of a bucket; a tiny model needs several."""


def _facts(tensors: Tensors) -> tuple[list[str], list[str], list[list[int]]]:
    names = list(tensors)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
    return names, dtypes, [list(t.shape) for t in tensors.values()]


def skyrl_head(core: Any, folder: Path) -> Send:
    """vLLM's own engine receives, with the store of its group in place of NCCL."""
    torch.accelerator.current_device_index = lambda: 0
    trainer = StoreTrainer()
    info = {"master_address": HOST, "master_port": trainer.port}
    info |= {"rank_offset": 1, "world_size": 2}
    core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})

    def send(tensors: Tensors) -> Any:
        core.collective_rpc("skyrl_start_weight_update")
        for some in _thirds(tensors):
            for tensor in some.values():
                trainer.broadcast(tensor)
            told = zip(("names", "dtype_names", "shapes"), _facts(some), strict=True)
            core.collective_rpc("update_weights_nccl", args=(dict(told),))
        return core.collective_rpc("skyrl_finish_weight_update")

    return send


def nemo_rl(core: Any, folder: Path) -> Send:
    """vLLM's group is in the place of its own, which needs the package of NCCL."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.utils import StatelessProcessGroup

    trainer = StoreTrainer()
    group = StatelessProcessGroup.create(HOST, trainer.port, 1, 2)
    worker = core.model_executor.driver_worker.worker
    vars(worker)["model_update_group"] = pynccl.PyNcclCommunicator(group, worker.device)
    total = torch.cuda.get_device_properties("cuda").total_memory
    os.environ["NRL_REFIT_BUFFER_MEMORY_RATIO"] = str(BUCKET / total)

    def send(tensors: Tensors) -> Any:
        core.collective_rpc("prepare_refit_info", args=(refit_info(tensors),))
        for packed in _packed(tensors, BUCKET):
            trainer.broadcast(packed)
        return core.collective_rpc("update_weights_from_collective")

    return send


def refit_info(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _packed(tensors: Tensors, size: int) -> Iterator[torch.Tensor]:
    """Bytes of the tensors, each part just larger than `size`."""
    parts: list[torch.Tensor] = []
    for tensor in tensors.values():
        parts.append(tensor.reshape(-1).view(torch.uint8))
        if sum(map(len, parts)) > size:
            yield torch.cat(parts)
            parts = []
    if parts:
        yield torch.cat(parts)


def nemo_rl_zmq(core: Any, folder: Path) -> Send:
    """Its own sender, with lent memory of the host in the place of CUDA IPC."""
    import zmq
    from nemo_rl.models.policy import utils

    from benchmarks.frameworks.on_host import lend, lent

    # It fills one of its two buffers while the other one is read.
    utils.get_handle_from_tensor = lambda tensor: lend(tensor, tensor.data_ptr())[1:]
    utils.rebuild_cuda_tensor = lent
    worker = core.model_executor.driver_worker.worker
    vars(worker)["report_device_id"] = lambda: folder.parent.name
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.bind(worker.get_zmq_address())

    def send(tensors: Tensors) -> Any:
        core.collective_rpc("prepare_refit_info", args=(refit_info(tensors),))
        sent = in_background(
            lambda: utils.stream_weights_via_ipc_zmq_impl(
                iter(tensors.items()), 2 * BUCKET, socket, 1, "trainer"
            )
        )
        replies = core.collective_rpc("update_weights_via_ipc_zmq")
        sent.result(timeout=60)
        return replies

    return send


def roll(core: Any, folder: Path) -> Send:
    """A group of torch, whose trainer is a process of its own."""
    from tests.support.engines.torch_trainer import TorchTrainer

    core.collective_rpc("custom_init_worker")
    trainer = TorchTrainer("actor", 2, "gloo")
    joining = HOST, trainer.port, 1, 2, trainer.name, trainer.backend
    core.collective_rpc("setup_collective_group", args=joining)
    assert trainer.heard() == "joined"

    def send(tensors: Tensors) -> Any:
        for some in _thirds(tensors):
            trainer.begin(folder, list(some))
            facts = *_facts(some), trainer.name
            core.collective_rpc("broadcast_parameter", args=facts)
            assert trainer.heard() == "sent"
        return core.collective_rpc("process_weights_after_loading")

    return send


def roll_buckets(core: Any, folder: Path) -> Send:
    """Its own buckets, pickled as tensors of the host."""
    from roll.utils.send_recv_utils import serialize_named_weights
    from torch.multiprocessing import reductions

    # It changes how handles of CUDA IPC are pickled, unless that has been done.
    vars(reductions)["_reduce_tensor_original"] = reductions.reduce_tensor
    core.collective_rpc("custom_init_worker")

    def send(tensors: Tensors) -> Any:
        for some in _thirds(tensors):
            packed = serialize_named_weights(list(some.items()), "vllm")
            core.collective_rpc("update_parameter_in_bucket", args=([packed],))
        return core.collective_rpc("process_weights_after_loading")

    return send


def _thirds(tensors: Tensors) -> Iterator[Tensors]:
    pairs = list(tensors.items())
    step = math.ceil(len(pairs) / 3)
    for start in range(0, len(pairs), step):
        yield dict(pairs[start : start + step])


def pipelinerl(core: Any, folder: Path) -> Send:
    """Its group is made as vLLM makes it, whose class has lost the field `socket`."""
    from pipelinerl import torch_utils
    from vllm.distributed.utils import StatelessProcessGroup

    torch_utils._create_stateless_pg = StatelessProcessGroup.create
    trainer = StoreTrainer()
    joining = 0, 1, f"tcp://{HOST}:{trainer.port}", 2
    core.collective_rpc("init_actor_update_group", args=joining)

    def send(tensors: Tensors) -> Any:
        for tensor in tensors.values():
            trainer.broadcast(tensor)
        told = [
            {"name": name, "dtype": dtype, "shape": shape}
            for name, dtype, shape in zip(*_facts(tensors), strict=True)
        ]
        asked = json.dumps({"version": 7, "parameters_info": told})
        return core.collective_rpc("receive_weight_update", args=(asked,))

    return send
