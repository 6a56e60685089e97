"""The second set of weights: a module tree of the same model beside the live one.

It is built at start-up exactly as upstream builds the live model, with the same
shards and the same loaders, but nothing ever runs through it. A transport
loads into it as if it were the live model. At a commit the two trees exchange
what they hold (see worker/shadow/flip.py), so the tree that is not served is the next
stage and, until that begins, the way back.

On a GPU its parameters are twins of the live ones (see parameters.py): in the second
range of the arena, or where there is none, in memory that a commit copies from.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import ArenaTorn, ConfigError
from vllm.inflight.tensor_names import Known
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.host_threads import num_threads
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.memory.placement import placement_of
from vllm.inflight.worker.model import layerwise_reload, mla, moe, quantized, support
from vllm.inflight.worker.model.classifier import Classifier, loader_of, tensor_names
from vllm.inflight.worker.model.drafter import (
    ModelWithDrafter,
    drafter_of,
    has_mtp,
    trees,
)
from vllm.inflight.worker.model.layers import layers
from vllm.inflight.worker.replay_check import ReplayCheck
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.shadow import parameters
from vllm.inflight.worker.shadow.build import build_second
from vllm.inflight.worker.verify import gpu_digest
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.parameter_map import ParameterMap
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint

logger = upstream.init_logger(__name__)


class ShadowModel:
    """A second module tree of one worker's model.

    Attributes:
        module: the tree; load into it, never run it.
        reason: why this model cannot be updated in flight; None if it can.
        num_threads: that look into what arrives on the host.
        is_alone: whether no other rank has a part of the model.
        required: parameter name → shape, in load format, that an update must fill.

    """

    def __init__(
        self, live: torch.nn.Module, vllm_config: Any, device: torch.device
    ) -> None:
        self.live = live
        self.device = device
        self.model_config = vllm_config.model_config
        self.spares = IgnoredTensors()
        self.classifier: Classifier | None = None
        """Of what tensor the score of a model that classifies is made, if it is."""
        self.origin = StartCheckpoint({})
        self.num_threads = 1
        self.is_alone = False
        self._is_stage = False
        self._has_some = False
        """Whether other ranks have tensors that this one has nothing of."""
        self.module: torch.nn.Module | None = None
        self.quantised: set[str] = set()
        """Parameters of quantised layers, in load format."""
        self.arenas: tuple[Arena, ...] = ()
        """Where both trees' parameters lie, if their pages can be exchanged."""
        self.busy: torch.Event | None = None
        """Set while a commit may still be reading this tree."""
        self.plan = Plan(is_replayed=device.type != "cpu")
        """What loaders do; replayed where the parameters stay where they are."""
        self.tables: gpu_digest.Tables = {}
        self.views: dict[str, torch.Tensor] = {}
        """Of the samples of tensors that are received in place."""
        self.required: dict[str, torch.Size] = {}
        self.behind: set[str] = set()
        """Parameters in which the two sets may differ, under the names of `required`.

        A flip changes nothing about that; a copy of one set over the other ends it.
        """
        self.dtypes: dict[str, str] = {}
        """Of the same parameters, as they are served."""
        self._processed = False
        try:
            self.reason = self._build(vllm_config)
        except (ConfigError, ArenaTorn):
            raise  # a knob that is no knob; weights of no version
        except Exception as error:
            # Upstream's own code has failed, somewhere in a model that it can run. The
            # engine serves without updates, as it would without this package.
            logger.exception("no second copy of the model was built")
            self.reason = (
                "a second copy of the model could not be built: "
                f"{type(error).__name__}: {error}"
            )
        if self.reason is not None:
            self.module, self.arenas = None, ()
            self.plan.forget()
            self.required.clear()
            return
        if device.type == "cpu":
            self.behind.update(self.required)  # twins begin as copies, this does not

    def _build(self, vllm_config: Any) -> str | None:
        """Build the second tree; why it cannot be, if it cannot."""
        live, parallel = self.live, vllm_config.parallel_config
        for tree in trees(live):
            if (reason := support.support_obstacle(tree, vllm_config)) is not None:
                return reason
        self.classifier = Classifier.of(live, self.model_config)
        self.spares = IgnoredTensors.of(live, self.model_config, self.classifier)
        self.origin = StartCheckpoint.of(vllm_config)
        self._is_stage = parallel.pipeline_parallel_size > 1
        self._has_some = self._is_stage or moe.are_shared_out(live)
        self.num_threads = num_threads(self.device, parallel)
        self.is_alone = parallel.world_size == 1 and not self._has_some
        # On a GPU there is memory for the twins, and for nothing beside them.
        is_cpu = self.device.type == "cpu"
        # The map of which experts are whose is read while a model is built.
        nowhere = "cpu" if moe.are_shared_out(live) else "meta"
        at = self.device if is_cpu else torch.device(nowhere)
        self.module = build_second(live, vllm_config, at)
        # Upstream's loader may have changed the live tree since it was built. Whatever
        # walks the two side by side comes after this.
        if (reason := support.names_differ(live, self.module)) is not None:
            return reason
        mla.make_places(live, self.module)
        if (reason := support.difference(live, self.module)) is not None:
            return reason
        self._note_parameters()
        return None if is_cpu else self._settle_in(vllm_config)

    def _note_parameters(self) -> None:
        """Write down what there is to fill, as long as it is in load format."""
        assert self.module is not None
        # Tied parameters appear once here, under their first name.
        for name, param in self.module.named_parameters():
            path, _, key = name.rpartition(".")
            layer = self.module.get_submodule(path)
            if quantized.has_cache_scales(layer) or mla.is_derived(layer, key):
                continue
            self.required[name] = param.shape
            self.dtypes[name] = str(param.dtype).removeprefix("torch.")
            if quantized.is_quantised(layer):
                self.quantised.add(name)

    def _settle_in(self, vllm_config: Any) -> str | None:
        """Give the second tree its memory on a GPU; why it has none, if it has none."""
        assert self.module is not None
        gpu_digest.warm(self.device, {p.dtype for p in self.module.parameters()})
        for layer in self.module.modules():
            upstream.get_layerwise_info(layer).restore_device = self.device
        residences = [placement_of(tree) for tree in trees(self.live)]
        reason = next(filter(None, (home.reason for home in residences)), None)
        if reason is None:
            self.arenas = tuple(home.arena for home in residences if home.arena)
        if self.arenas:
            parameters.mirror_parameters(self.live, self.module, self._twin)
        elif InflightConfig.of(vllm_config).staging == "host":
            parameters.mirror_parameters(self.live, self.module, parameters.make_pinned)
        elif InflightConfig.of(vllm_config).staging == "device":
            return reason  # there it is pages or nothing
        else:
            try:
                parameters.mirror_parameters(
                    self.live, self.module, parameters.make_copy
                )
            except torch.OutOfMemoryError:
                return reason
        return None

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in the second range of its arena."""
        homes = [arena for arena in self.arenas if arena.contains(tensor)]
        return (homes or self.arenas)[0].twin(tensor)

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter is staged and flipped with the model."""
        return isinstance(self.live, ModelWithDrafter)

    @property
    def is_reversible(self) -> bool:
        """Whether a commit leaves the set served before in this tree."""
        return self.device.type == "cpu" or bool(self.arenas)

    @property
    def copied_bytes(self) -> int:
        """Device memory of the twins that is torch's, not the arena's."""
        if self.module is None or self.device.type == "cpu" or self.arenas:
            return 0
        own = self.module.parameters()
        return sum(twin.nbytes for twin in own if twin.device == self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters of one set."""
        if self.module is None:
            return 0
        return sum(
            shape.numel() * getattr(torch, self.dtypes[name]).itemsize
            for name, shape in self.required.items()
        )

    def place(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Destination | None:
        """Where a transport of this device may receive a tensor; see `Plan.place`."""
        home = self.plan.place(name, shape, dtype)
        if home is None or home.tensor.device != self.device:
            return None
        return home

    @functools.cached_property
    def known_names(self) -> Known:
        """Checkpoint names this rank's model is made of, with shape and dtype.

        The shape of a shard of a fused or split parameter is not known here.
        """
        assert self.module is not None
        known: dict[str, tuple[list[int] | None, str | None]] = {}
        for param, shape in self.required.items():
            names = tensor_names(self.module, param, self.classifier)
            for name in names:
                whole = list(shape) if len(names) == 1 else None
                known[name] = (whole, self.dtypes[param])
        return known

    @functools.cached_property
    def places(self) -> ParameterMap:
        """Which parameters the tensors of a checkpoint fill, by their names."""
        assert self.module is not None
        return ParameterMap.of(self.module, self.required, self.origin, self.classifier)

    @property
    def asks_loader(self) -> bool:
        """Whether the model's loader alone can tell what a name is.

        It may map names before it looks them up, and it passes over the layers of
        other pipeline stages. Drafters of one kind are saved under many names, and a
        model that sees is made of models with loaders of their own.
        """
        maps_names = getattr(self.module, "hf_to_vllm_mapper", None) is not None
        maps_names |= getattr(self.module, "supports_multimodal", False)
        return maps_names or self._is_stage or self.has_drafter

    @property
    def has_all(self) -> bool:
        """Whether what fills nothing on this rank fills nothing on any."""
        return not self._has_some

    def may_idle(self, name: str) -> bool:
        """Whether a tensor that fills nothing may come: a start passed it over, too."""
        return name in self.origin and not self._has_some

    def prepare(self) -> None:
        """Make the tree fit to be loaded into; what it held is gone after that.

        On the CPU it gets its kernel format here, once: left undone until then, its
        memory is reserved but never touched. On a GPU the second range, which after
        a flip still shows what is served now, goes back to the other set.
        """
        self._drop_added()
        if self.arenas:
            self.pair()
            for arena in self.arenas:
                arena.settle()
        elif self.busy is not None:
            self.busy.synchronize()
            self.busy = None
        elif self.device.type == "cpu":
            assert self.module is not None
            if not self._processed:
                parameters.mirror_processed(
                    self.live, self.module, parameters.make_copy
                )
                with torch.no_grad(), quantized.put_aside(self.module):
                    for param in self.module.parameters():
                        param.zero_()
                    # Zeros are alike, and a head like its embedding would be tied.
                    config = copy.copy(self.model_config)
                    config.word_embeddings_untied_by_checkpoint = False
                    upstream.process_weights_after_loading(
                        self.module, config, self.device
                    )
                self._processed = True
            moe.forget_kernels(self.module)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Have the model's own loader write tensors into this tree.

        Its class's: while an update is received, the instance's is the intake's.
        """
        assert self.module is not None
        return loader_of(self.module, self.classifier)(self.module, weights)

    def prove(self, between: Callable[[int], None]) -> None:
        """Prove what is recorded of the loaders and is not proved yet.

        It writes into this tree; what `between` raises ends it. See replay_check.py.
        """
        if self.module is None or not self.plan.is_replayed:
            return
        params = dict(self.module.named_parameters())
        proof = ReplayCheck(self.plan, params, self.load, between)
        self.behind.update(proof.begun())
        proof.run()

    def pair(self) -> None:
        """Give the second range memory again, after a sleep; a copy of the live set.

        Raises:
            OutOfDeviceMemory: there is too little, and by how much.

        """
        for arena in self.arenas:
            if arena.phase != "paired":
                arena.pair()
                # Equal by now; but upstream may fill the live set where it lies.
                self.behind.update(self.required)

    def release_idle(self) -> None:
        """Take the layers that nothing was loaded into out of a load, as they were.

        Upstream's end of a reload would warn of each, and finish some of them.
        """
        assert self.module is not None
        layerwise_reload.release(self.module, lambda info: not info.load_numel)

    def reset(self) -> None:
        """Leave a load that did not end, so that the next one starts clean."""
        assert self.module is not None
        layerwise_reload.leave(self.module)

    def _drop_added(self) -> None:
        """Take out parameters that a loader has added in an update that was refused.

        Upstream's loader of classifiers makes one of a bias that comes. The live tree
        has none, so the two trees would not be alike any more.
        """
        assert self.module is not None
        of_live = (layer for _, layer in layers(self.live))
        of_second = (layer for _, layer in layers(self.module))
        for a, b in zip(of_live, of_second, strict=True):
            for key, param in a._parameters.items():
                if param is None:
                    b._parameters[key] = None


def shadow_of(worker: Any, live: torch.nn.Module) -> ShadowModel:
    """The shadow of the model `live` of a worker and of its drafter.

    It is built at the first call and kept by the worker, so it ends with its worker. A
    shadow refers to its model: a table of all shadows in this module would keep every
    model of the process alive, also in a dictionary with weak keys.
    """
    kept: ShadowModel | None = getattr(worker, "_inflight_shadow", None)
    if kept is None or trees(kept.live)[0] is not live:
        config, draft = worker.vllm_config, drafter_of(worker)
        root = (
            live
            if draft is None
            else ModelWithDrafter(live, draft, is_mtp=has_mtp(config))
        )
        kept = worker._inflight_shadow = ShadowModel(root, config, worker.device)
    return kept
