"""The packages of frameworks, of which only a few files are imported.

The packages are in build/frameworks (`make test-frameworks`), without what they depend
on. A package's `__init__` is not executed, and a missing dependency is an empty module.
So the files that hold a worker extension, and a sender's half of it, run unmodified.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core.core_schema import any_schema

PACKAGES = Path(__file__).parents[2] / "build" / "frameworks"


class Bare(MetaPathFinder):
    """Finds packages and does not execute their `__init__`.

    Args:
        folder: of the packages.
        top: the name of the package.
        executed: packages in it whose `__init__` is executed all the same.
        empty: modules that are empty, with all modules in them.

    """

    def __init__(
        self,
        folder: Path,
        top: str,
        executed: Sequence[str] = (),
        empty: Sequence[str] = (),
    ) -> None:
        self._folder, self._top = folder, top
        self._executed, self._empty = executed, empty

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{each}.") for each in self._empty):
            return ModuleSpec(name, Anything(), is_package=True)
        folder = self._folder.joinpath(*name.split("."))
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

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> Any:
        """As a field of a pydantic model it takes anything."""
        return any_schema()


class Anything(Nothing):
    """Makes a module that has every name."""

    def exec_module(self, module: ModuleType) -> None:
        def look_up(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Whatever,), {})

        module.__getattr__ = look_up  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Package:
    """How the files of one package are imported.

    Attributes:
        name: of the folder in build/frameworks.
        top: the package that is in it, if that has another name.
        extension: the module and the class of its worker extension, if it has one.
        without: methods of it that vLLM's own worker has too, which vLLM rejects.
        executed: see `Bare`.
        empty: see `Bare`.

    """

    name: str
    top: str = ""
    extension: tuple[str, str] = ("", "")
    without: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it is, if it has been installed."""
        return PACKAGES / self.name

    def use(self) -> None:
        """Let this process import the files of the package."""
        if str(self.folder) in sys.path:
            return
        top = self.top or self.name
        sys.meta_path.insert(0, Bare(self.folder, top, self.executed, self.empty))
        sys.path.append(str(self.folder))

    def worker_extension(self) -> type:
        """The package's own worker extension."""
        self.use()
        module, name = self.extension
        found: type = getattr(import_module(module), name)
        for method in self.without:
            delattr(found, method)
        return found


_UNUSED_OF_VERL = ("npu_vllm_patch", "vllm_fp8_utils", "vllm_fp4_utils")
"""Files of verl for other devices and formats."""

OWN: dict[str, Package] = {
    package.name: package
    for package in (
        Package(
            name="openrlhf",
            extension=("openrlhf.trainer.ray.vllm_worker_wrap", "WorkerWrap"),
        ),
        Package(
            name="verl",
            extension=(
                "verl.workers.rollout.vllm_rollout.utils",
                "vLLMColocateWorkerExtension",
            ),
            executed=(
                "verl.utils.vllm",
                "verl.third_party.vllm",
                "verl.plugin.platform",
            ),
            empty=(
                *("ray", "verl.utils.kernel", "verl.utils.tokenizer"),
                "verl.workers.config",
                *(f"verl.utils.vllm.{each}" for each in _UNUSED_OF_VERL),
            ),
        ),
        Package(
            name="prime_rl",
            extension=(
                "prime_rl.inference.vllm.worker.filesystem",
                "FileSystemWeightUpdateWorker",
            ),
        ),
        Package(
            name="checkpoint_engine",
            extension=("checkpoint_engine.worker", "VllmColocateWorkerExtension"),
            executed=("checkpoint_engine.distributed",),
        ),
        Package(
            name="swift",
            extension=("swift.pipelines.infer.rollout", "WeightSyncWorkerExtension"),
            empty=(
                *("aiohttp", "swift.arguments", "swift.infer_engine", "swift.rollout"),
                *("swift.rlhf_trainers", "swift.pipelines.base", "swift.utils"),
            ),
        ),
        Package(
            name="areal",
            extension=(
                "areal.engine.vllm_ext.vllm_worker_extension",
                "VLLMWorkerExtension",
            ),
            executed=("areal.infra.platforms",),
        ),
        Package(
            name="skyrl",
            extension=(
                "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap",
                "NewInferenceWorkerWrap",
            ),
        ),
        Package(
            name="skyrl_head",
            top="skyrl",
            extension=(
                "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap",
                "NewInferenceWorkerWrap",
            ),
            empty=("skyrl.backends.skyrl_train.patches",),
        ),
        Package(
            name="nemo_rl",
            extension=(
                "nemo_rl.models.generation.vllm.vllm_backend",
                "VllmInternalWorkerExtension",
            ),
            without=("synchronize_device",),
            empty=(
                *("accelerate", "nemo_automodel", "ray", "rich"),
                "nemo_rl.distributed.worker_group_utils",
                "nemo_rl.models.generation.vllm.checkpoint_engine",
            ),
        ),
        Package(
            name="roll",
            extension=("roll.third_party.vllm.worker", "WorkerV1"),
            executed=("roll.platforms",),
            empty=("pybase64", "ray"),
        ),
        Package(
            name="pipelinerl",
            extension=("pipelinerl.vllm1", "WorkerExtension"),
            empty=(
                *("accelerate", "deepspeed", "omegaconf", "ring_flash_attn"),
                *("pipelinerl.finetune", "pipelinerl.streams", "pipelinerl.utils"),
                # Of an older vLLM; its server needs them, and its worker does not.
                *("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launcher"),
            ),
        ),
        Package(
            name="trl",
            executed=("trl", "trl.kernels", "trl.extras", "trl.generation"),
            empty=("datasets", "pandas", "peft", "pyarrow"),
        ),
        Package(
            name="slime",
            executed=("slime.rollout.rm_hub", "slime.utils.accelerator"),
            empty=("ray", "sglang", "sglang_router", "pylatexenc", "slime.ray"),
        ),
        Package(
            name="miles",
            executed=("miles.rollout.rm_hub",),
            empty=(
                *("ray", "sglang", "sglang_router", "pylatexenc", "pybase64", "openai"),
                *(
                    "miles.ray",
                    "miles.backends.megatron_utils",
                    "miles.utils.audit_utils",
                ),
            ),
        ),
    )
}
"""The packages by their names in build/frameworks, and other ways or files of some."""
OWN["prime_rl_nccl"] = replace(
    OWN["prime_rl"],
    extension=("prime_rl.inference.vllm.worker.nccl", "NCCLWeightUpdateWorker"),
    empty=("prime_rl.utils",),
)
OWN["verl_fp8"] = OWN["verl_fp8_packed"] = replace(
    OWN["verl"],
    empty=(
        *("ray", "verl.utils.kernel.kernels", "verl.utils.tokenizer"),
        *("verl.workers.config", "verl.utils.vllm.npu_vllm_patch"),
    ),
)
"""With what quantises in blocks of FP8, and prepares layers for them."""
OWN["verl_mtp"] = OWN["verl"]
OWN["areal_files"] = OWN["areal"]
OWN["nemo_rl_zmq"] = OWN["nemo_rl"]
OWN["nemo_rl_deltas"] = replace(
    OWN["nemo_rl"],
    empty=(*OWN["nemo_rl"].empty, "nemo_rl.models.generation.vllm.config"),
)
"""With its sparse deltas, which need a class of that file for its name alone."""
OWN["roll_buckets"] = OWN["roll"]
OWN["swift_nccl"] = replace(
    OWN["swift"],
    executed=("swift.utils",),
    empty=(
        *("aiohttp", "datasets", "peft", "swift.arguments", "swift.infer_engine"),
        *("swift.rollout", "swift.pipelines.base", "swift.rl_core", "swift.template"),
        *("swift.tuners", "modelscope"),
        *(f"swift.utils.{each}" for each in ("logger", "np_utils", "utils")),
        "swift.utils.transformers_utils",
    ),
)
"""What `update_flattened_params` needs more than `update_weights_from_ipc`."""
OWN["swift_flattened"] = OWN["swift_nccl"]
OWN["verl_server"] = replace(
    OWN["verl"],
    executed=(*OWN["verl"].executed, "verl.utils.tokenizer"),
    empty=(
        *("ray", "omegaconf", "orjson", "tensordict", "verl.workers.config"),
        *("verl.single_controller", "verl.utils.kernel", "verl.utils.profiler"),
        *("verl.utils.config", "verl.utils.vllm.vllm_quant_utils"),
        *(f"verl.utils.vllm.{each}" for each in _UNUSED_OF_VERL),
    ),
)
"""verl's server of a replica, which answers requests."""
