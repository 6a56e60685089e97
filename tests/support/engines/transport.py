"""A transport of somebody else, registered as vLLM documents it, that misbehaves
on demand: it knows nothing of vLLM in-flight and loads as upstream's own do.

In a process of its own a worker imports this module through
`--worker-extension-cls tests.support.engines.transport.Extension`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.support.engines.oracle import Oracle
from tests.support.waiting import until

FILE = "model.safetensors"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the trainer and the engine agree on: nothing."""

    tag: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are, and what goes wrong with them."""

    path: str
    names: list[str] | None = None
    skip: list[str] = field(default_factory=list)
    rename: dict[str, str] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    poison: str | None = None
    reshape: str | None = None
    double: str | None = None
    fail_after: int | None = None
    fail_rank: int | None = None
    fail_first: str | None = None
    sleep_s: float = 0.0
    waits_for: str | None = None
    """A file that has to be there before the last tensor comes."""
    one_by_one: bool = False


class OtherEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a safetensors file into whatever model it was given."""

    hands_whole_tensors = True

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.tag = init_info.tag

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if not update_info.one_by_one:
            self.model.load_weights(self.stream(update_info))
            return
        for pair in self.stream(update_info):
            self.model.load_weights([pair])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.tag = None

    def stream(self, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        here = info.fail_rank in (None, get_world_group().rank_in_group)
        here = here and _is_first(info.fail_first)
        tensors = load_file(Path(info.path) / FILE)
        for index, (name, tensor) in enumerate(tensors.items()):
            if info.names is not None and name not in info.names:
                continue
            if name in info.skip and here:
                continue
            if info.fail_after == index and here:
                raise RuntimeError("the wire broke")
            time.sleep(info.sleep_s)
            if info.waits_for is not None and index == len(tensors) - 1:
                until(Path(info.waits_for).exists, "it never comes", 120)
            if name == info.poison and here:
                tensor = torch.full_like(tensor, float("nan"))
            if name == info.reshape and here:
                tensor = tensor[:-1]
            if name == info.double and here:
                tensor = torch.cat([tensor, tensor])
            yield info.rename.get(name, name), tensor
        for name, like in info.extra.items():
            yield name, tensors[like]


class KeepingEngine(OtherEngine):
    """Has the function of the reload that there was when this module was imported."""

    kept = staticmethod(initialize_layerwise_reload)

    def start_weight_update(self) -> None:
        self.kept(self.model)


def _is_first(file: str | None) -> bool:
    """Whether of all engines this is the one that makes the file."""
    if file is None:
        return True
    try:
        Path(file).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Reloading:
    """A worker extension that loads as upstream's transports do.

    Attributes:
        kept: both functions of the reload, in place of those that this module has.

    """

    kept: tuple[Any, Any] | None = None

    def update_weights_from_path(self: Any, weight_path: str) -> None:
        begin, end = Reloading.kept or (
            initialize_layerwise_reload,
            finalize_layerwise_reload,
        )
        model, config = self.model_runner.model, self.model_runner.model_config
        begin(model)
        model.load_weights(iter(load_file(Path(weight_path) / FILE).items()))
        end(model, config)


class Extension(Oracle):
    """Importing this module has registered the transport."""

    def tests_probe(self) -> Any:
        return None

    def tests_make_room(self: Any) -> None:
        """What compiling does on the way: upstream's CPU build makes the buffers that
        a later pipeline stage receives into only when it warms a graph up.
        """
        self.model_runner.profile_run()


for name, kind in {"other": OtherEngine, "keeping": KeepingEngine}.items():
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, kind)
