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
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.engines.script import ROOT, tell

PACKAGES = ROOT / "build" / "frameworks"
Tensors = dict[str, torch.Tensor]


class Bare(MetaPathFinder):
    """Finds packages and does not execute their `__init__`."""

    def __init__(
        self, top: str, executed: Sequence[str], empty: Sequence[str] = ()
    ) -> None:
        self._top, self._executed, self._empty = top, executed, empty

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{each}.") for each in self._empty):
            return ModuleSpec(name, Anything(), is_package=True)
        folder = PACKAGES.joinpath(self._top, *name.split("."))
        if name.split(".")[0] != self._top or not folder.is_dir():
            return None
        if name in self._executed:
            return None
        spec = ModuleSpec(name, Nothing(), is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


class Nothing(Loader):
    """Executes nothing."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        return None


class Whatever:
    """The value of any name of a module that is not there."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *args: Any, **_: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Whatever:
        if name.startswith("__"):
            raise AttributeError(name)
        return Whatever()

    def __class_getitem__(cls, _: object) -> type[Whatever]:
        return cls


class Anything(Nothing):
    """Makes a module that has every name."""

    def exec_module(self, module: ModuleType) -> None:
        def look_up(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Whatever,), {})

        module.__getattr__ = look_up  # type: ignore[method-assign]


def on_host() -> None:
    """Let code for CUDA use the host."""
    for name in ("synchronize", "empty_cache", "ipc_collect", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    torch.empty = empty


def openrlhf(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    from vllm.distributed.device_communicators import pynccl

    from tests.support.trainers.store_group import (
        HOST,
        StoreCommunicator,
        StoreTrainer,
    )

    pynccl.PyNcclCommunicator = StoreCommunicator
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


def areal(core: Any, folder: Path) -> Callable[[Tensors], Any]:
    def send(tensors: Tensors) -> Any:
        return core.collective_rpc("areal_update_weights", args=(str(folder),))

    return send


def bare(top: str, *executed: str, empty: Sequence[str] = ()) -> Bare:
    return Bare(top, executed, empty)


UNUSED_OF_VERL = ("npu_vllm_patch", "vllm_fp8_utils", "vllm_fp4_utils")
"""Files of verl for other devices and formats."""

CASES: dict[str, Any] = {
    "openrlhf": SimpleNamespace(
        extension="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        finder=bare("openrlhf"),
        join=openrlhf,
    ),
    "verl": SimpleNamespace(
        extension=(
            "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
        ),
        finder=bare(
            "verl",
            "verl.utils.vllm",
            "verl.third_party.vllm",
            "verl.plugin.platform",
            empty=(
                "verl.utils.kernel",
                *(f"verl.utils.vllm.{each}" for each in UNUSED_OF_VERL),
            ),
        ),
        join=verl,
    ),
    "checkpoint_engine": SimpleNamespace(
        extension="checkpoint_engine.worker.VllmColocateWorkerExtension",
        finder=bare("checkpoint_engine"),
        join=checkpoint_engine,
    ),
    "swift": SimpleNamespace(
        extension="swift.pipelines.infer.rollout.WeightSyncWorkerExtension",
        finder=bare(
            "swift",
            empty=(
                *("aiohttp", "swift.arguments", "swift.infer_engine", "swift.rollout"),
                *("swift.rlhf_trainers", "swift.pipelines.base", "swift.utils"),
            ),
        ),
        join=swift,
    ),
}


def main(framework: str, old: Path, new: Path) -> None:
    from tests.e2e.test_sleep import says
    from tests.e2e.test_upstream_reloads import parameters
    from tests.support.engines.bare_core import Streams, add, call, prompt, publish
    from tests.support.frameworks.core import beside_steps, extended_core

    case = CASES[framework]
    on_host()
    sys.meta_path.insert(0, case.finder)
    sys.path.append(str(PACKAGES / framework))
    with extended_core(old, case.extension) as core:
        digest = publish(core, new, "new")["digest"]
        expected = says(core, "expected"), parameters(core)
        publish(core, old, "old")
        send = case.join(core, new)
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
