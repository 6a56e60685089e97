"""A model in an arena, its second set, and updates of it: a GPU's code on the host.

Intake, plan, twins, the remainder and the flip of pages are the code that runs on a
GPU; only the memory is the host's.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA

from vllm.inflight.update import Manifest
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.shadow.carry_over import copy_unsent
from vllm.inflight.worker.shadow.parameters import make_copy, mirror_parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.destination_table import fill_table
from vllm.inflight.worker.staging.loader import UpdateLoader
from vllm.inflight.worker.staging.worker import StagingWorker
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.parameter_map import ParameterMap
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint

HIDDEN, VOCABULARY, PADDED = 16, 10, 12
SHARDS = {"q": 0, "k": 1, "v": 2}


class Model(torch.nn.Module):
    """Fused and padded parameters, a tied head, and loaders as upstream's."""

    def __init__(self, empty) -> None:
        super().__init__()
        self.num_loads = 0
        self.embed, self.attention, self.head = (torch.nn.Module() for _ in range(3))
        weight = torch.nn.Parameter(empty((PADDED, HIDDEN)), requires_grad=False)
        weight.weight_loader = self._load_embedding
        self.embed.weight = self.head.weight = weight
        fused = torch.nn.Parameter(empty((3 * HIDDEN, HIDDEN)), requires_grad=False)
        fused.weight_loader = self._load_shard
        self.attention.qkv = fused
        self.norm = torch.nn.Parameter(empty((HIDDEN,)), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.num_loads += 1
            if name.startswith("attention."):
                param = self.attention.qkv
                param.weight_loader(param, tensor, SHARDS[name[-1]])
            elif name == "embed.weight":
                param = self.embed.weight
                param.weight_loader(param, tensor)
            elif name == "norm":
                getattr(self.norm, "weight_loader", _load_whole)(self.norm, tensor)

    @staticmethod
    def _load_embedding(param, tensor):
        param.data[:VOCABULARY].copy_(tensor)
        param.data[VOCABULARY:].fill_(0)

    @staticmethod
    def _load_shard(param, tensor, shard):
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(tensor)


def _load_whole(param, tensor):
    param.data.copy_(tensor)


def version(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    shapes |= {f"attention.{shard}": (HIDDEN, HIDDEN) for shard in SHARDS}
    return {n: torch.randn(s, generator=random) for n, s in shapes.items()}


def shows(model: Model, named: dict[str, torch.Tensor]) -> bool:
    fused = torch.cat([named[f"attention.{shard}"] for shard in SHARDS])
    return (
        torch.equal(model.embed.weight[:VOCABULARY], named["embed.weight"])
        and not model.embed.weight[VOCABULARY:].any()
        and torch.equal(model.attention.qkv, fused)
        and torch.equal(model.norm, named["norm"])
    )


class Wrapper(BaseLayerWithLoRA):
    """What LoRA puts around a layer: the layer, and stacks of adapters beside it."""

    def __init__(self, base_layer) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = torch.ones(4)


class InPlace:
    """A transport that writes where it is told to, where it is told.

    Args:
        named: what it brings.
        num_good: tensors after which it breaks; all have been received by then.

    """

    def __init__(
        self, named: dict[str, torch.Tensor], num_good: int | None = None
    ) -> None:
        self._named = dict(named)
        self._num_good = num_good
        self.placed: set[str] = set()

    def into(self, place) -> None:
        for name, tensor in self._named.items():
            if (home := place(name, tuple(tensor.shape), tensor.dtype)) is not None:
                home.tensor.copy_(tensor)
                self._named[name] = home.tensor
                self.placed.add(name)

    def __iter__(self):
        for number, pair in enumerate(self._named.items()):
            if number == self._num_good:
                raise ConnectionError("the wire broke")
            yield pair


class Batches(InPlace):
    """As our own transports hand them over."""

    def batches(self):
        yield [
            (name, tensor if name in self.placed else tensor.view_as(tensor))
            for name, tensor in self._named.items()
        ]


def shadow_of(live: torch.nn.Module, second: torch.nn.Module) -> Any:
    """What an update asks of a `ShadowModel`, for two trees of the host's."""
    made = SimpleNamespace(
        live=live,
        module=second,
        log=None,
        device=torch.device("cpu"),
        required={n: p.shape for n, p in second.named_parameters()},
        known_names={},
        asks_loader=True,
        classifier=None,
        ignored=IgnoredTensors(),
        start_checkpoint=StartCheckpoint({}),
        may_idle=lambda name: False,
        has_all=True,
        dtypes={},
        places=ParameterMap.of(
            second, dict(second.named_parameters()), StartCheckpoint({})
        ),
        is_alone=True,
        is_whole_over_ranks=False,
        tp_size=1,
        num_threads=1,
        is_reversible=True,
        plan=(plan := Plan()),
        place=plan.place,
        load=lambda weights: type(second).load_weights(second, weights),
        stale=set(),
        changed=[],
        quantised=set(),
        kept=Plan(is_replayed=False),
        unkept={},
        computed={},
        tables={},
        views={},
    )
    made.nbytes = 4 * 16 * sum(p.nbytes for p in second.parameters())
    made.spare_bytes = lambda: math.inf
    made.learn = partial(ShadowModel.learn, made)
    made.note_changed = partial(ShadowModel.note_changed, made)
    made.computed_with = partial(ShadowModel.computed_with, made)
    made.forget_changed = partial(ShadowModel.forget_changed, made)
    return made


def start_checkpoint(named: dict[str, torch.Tensor]) -> StartCheckpoint:
    """What an engine that was started from these tensors knows of them."""
    return StartCheckpoint(
        {name: tuple(tensor.shape) for name, tensor in named.items()},
        {n: str(t.dtype).removeprefix("torch.") for n, t in named.items()},
    )


class HostStagingWorker(StagingWorker):
    """A staging worker whose flip is one of memory on the host."""

    def __init__(
        self, worker: Any, shadow: ShadowModel, flip: Callable[[], float]
    ) -> None:
        super().__init__(worker, shadow)
        self._host_flip = flip

    def make_flip(self) -> Callable[[], float]:
        return self._host_flip


class Sets:
    """A model in an arena, its second set, and updates of it.

    Args:
        arena: where they lie.
        is_reversible: whether pages are exchanged; else one set is copied over the
            other, as with a second set in the host's memory.
        wrapped: whether adapters may be loaded beside the layers.
        kind: makes a model, given what makes its memory.
        first: the version that the engine starts with.
        traced: whether the start checkpoint is known, so that loads are recorded when
            the engine starts.

    """

    def __init__(
        self,
        arena: Arena,
        *,
        is_reversible: bool = True,
        wrapped: bool = False,
        kind: Callable[[Any], torch.nn.Module] = Model,
        first: dict[str, torch.Tensor] | None = None,
        traced: bool = False,
    ) -> None:
        self.arena = arena
        first = version(0) if first is None else first
        self.live = kind(arena.empty)
        self.live.load_weights(first.items())
        arena.consolidate()
        arena.pair()
        if wrapped:
            for name in ("embed", "attention", "head"):
                setattr(self.live, name, Wrapper(getattr(self.live, name)))
        with torch.device("meta"):
            self.second = kind(torch.empty)
        mirror_parameters(
            self.live, self.second, arena.shadow_tensor if is_reversible else make_copy
        )
        self.shadow = shadow_of(self.live, self.second)
        self.shadow.is_reversible = is_reversible
        self.shadow.asks_loader = False
        self.shadow.known_names = {
            n: (list(t.shape), str(t.dtype).removeprefix("torch."))
            for n, t in first.items()
        }
        if traced:
            self.shadow.start_checkpoint = start_checkpoint(first)
            assert fill_table(self.shadow) is None
        worker: Any = SimpleNamespace(
            device=self.shadow.device,
            synchronize_device=lambda: None,
            vllm_config=SimpleNamespace(additional_config={}),
            weight_transfer_engine=None,
        )
        flip = arena.flip if is_reversible else self._copy
        self.stager = HostStagingWorker(worker, self.shadow, flip)

    def stage(
        self,
        weights: Any,
        subset: Sequence[str] = (),
        manifest: Manifest | None = None,
    ) -> int:
        """Fill the second set; returns how many parameters were carried over."""
        if manifest is None:
            manifest = Manifest(subset=tuple(subset))
        self.stager.open()
        if self.shadow.is_reversible:
            self.arena.settle()
        intake = self.intake = UpdateLoader(
            self.shadow,
            manifest,
            verify=True,
            allow_nonfinite=False,
            cancelled=lambda: False,
            progress=lambda num_bytes, num_tensors: None,
            served=self.stager.served,
            between=self.between,
        )
        if manifest.base is None:
            ShadowModel.forget_changed(self.shadow)
        ShadowModel.prove(self.shadow, self.between)
        intake.coverage.watch(intake.load_weights)
        try:
            self.second.load_weights(weights)
            intake.complete()
            sent = intake.verdict()
            with torch.no_grad():
                written = intake.coverage.begun | intake.written
                carried = copy_unsent(self.shadow, written, self.between)
        finally:
            intake.coverage.unwatch()
        is_partial = manifest.is_partial
        self.stager.staged(sent.over(self.stager.served) if is_partial else sent)
        return carried

    def _copy(self) -> float:
        pairs = zip(self.live.parameters(), self.second.parameters(), strict=True)
        for param, twin in pairs:
            param.data.copy_(twin)
        return 0.0

    between: Callable[[int], None] = staticmethod(lambda num_bytes: None)
