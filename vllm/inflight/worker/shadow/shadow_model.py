"""The shadow model: a second module tree of the same model, which holds the shadow
weights.

It is built at start-up exactly as upstream builds the live model, with the same shards
and the same loaders, but no step ever runs through it. A transport loads into it as if
it were the live model. At a commit, the two models exchange their weights (see
flip.py).
The shadow model then holds the rollback target, until the next update writes.

On a GPU its parameters are shadow parameters (see parameters.py). They lie in the
shadow range of the arena. Without an arena they lie in memory that a commit copies
from.

With delta staging the parameters of this tree have no memory: they are on `meta`, but
for biases of quantised layers. The tree tells what the loaders would do with a tensor,
and a log takes the elements that an update changes (change_log.py).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import ArenaTorn, ConfigError, OutOfDeviceMemory
from vllm.inflight.ops import gpu_digest
from vllm.inflight.tensor_names import Known
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.host_threads import num_threads
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.memory.placement import placement_of
from vllm.inflight.worker.model import layerwise_reload, support
from vllm.inflight.worker.model.kinds import mla, moe, quantized
from vllm.inflight.worker.model.kinds.classifier import (
    Classifier,
    loader_of,
    tensor_names,
)
from vllm.inflight.worker.model.kinds.drafter import (
    ModelWithDrafter,
    drafter_of,
    has_mtp,
    trees,
)
from vllm.inflight.worker.model.layers import layers
from vllm.inflight.worker.model.one_set import one_set_obstacle
from vllm.inflight.worker.replay_check import MARGIN_BYTES, ReplayCheck, free_bytes
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.shadow import parameters
from vllm.inflight.worker.shadow.build import build_second
from vllm.inflight.worker.shadow.change_log import (
    ChangeLog,
    capacity_of,
    host_capacity_of,
)
from vllm.inflight.worker.shadow.changed_elements import ChangedElements
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.parameter_map import ParameterMap
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint
from vllm.inflight.worker.worker_state import WorkerState

LOG_SHARE = 16
"""The log of changed elements takes at most this part of the weights' bytes."""

logger = upstream.init_logger(__name__)


class ShadowModel:
    """The shadow model of one worker's model.

    Attributes:
        module: the module tree; it is loaded into, and never run.
        reason: why this model cannot be updated; None if it can.
        num_threads: threads that check tensors on the host.
        is_alone: whether no other rank has a part of the model.
        is_whole_over_ranks: whether the ranks of this engine have all parts together.
            Experts may be shared out over several engines.
        tp_size: ranks that a tensor is cut over.
        required: parameter name → shape, in load format, that an update must fill.

    """

    def __init__(
        self,
        live: torch.nn.Module,
        vllm_config: upstream.VllmConfig,
        device: torch.device,
    ) -> None:
        self.live = live
        self.device = device
        self.model_config = vllm_config.model_config
        self.ignored = IgnoredTensors()
        self.classifier: Classifier | None = None
        """How the score of a classifier is computed; None if it is not computed."""
        self.start_checkpoint = StartCheckpoint({})
        self.num_threads = 1
        self.is_alone = False
        self.is_whole_over_ranks = False
        self.tp_size = 1
        self._is_stage = False
        self._has_some = False
        """Whether other ranks have tensors that this rank uses no part of."""
        self.module: torch.nn.Module | None = None
        self.quantised: set[str] = set()
        """Parameters of quantised layers, in load format."""
        self.arenas: tuple[Arena, ...] = ()
        """The arenas that hold live and shadow weights, if there are any."""
        self.busy: torch.Event | None = None
        """Set while a commit may still be copying from this model."""
        self._config = InflightConfig.of(vllm_config)
        self.plan = Plan(is_replayed=device.type != "cpu")
        """The record of what loaders do; replayed where parameters stay in place."""
        self.kept = Plan(is_replayed=False)
        """Where quantised layers serve their tensors as the checkpoint has them; see
        kept_table.py."""
        self.unkept: dict[str, str] = {}
        """Quantised layer → why its tensors are not in `kept`."""
        self.computed: dict[str, frozenset[str]] = {}
        """Tensor → the parameters that a loader computes of it; see scratch.py."""
        self.log: ChangeLog | None = None
        """What an update changes, with delta staging; there are no shadow parameters
        then."""
        self.take_processed: Callable[[str, torch.Tensor], None] | None = None
        """With delta staging: called with each parameter of a quantised layer that an
        update has loaded, and with what processing has made of it."""
        self.tables: gpu_digest.Tables = {}
        self.views: dict[str, torch.Tensor] = {}
        """Checkpoint name → the view that samples a tensor received in place."""
        self.required: dict[str, torch.Size] = {}
        self.stale: set[str] = set()
        """Parameters in which live and shadow weights may differ, named as in
        `required`.

        A flip does not change this set; a copy of one set over the other empties it.
        """
        self.changed: list[ChangedElements] = []
        """Elements of parameters that are not stale, in which both may differ. A flip
        does not change them, either."""
        self.dtypes: dict[str, str] = {}
        """Parameter name → the dtype in which it is served."""
        self._processed = False
        try:
            self.reason = self._build(vllm_config)
        except (ConfigError, ArenaTorn):
            raise  # a flag with an invalid value; weights of no version
        except Exception as error:
            # Upstream's own code has failed, somewhere in a model that it can run. The
            # engine serves without updates, as it would without this package.
            logger.exception("the shadow model was not built")
            self.reason = (
                f"the shadow model could not be built: {type(error).__name__}: {error}"
            )
        if self.reason is not None:
            self.give_up(self.reason)
            return
        if device.type == "cpu" and self.log is None:
            self.stale.update(self.required)  # no copy of the live weights yet

    def give_up(self, reason: str) -> None:
        """Hold no shadow weights and no log, because of `reason`."""
        self.reason = reason
        self.module, self.arenas, self.log = None, (), None
        self.plan.forget()
        self.required.clear()

    def _build(self, vllm_config: upstream.VllmConfig) -> str | None:
        """Build the module tree; returns the reason if that is impossible."""
        live, parallel = self.live, vllm_config.parallel_config
        for tree in trees(live):
            if (reason := support.support_obstacle(tree, vllm_config)) is not None:
                return reason
        self.classifier = Classifier.of(live, self.model_config)
        self.ignored = IgnoredTensors.of(live, self.model_config, self.classifier)
        self.start_checkpoint = StartCheckpoint.of(vllm_config)
        self._is_stage = parallel.pipeline_parallel_size > 1
        self._has_some = self._is_stage or moe.are_shared_out(live)
        self.num_threads = num_threads(self.device, parallel)
        self.is_alone = parallel.world_size == 1 and not self._has_some
        self.is_whole_over_ranks = parallel.world_size > 1 and (
            parallel.data_parallel_size == 1 or not moe.are_shared_out(live)
        )
        self.tp_size = parallel.tensor_parallel_size
        is_wanted, lack = self._config.staging == "delta", self._lack_of_room()
        is_logged = is_wanted or lack is not None
        if is_logged and (reason := one_set_obstacle(live, vllm_config)) is not None:
            if is_wanted:
                return reason
            is_logged = False
        if is_logged and not is_wanted:
            logger.warning("one set of weights, and a log of what changes: %s", lack)
        # On a GPU there is memory for the shadow parameters, and for no others.
        is_cpu = self.device.type == "cpu" and not is_logged
        # The map from ranks to experts is read while a model is built.
        nowhere = "cpu" if moe.are_shared_out(live) else "meta"
        at = self.device if is_cpu else torch.device(nowhere)
        self.module = build_second(live, vllm_config, at)
        # Upstream's loader may have changed the live model after it was built. Code
        # that walks both trees side by side comes after this check.
        if (reason := support.names_differ(live, self.module)) is not None:
            return reason
        mla.make_places(live, self.module)
        if (reason := support.difference(live, self.module)) is not None:
            return reason
        self._note_parameters()
        if is_logged:
            return self._open_log()
        return None if is_cpu else self._settle_in(vllm_config)

    @property
    def arriving_dtypes(self) -> set[torch.dtype]:
        """The dtypes that tensors of an update have, as far as they can be foretold.

        Trainers send what is served, or what the start checkpoint holds.
        """
        assert self.module is not None
        served = {param.dtype for param in self.module.parameters()}
        return served | self.start_checkpoint.dtypes

    @property
    def served_dtype(self) -> str | None:
        """The dtype of all floating-point tensors that are served, if there is one.

        None where a layer is quantised, a loader computes, or some tensors are served
        in another dtype than others. Then a trainer could lose bits by a cast.
        """
        if self.module is None or self.quantised or self.computed:
            return None
        found = set(self.dtypes.values())
        for name, tensor in self.live.state_dict().items():
            # No checkpoint has the scales of the KV cache, which begin with this.
            is_loaded = not name.rpartition(".")[2].startswith("_")
            if is_loaded and name not in self.dtypes and tensor.is_floating_point():
                found.add(str(tensor.dtype).removeprefix("torch."))
        if len(found) != 1:
            return None
        (dtype,) = found
        return dtype if getattr(torch, dtype).is_floating_point else None

    def _lack_of_room(self) -> str | None:
        """Why `auto` stages into a log; None if it need not.

        It is so where two sets of weights do not fit the GPU.
        """
        homes = [placement_of(tree) for tree in trees(self.live)]
        is_short = any(home.is_short for home in homes)
        reasons = [home.reason for home in homes if home.reason is not None]
        return reasons[0] if is_short and self._config.staging == "auto" else None

    def _open_log(self) -> str | None:
        """Allocate the log of delta staging; returns the reason if there is none."""
        assert self.module is not None
        for layer in self.module.modules():
            upstream.get_layerwise_info(layer).restore_device = self.device
        parameters.make_hollow(self.live, self.module, self.device)
        if (reason := support.layouts_differ(self.live, self.module)) is not None:
            return reason
        quantized.watch(self.live, self.module, self._processed_one)
        if self.device.type == "cuda":
            gpu_digest.warm(self.device, self.arriving_dtypes)
        self.plan = Plan(is_replayed=False)
        capacity = capacity_of(self._config.delta_gib, self.nbytes)
        on_host = host_capacity_of(self._config.delta_host_gib, self.nbytes)
        try:
            self.log = ChangeLog(self.device, capacity, on_host)
        except OutOfDeviceMemory as error:
            return str(error)
        return None

    def _processed_one(self, param: str, content: torch.Tensor) -> None:
        """Upstream has processed a parameter of a quantised layer."""
        if self.take_processed is not None:
            self.take_processed(param, content)

    def _note_parameters(self) -> None:
        """Record the parameters to fill, while they are in load format."""
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

    def _settle_in(self, vllm_config: upstream.VllmConfig) -> str | None:
        """Give the tree its memory on a GPU; returns the reason if there is none."""
        assert self.module is not None
        gpu_digest.warm(self.device, self.arriving_dtypes)
        for layer in self.module.modules():
            upstream.get_layerwise_info(layer).restore_device = self.device
        placements = [placement_of(tree) for tree in trees(self.live)]
        reason = next(filter(None, (home.reason for home in placements)), None)
        if reason is None:
            self.arenas = tuple(home.arena for home in placements if home.arena)
        if self.arenas:
            parameters.mirror_parameters(self.live, self.module, self._in_shadow_range)
        elif InflightConfig.of(vllm_config).staging == "host":
            parameters.mirror_parameters(self.live, self.module, parameters.make_pinned)
        elif InflightConfig.of(vllm_config).staging == "device":
            return reason  # `device` allows no other memory
        else:
            try:
                parameters.mirror_parameters(
                    self.live, self.module, parameters.make_copy
                )
            except torch.OutOfMemoryError:
                return reason
        return None

    def _in_shadow_range(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in the shadow range of its arena."""
        homes = [arena for arena in self.arenas if arena.contains(tensor)]
        return (homes or self.arenas)[0].shadow_tensor(tensor)

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter is staged and flipped with the model."""
        return isinstance(self.live, ModelWithDrafter)

    @property
    def is_reversible(self) -> bool:
        """Whether a commit leaves the version before in this model."""
        has_both = self.device.type == "cpu" or bool(self.arenas)
        return has_both or self.log is not None

    @property
    def is_remade(self) -> bool:
        """Whether a load makes layers anew, which keep what they get until then."""
        return self.device.type == "cpu" or bool(self.quantised)

    @property
    def copied_bytes(self) -> int:
        """Device bytes of shadow parameters, or of the log, in torch's own memory."""
        if self.module is None or self.device.type == "cpu" or self.arenas:
            return 0
        if self.log is not None:
            return self.log.allocated_bytes
        own = self.module.parameters()
        return sum(param.nbytes for param in own if param.device == self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters of one model."""
        return 0 if self.module is None else self._num_bytes

    @functools.cached_property
    def _num_bytes(self) -> int:
        return sum(
            shape.numel() * getattr(torch, self.dtypes[name]).itemsize
            for name, shape in self.required.items()
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of the shadow weights, or of the log that is in their place."""
        return self.nbytes if self.log is None else self.log.capacity

    @property
    def num_unproved(self) -> int:
        """Tensors whose places the next update proves before it writes."""
        is_used = self.plan.is_replayed or self.log is not None
        return self.plan.num_unproved if is_used else 0

    @property
    def host_bytes(self) -> int:
        """Most bytes of host memory that the log goes on in."""
        return 0 if self.log is None else self.log.host_capacity

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
        """The checkpoint names of this rank's parameters, with shape and dtype.

        The shape is None for a parameter that is fused or cut over ranks.
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
        """Which parameters the tensors of a checkpoint fill, by name."""
        assert self.module is not None
        return ParameterMap.of(
            self.module, self.required, self.start_checkpoint, self.classifier
        )

    @property
    def asks_loader(self) -> bool:
        """Whether only the model's loader can tell if it takes a name.

        A loader may map names before it looks them up, and it skips the layers of other
        pipeline stages. Drafters of one kind are saved under many names. A multimodal
        model consists of models that have loaders of their own.
        """
        maps_names = getattr(self.module, "hf_to_vllm_mapper", None) is not None
        maps_names |= getattr(self.module, "supports_multimodal", False)
        return maps_names or self._is_stage or self.has_drafter

    @property
    def has_all(self) -> bool:
        """Whether a tensor that is unused on this rank is unused on every rank."""
        return not self._has_some

    def may_idle(self, name: str) -> bool:
        """Whether a tensor may fill nothing, because it filled nothing at the start.

        Where ranks have layers or experts of their own, it has to be known that this
        rank's loader passes over it. If all ranks know that, nobody serves it.
        """
        is_known = self.has_all or self.plan.passes_over(name)
        return is_known and name in self.start_checkpoint

    def prepare(self) -> None:
        """Make the tree ready for an update; its content is lost.

        On the CPU the tree gets its kernel format here, once. Until then its memory is
        reserved but never touched. On a GPU the shadow range shows the live weights
        after a
        flip; it is set to show the shadow weights again.
        """
        self._drop_added()
        if self.log is not None:
            self.pair()
        elif self.arenas:
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
                # Before 0.32, the scales of a KV cache that is not quantised are set at
                # start alone.
                kept = set(filter(quantized.has_cache_scales, self.module.modules()))
                with torch.no_grad(), quantized.put_aside(self.module):
                    for layer in set(self.module.modules()) - kept:
                        for param in layer.parameters(recurse=False):
                            param.zero_()
                    # The head and the embedding are both zero here. Upstream would find
                    # them equal, and tie them.
                    config = copy.copy(self.model_config)
                    config.word_embeddings_untied_by_checkpoint = False
                    upstream.process_weights_after_loading(
                        self.module, config, self.device
                    )
                self._processed = True
            moe.forget_kernels(self.module)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Have the model's own loader write tensors into this tree.

        It is the loader of the class. During an update, the instance's attribute is the
        update loader.
        """
        assert self.module is not None
        return loader_of(self.module, self.classifier)(self.module, weights)

    def computed_with(self, names: Iterable[str]) -> set[str]:
        """Tensors of `computed`, and those that share a parameter with one."""
        params = set().union(*(self.computed[name] for name in names))
        made_of = self.computed.items()
        return {name for name, filled in made_of if not params.isdisjoint(filled)}

    def prove(self, between: Callable[[int], None]) -> None:
        """Check the recorded loads that are not checked yet; see replay_check.py.

        The check writes into this tree; with delta staging it has memory of its own. An
        exception from `between` ends it.
        """
        if self.module is None or self.plan.is_checked:
            return
        if self.log is not None:
            self.learn(between)
        if not self.plan.is_replayed:
            return
        params = dict(self.module.named_parameters())
        check = ReplayCheck(self.plan, params, self.load, between)
        self.stale.update(check.begun())
        check.run()

    def learn(self, between: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Check the recorded loads that are not checked yet, in memory of their own.

        The parameters of the tree are on `meta`. What the device has no room for is
        checked on the host; with two sets of weights, by the next update. For `between`
        see `ReplayCheck`.
        """
        module = self.module
        assert module is not None
        params = dict(module.named_parameters())
        spare = self.spare_bytes()  # each batch gives back what it takes

        def lend(
            names: set[str], num_bytes: int
        ) -> AbstractContextManager[dict[str, torch.nn.Parameter]] | None:
            sizes = sum(params[name].nbytes for name in names)
            # Loaders may make a tensor anew before they cut it.
            has_room = sizes + 2 * num_bytes + MARGIN_BYTES < spare
            if self.log is None and not has_room:
                return None
            device = self.device if has_room else torch.device("cpu")
            return parameters.lent_memory(module, names, device)

        consequence = (
            "the first update takes them through their loaders, and records them again"
            if self.log is None
            else "each update has the parameters that they fill computed in memory of "
            "their own; where that cannot be, the start is refused"
        )
        check = ReplayCheck(
            *(self.plan, params, self.load, between),
            lend=lend,
            consequence=consequence,
        )
        with torch.no_grad():
            check.run()
        self.plan.confirm()  # those without room for a check stay recorded, too

    def spare_bytes(self) -> float:
        """Bytes of the device that a check may take; the host has enough."""
        return free_bytes(self.device)

    def note_changed(self, log: ChangedElements) -> None:
        """These elements may differ from the live weights from now on.

        A log that grows too long is given up: then the parameters are copied.
        """
        if (log := log.without(self.stale)).stretches:
            self.changed.append(log)
        if sum(each.offsets.nbytes for each in self.changed) > self.nbytes // LOG_SHARE:
            self.forget_changed()

    def forget_changed(self) -> None:
        """Count parameters with changed elements as stale as a whole."""
        for log in self.changed:
            self.stale.update(log.params)
        self.changed.clear()

    def pair(self) -> None:
        """Give the shadow range memory again after a sleep, as a copy of the live
        weights; with delta staging, give it to the log.

        Raises:
            OutOfDeviceMemory: memory is missing; the error says how much.

        """
        if self.log is not None:
            self.log.allocate()
        for arena in self.arenas:
            if arena.phase != "paired":
                arena.pair()
                # Both are equal now, but upstream may fill the live weights in place.
                self.stale.update(self.required)

    def release_idle(self) -> None:
        """Take the layers that nothing was loaded into out of the load, unchanged.

        Upstream's end of a reload would warn about each, and would finish some of them.
        """
        assert self.module is not None
        if parameters.reloaded(self.module):  # most models have no layer to reload
            layerwise_reload.release(self.module, lambda info: not info.load_numel)

    def derive(self) -> None:
        """Compute again what loading computes from other parameters."""
        # With one set of weights, what is computed shows the weights where they lie.
        if self._has_latent and self.log is None:
            assert self.module is not None
            mla.derive(self.module, self.model_config.dtype)

    @functools.cached_property
    def _has_latent(self) -> bool:
        assert self.module is not None
        return any(map(mla.is_latent, self.module.modules()))

    def reset(self) -> None:
        """Leave a load that did not end, so that the next one starts clean."""
        assert self.module is not None
        # No walk over all layers: where parameters are shadow parameters, a load puts
        # the quantised layers alone aside.
        for part in parameters.reloaded(self.module):
            layerwise_reload.leave(part)

    def _drop_added(self) -> None:
        """Remove parameters that a loader added in a rejected update.

        Upstream's loader of classifiers adds a parameter when a bias arrives. The live
        model has none, so the two trees would differ.
        """
        for of_layer, key in self._absent:
            of_layer[key] = None

    @functools.cached_property
    def _absent(self) -> list[tuple[dict[str, torch.nn.Parameter | None], str]]:
        """The parameters that layers have a name for, and the live model has not."""
        assert self.module is not None
        of_live = (layer for _, layer in layers(self.live))
        of_second = (layer for _, layer in layers(self.module))
        return [
            (b._parameters, key)
            for a, b in zip(of_live, of_second, strict=True)
            for key, param in a._parameters.items()
            if param is None
        ]


def shadow_of(worker: upstream.WorkerBase, live: torch.nn.Module) -> ShadowModel:
    """The shadow model of the model `live` of a worker, and of the worker's drafter.

    It is built at the first call and kept by the worker, so it ends with its worker. A
    shadow model refers to its live model. A table of all shadow models in this module
    would keep every model of the process alive, also with weak keys.
    """
    state = WorkerState.of(worker)
    kept = state.shadow
    if not isinstance(kept, ShadowModel) or trees(kept.live)[0] is not live:
        config, draft = worker.vllm_config, drafter_of(worker)
        root = (
            live
            if draft is None
            else ModelWithDrafter(live, draft, is_mtp=has_mtp(config))
        )
        kept = state.shadow = ShadowModel(root, config, worker.device)
    return kept
