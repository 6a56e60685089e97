"""A framework's own worker extension, unmodified, in an engine of this process.

Usage: python -m tests.support.frameworks.packages FRAMEWORK OLD NEW

The packages are in build/frameworks (`make test-frameworks`), without what they depend
on. So only the file of the extension and those that it uses are imported. A package's
`__init__` is not executed, and a missing dependency is an empty module. What needs a
GPU is replaced in this process: NCCL by the store of the same group, memory of a GPU by
memory of the host.

Prints what the engine has served before and after as JSON.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.engines.script import tell

Tensors = dict[str, torch.Tensor]


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


def checkpoint_engine(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from checkpoint_engine.device_utils import DeviceManager

    from tests.support.trainers.bucket_sender import sending, with_errors

    DeviceManager._detect_device_type = lambda _: "cuda"
    # The GPU that a worker of the CPU build does not have.
    vars(core.model_executor.driver_worker.worker)["_device_uuid"] = "GPU-0"

    def send(tensors: Tensors) -> Any:
        with sending(with_errors(tensors)) as address:
            return core.collective_rpc(
                "update_weights_from_ipc", args=({"GPU-0": address},)
            )

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


JOIN: dict[str, Callable[[Any, Path], Callable[[Tensors], Any]]] = {
    "openrlhf": openrlhf,
    "verl": verl,
    "checkpoint_engine": checkpoint_engine,
    "swift": swift,
    "prime_rl_nccl": prime_rl_nccl,
}
"""Framework → what joins its group, and returns what sends a version."""


def main(framework: str, old: Path, new: Path) -> None:
    from tests.e2e.test_sleep import says
    from tests.e2e.test_upstream_reloads import parameters
    from tests.support.engines.bare_core import Streams, add, call, prompt, publish
    from tests.support.frameworks.core import beside_steps, extended_core

    with extended_core(old, f"benchmarks.frameworks.extensions.{framework}") as core:
        digest = publish(core, new, "new")["digest"]
        expected = says(core, "expected"), parameters(core)
        publish(core, old, "old")
        send = JOIN[framework](core, new)
        add(core, "runs", prompt(3), max_tokens=900)
        streams = Streams(core).step(8)
        tensors = load_file(new / "model.safetensors")
        replies = beside_steps(streams, lambda: send(tensors))
        streams.run(1000)
        info = call(core, "info")
        tell(
            {
                "replies": replies,
                "label": info["weight_version"],
                "epoch": info["epoch"],
                "is digest of files": info["digest"] == digest,
                "is fresh": (says(core, "after"), parameters(core)) == expected,
                "labels": streams.stamps["runs"],
            }
        )


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
