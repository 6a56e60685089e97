"""A framework's own worker extension, unmodified, in an engine of this process.

Usage: python -m tests.support.frameworks.packages FRAMEWORK OLD NEW [SENT]

The framework sends the tensors of SENT, and so makes of OLD what NEW is. Without SENT
it sends those of NEW.

The packages are in build/frameworks (`make test-frameworks`), without what they depend
on. So only the file of the extension and those that it uses are imported. A package's
`__init__` is not executed, and a missing dependency is an empty module. What needs a
GPU is replaced in this process: NCCL by the store of the same group, memory of a GPU by
memory of the host.

Prints what the engine has served before and after as JSON.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.engines.fp8_blocks import use_torch
from tests.support.engines.script import tell
from tests.support.frameworks.repositories import (
    nemo_rl,
    nemo_rl_zmq,
    pipelinerl,
    roll,
    roll_buckets,
    skyrl_head,
)
from tests.support.models.quantised import BLOCK, KINDS, quantise
from tests.support.models.tiny_drafters import MTP
from tests.support.trainers import bucket_sender

Tensors = dict[str, torch.Tensor]

BLOCKS = "fp8-block"


def openrlhf(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from tests.support.trainers.store_group import HOST, StoreTrainer

    trainer = StoreTrainer()
    args = HOST, trainer.port, 1, 2, "openrlhf", "nccl", False
    core.collective_rpc("init_process_group", args=args)

    def send(tensors: Tensors) -> Any:
        replies = None
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            trainer.broadcast(tensor)
            told = name, tensor.dtype, tensor.shape, number == len(tensors)
            replies = core.collective_rpc("update_weight", args=told)
        return replies

    return send


def verl(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from tests.support.trainers.bucket_sender import sending, with_marks

    worker = core.model_executor.driver_worker.worker
    address = type(worker)._get_zmq_handle(worker)

    def send(tensors: Tensors) -> Any:
        with sending(with_marks(tensors), address):
            told = {"use_shm": True}
            return core.collective_rpc("update_weights_from_ipc", kwargs=told)

    return send


def in_blocks(folder: Path) -> Path:
    """A checkpoint, quantised in blocks of FP8 by verl's own function."""
    from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise

    def split(weight: torch.Tensor) -> Tensors:
        numbers, scale = scaled_fp8_blockwise(weight, [BLOCK, BLOCK])
        return {"weight": numbers, "weight_scale_inv": scale.squeeze(-1)}

    with unittest.mock.patch.dict(KINDS, {BLOCKS: (split, KINDS[BLOCKS][1])}):
        return quantise(folder, folder.with_name(f"{folder.name}-verl"), BLOCKS)


def checkpoint_engine(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from tests.support.trainers.bucket_sender import sending, with_errors

    gpu = core.model_executor.driver_worker.worker._device_uuid

    def send(tensors: Tensors) -> Any:
        with sending(with_errors(tensors)) as address:
            told = ({gpu: address},)
            return core.collective_rpc("update_weights_from_ipc", args=told)

    return send


def swift(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from tests.support.trainers.bucket_sender import sending, with_marks

    def send(tensors: Tensors) -> Any:
        with sending(with_marks(tensors)) as address:
            told = {"use_shm": True, "zmq_handle": address}
            return core.collective_rpc("update_weights_from_ipc", kwargs=told)

    return send


def prime_rl_nccl(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from tests.support.trainers.store_group import HOST, StoreTrainer

    trainer = StoreTrainer()
    # The number of a GPU, which the worker's rank is made of.
    vars(core.model_executor.driver_worker.worker)["device"] = torch.device("cpu", 0)
    told = {"host": HOST, "port": trainer.port, "rank_offset": 0, "timeout": 30}
    core.collective_rpc("init_broadcaster", kwargs=told | {"inference_world_size": 1})

    def send(tensors: Tensors) -> Any:
        """Two state dicts, each of them as its facts and one tensor for each dtype."""
        pairs = list(tensors.items())
        trainer.broadcast(torch.tensor([2]))
        for some in (pairs[:9], pairs[9:]):
            dtypes = dict.fromkeys(tensor.dtype for _, tensor in some)
            found = {d: [(n, t) for n, t in some if t.dtype == d] for d in dtypes}
            facts = {d: [(n, t.shape, t.numel()) for n, t in found[d]] for d in found}
            raw = torch.frombuffer(bytearray(pickle.dumps(facts)), dtype=torch.uint8)
            trainer.broadcast(torch.tensor([raw.numel()]))
            trainer.broadcast(raw)
            for of_dtype in found.values():
                trainer.broadcast(torch.cat([t.reshape(-1) for _, t in of_dtype]))
        args = (str(folder.with_name("step_1")),)
        return core.collective_rpc("update_weights_from_path", args=args)

    return send


def areal(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    """A queue stands in for the group that its worker receives from."""
    queue: SimpleQueue[torch.Tensor] = SimpleQueue()
    vars(core.model_executor.driver_worker.worker)["weight_update_groups"] = {
        "ours": queue
    }
    original = torch.distributed.broadcast

    def broadcast(
        tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is not queue:
            return original(tensor, src, group, async_op)
        tensor.copy_(queue.get(timeout=60))
        return None

    torch.distributed.broadcast = broadcast

    def send(tensors: Tensors) -> Any:
        replies = None
        for bucket in _halves(tensors):
            for tensor in bucket.values():
                queue.put(tensor)
            dtypes = [str(t.dtype).removeprefix("torch.") for t in bucket.values()]
            shapes = [list(tensor.shape) for tensor in bucket.values()]
            facts = list(bucket), dtypes, shapes, "ours"
            core.collective_rpc("areal_set_weight_meta", args=facts)
            replies = core.collective_rpc("areal_update_weight_xccl")
        return replies

    return send


def areal_files(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    return lambda _: core.collective_rpc("areal_update_weights", args=(str(folder),))


def skyrl(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from benchmarks.frameworks.on_host import Properties, lend

    gpu = Properties().uuid

    def send(tensors: Tensors) -> Any:
        """One buffer for both buckets, as the trainer's."""
        core.collective_rpc("skyrl_start_weight_update")
        for bucket in _halves(tensors):
            packed = torch.cat([tensor.reshape(-1) for tensor in bucket.values()])
            handles = base64.b64encode(pickle.dumps({gpu: lend(packed)}))
            told = {
                "names": list(bucket),
                "dtype_names": [str(t.dtype) for t in bucket.values()],
                "shapes": [list(tensor.shape) for tensor in bucket.values()],
                "sizes": [tensor.numel() for tensor in bucket.values()],
                "ipc_handles_pickled": handles.decode(),
            }
            core.collective_rpc("update_weights_ipc", args=(told,))
        return core.collective_rpc("skyrl_finish_weight_update")

    return send


def swift_nccl(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    trainer = _last_rank(core)

    def send(tensors: Tensors) -> Any:
        for name, tensor in tensors.items():
            trainer.broadcast(tensor)
            trainer.barrier()
            told = name, str(tensor.dtype), list(tensor.shape)
            core.collective_rpc("update_named_param", args=told)
        return core.collective_rpc("process_weights_after_loading")

    return send


def swift_flattened(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from swift.rlhf_trainers.utils import FlattenedTensorBucket

    trainer = _last_rank(core)

    def send(tensors: Tensors) -> Any:
        for some in _halves(tensors):
            bucket = FlattenedTensorBucket(named_tensors=list(some.items()))
            trainer.broadcast(bucket.flattened_tensor)
            trainer.barrier()
            told = [each.model_dump() for each in bucket.metadata]
            core.collective_rpc("update_flattened_params", args=(told,))
        return core.collective_rpc("process_weights_after_loading")

    return send


def _last_rank(core: Any) -> Any:
    """ms-swift's trainer, the last rank of its group."""
    from tests.support.trainers.store_group import HOST, StoreTrainer

    trainer = StoreTrainer(rank=1)
    core.collective_rpc("init_communicator", args=(HOST, trainer.port, 2))
    return trainer


def _halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    pairs = list(tensors.items())
    return dict(pairs[:9]), dict(pairs[9:])


JOIN: dict[str, Callable[[Any, Path], Callable[[Tensors], Any]]] = {
    "openrlhf": openrlhf,
    "verl": verl,
    "verl_fp8": verl,
    "verl_fp8_packed": verl,
    "verl_mtp": verl,
    "checkpoint_engine": checkpoint_engine,
    "swift": swift,
    "prime_rl_nccl": prime_rl_nccl,
    "areal": areal,
    "areal_files": areal_files,
    "skyrl": skyrl,
    "swift_nccl": swift_nccl,
    "swift_flattened": swift_flattened,
    "nemo_rl": nemo_rl,
    "nemo_rl_zmq": nemo_rl_zmq,
    "roll": roll,
    "roll_buckets": roll_buckets,
    "pipelinerl": pipelinerl,
    "skyrl_head": skyrl_head,
}
"""Framework → what joins its group, and returns what sends a version."""


PACKS = {"verl_fp8": False, "verl_fp8_packed": True}
"""Frameworks that send bf16 to an engine with blocks of FP8 → see `use_torch`."""

OPTIONS_OF: dict[str, dict[str, Any]] = {
    "verl_mtp": {"speculative_config": MTP},
    "skyrl": {"weight_transfer_config": {"backend": "local"}},
    "skyrl_head": {"weight_transfer_config": {"backend": "nccl"}},
}
"""Of the engine, for frameworks that need more than their extension."""


def main(framework: str, old: Path, new: Path, sent: Path | None = None) -> None:
    from tests.e2e.test_upstream_reloads import parameters
    from tests.support.engines.bare_core import (
        Streams,
        add,
        answers,
        call,
        ended_soon,
        prompt,
        publish,
    )
    from tests.support.frameworks.core import beside_steps, extended_core

    extension = f"benchmarks.frameworks.extensions.{framework}"
    tensors = load_file((sent or new) / "model.safetensors")
    if framework in PACKS:
        os.environ["VERL_DISABLE_TRITON_FP8"] = "1"
        use_torch(packs=PACKS[framework])
        bucket_sender.SIZE = 1 << 20  # for larger tensors
        old = quantise(old, old.with_name(f"{old.name}-{BLOCKS}"), BLOCKS)
    with extended_core(old, extension, **OPTIONS_OF.get(framework, {})) as core:
        new = in_blocks(new) if framework in PACKS else new
        digest = publish(core, new, "new")["digest"]
        expected = answers(core, "expected"), parameters(core)
        publish(core, old, "old")
        send = JOIN[framework](core, new)
        add(core, "runs", prompt(3), max_tokens=900)
        streams = Streams(core).step(8)
        replies = beside_steps(streams, lambda: send(tensors))
        ended_soon(streams, "runs")
        info = call(core, "info")
        tell(
            {
                "replies": replies,
                "label": info["weight_version"],
                "epoch": info["epoch"],
                "is digest of files": info["digest"] == digest,
                "is fresh": (answers(core, "after"), parameters(core)) == expected,
                "labels": streams.stamps["runs"],
            }
        )


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], *map(Path, sys.argv[2:]))
