"""Coverage: which elements of each parameter have been written by its loaders.

A fused parameter is filled by several tensors, and a sharded parameter by a part of
one. An update is complete when every element of every parameter was written, whatever
the names of the tensors were. So the writes of the parameters' loaders are watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import Conflict, WrongPhase
from vllm.inflight.tensor_names import PLAIN
from vllm.inflight.update import DRAFT, Manifest
from vllm.inflight.worker.adopted_call import (
    is_calling,
    is_of_method,
    rejected,
)
from vllm.inflight.worker.model import direct_writes, layerwise_reload
from vllm.inflight.worker.model.kinds.quantized import is_quantised
from vllm.inflight.worker.replay_plan import Entry, RecordedWrites, View, are_apart
from vllm.inflight.worker.staging.rounding import HOST, as_fresh
from vllm.inflight.worker.verify.checks import REPEATED
from vllm.inflight.yielding import with_breaks


@dataclass(slots=True)
class Fill:
    """The views of one parameter that have been written.

    Loaders write slices. Their sizes can be added up as long as no two slices overlap.
    """

    numel: int
    views: dict[View, int] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Number of elements that were never written."""
        views = [view for view, count in self.views.items() if count]
        if sum(self.views.values()) == self.numel and are_apart(views):
            return 0
        # The sizes of views that overlap (a loader that writes twice) cannot be added
        # up. Counted on the host, since a GPU that serves has no memory to spare.
        written = torch.zeros(self.numel, dtype=torch.bool, device="cpu")
        for offset, shape, stride in views:
            written.as_strided(shape, stride, offset).fill_(True)
        return self.numel - int(written.sum())


class Coverage:
    """The writes of one update into one module tree.

    Args:
        module: the tree.
        required: parameter name → shape, for every parameter to fill.
        stale: names of parameters that differ from the live weights. Every parameter is
            added here before the first write to it.
        quantised: the parameters of quantised layers.
        device: the GPU of the engine, if it has one.

    """

    def __init__(
        self,
        module: torch.nn.Module,
        required: Mapping[str, torch.Size],
        stale: set[str],
        quantised: Collection[str] = (),
        device: torch.device = HOST,
    ) -> None:
        self._module = module
        self._device = device
        self._stale = stale
        self._quantised = quantised
        self._required = required
        self.begun: set[str] = set()
        """Parameters whose loader was called, whatever it wrote, and those that a
        method of a worker extension has written itself."""
        self._written_to: set[str] = set()
        """Those of which `tally` has counted an element."""
        self.loaded: set[str] = set()
        """Those whose loader was called."""
        self.written: set[str] = set()
        """Those that a method of a worker extension has written itself."""
        self.lets_write = False
        """Whether such a method may do so, see parameter_writes.py."""
        self.refilled: set[str] = set()
        """Parameters of which an element was written by two tensors."""
        self.num_loads = 0
        self.has_strays = False
        """Whether a loader got a tensor that is no part of a sent tensor."""
        self.handed: torch.Tensor | None = None
        """The tensor that the loaders have now."""
        self.entry: Entry | None = None
        self.touched: set[str] = set()
        """Parameters whose loader was called with the current tensor."""
        self._asked: set[str] | None = None
        """While a loader is only asked: the parameters that it would fill."""
        self._is_over = False
        """Whether the load has ended. A thread may have kept a loader of it."""
        self._watching: list[tuple[Any, Any]] = []
        self._outside: list[Any] = []
        """What the module's `load_weights` was before this object replaced it."""
        self._direct: direct_writes.DirectWrites | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every parameter got something, a drafter's parameters included."""
        return self.begun >= self._required.keys()

    @functools.cached_property
    def fills(self) -> dict[str, Fill]:
        """What has been written of each parameter.

        Made when it is first needed: a delta that is written element by element goes
        past all loaders.
        """
        return {n: Fill(shape.numel()) for n, shape in self._required.items()}

    @functools.cached_property
    def _complete(self) -> set[str]:
        """Those of which `tally` has counted enough elements, or that have none."""
        return {name for name, shape in self._required.items() if not shape.numel()}

    @functools.cached_property
    def _of_drafter(self) -> frozenset[str]:
        """The drafter's parameters."""
        return frozenset(name for name in self._required if name.startswith(DRAFT))

    @functools.cached_property
    def _of_model(self) -> frozenset[str]:
        """All other parameters."""
        return frozenset(self._required) - self._of_drafter

    def tally(self, manifest: Manifest | None = None) -> dict[str, int]:
        """How many parameters there are, are begun, and have received enough elements.

        Cheap enough for every tensor: a parameter that has enough is not looked at
        again. Elements that are written twice count twice, and only the final check
        looks closer.

        Args:
            manifest: of the update, if only those count that it has to fill.

        """
        for name in self.begun - self._complete:
            fill = self.fills[name]
            if num_written := sum(fill.views.values()):
                self._written_to.add(name)
            if num_written >= fill.numel:
                self._complete.add(name)
        due = self._required.keys() if manifest is None else self.due(manifest)
        return {
            "total": len(due),
            "begun": len(due & self._written_to),
            "complete": len(due & self._complete),
        }

    def due(self, manifest: Manifest) -> Set[str]:
        """The parameters that an update has to fill.

        | update | parameters |
        |---|---|
        | subset, delta | those it has begun, and all of a quantised layer that it has
            begun |
        | of the drafter alone | all of the drafter |
        | with a drafter's tensor, or MTP | all of the model and of the drafter |
        | other | all of the model |

        The parameters of a quantised layer are processed together or not at all.
        """
        if manifest.subset or manifest.base is not None:
            paths = {name.rpartition(".")[0] for name in self.begun}
            quantised = self._required.keys() & self._quantised
            together = (n for n in quantised if n.rpartition(".")[0] in paths)
            return self.begun.union(together)
        drafted = manifest.draft or getattr(self._module, "is_mtp", False)
        drafted = drafted or not self._of_drafter.isdisjoint(self.begun)
        of_model = () if manifest.draft else self._of_model
        return self._of_drafter.union(of_model) if drafted else self._of_model

    def short(self, names: Set[str]) -> list[str]:
        """Parameters of `names` with elements that were never written."""
        return [
            name for name, fill in self.fills.items() if name in names and fill.missing
        ]

    def replayed(self, entry: Entry) -> None:
        """A recorded load is about to be replayed."""
        for name, view in entry.filled:
            self.begin(name)
            self.loaded.add(name)
            if view in self.fills[name].views:
                self.refilled.add(name)
            self.fills[name].views[view] = prod(view[1])

    def wrote(self, name: str, param: torch.Tensor, source: torch.Tensor) -> None:
        """A loader is about to write all of a parameter without the parameter's own
        loader.

        Raises:
            TypeError: a copy would change the numbers of `source`.
            ValueError: a copy would repeat numbers, or would not use all of them.

        """
        _require_dtype(param, source)
        came = source if self.handed is None else self.handed
        if source.shape != param.shape or came.numel() != param.numel():
            raise ValueError(
                f"{list(source.shape)} of it are for {list(param.shape)} of the model"
            )
        self.begin(name)
        self.loaded.add(name)
        self.num_loads += 1
        self.fills[name].views[0, tuple(param.shape), param.stride()] = param.numel()
        if self.entry is not None:
            self.entry.is_whole = False

    def overwrite(self, name: str, view: View) -> None:
        """A method of a worker extension is about to write a view of a parameter."""
        self.begin(name)
        self.written.add(name)
        self.fills[name].views[view] = prod(view[1])

    def watching(self) -> AbstractContextManager[Any]:
        """Context: the model's own loader runs."""
        return self._direct or nullcontext()

    def watching_memory(self) -> AbstractContextManager[Any]:
        """Context: the same, where parameters have been given other memory."""
        if self._direct is None:
            return nullcontext()
        return direct_writes.DirectWrites(self._module, self.wrote)

    def passes_over(self, load: Callable[..., Any], hollow: Iterable[Any]) -> bool:
        """Whether `load` ignores tensors that are given to it again, without content.

        A loader may have kept the tensors until all had come. A transport has reused
        their memory by then, so the loader would copy something else; here it fails
        instead. A loader that keeps tensors for a partner would not fail (the FP8
        indexer, whose models are rejected at start).
        """
        before = self.num_loads
        try:
            with self.watching():
                load(hollow)
        except Exception:  # loaders and copies raise many kinds of errors
            return False
        return self.num_loads == before

    def asked(
        self, load: Callable[..., Any], hollow: tuple[str, torch.Tensor]
    ) -> tuple[set[str], Exception | None]:
        """The parameters that `load` would fill with a tensor, and the exception it
        raises.

        Nothing is written: the loader of the model is called, and the loaders of
        parameters are not. A direct write to a parameter is not seen, and fails for
        lack of content.

        Args:
            load: the model's loader.
            hollow: the name of a tensor, and a tensor without content.

        """
        found: set[str] = set()
        self.watch_loaders()
        before, self._asked = self.num_loads, found
        try:
            load([hollow])
        except Exception as error:  # every loader raises its own kind of error
            return found, error.with_traceback(None)
        finally:
            self._asked, self.num_loads = None, before
        return found, None

    @contextmanager
    def hollow(self) -> Iterator[None]:
        """Context: the model's loader can be asked although no load is under way.

        The layers have no memory meanwhile, so nothing can be written to the content of
        the tree. Afterwards they have their memory again.
        """
        try:
            upstream.initialize_layerwise_reload(self._module)
            yield
        finally:
            self.unwatch_loaders()
            layerwise_reload.leave(self._module)

    def begin(self, name: str) -> None:
        """A parameter is about to be written."""
        self._stale.add(name)
        self.begun.add(name)
        self.touched.add(name)

    def stand_before(self, load: Callable[..., Any]) -> None:
        """Put `load` in place of the module's `load_weights`; change nothing else."""
        if not self._outside:
            self._outside.append(vars(self._module).get("load_weights"))
        self._module.load_weights = load  # type: ignore[assignment]

    def watch(self, load: Callable[..., Any], *, at_once: bool = True) -> None:
        """Put `load` in place of the module's loader, and watch each parameter's
        loader.

        Args:
            load: in place of the module's `load_weights`.
            at_once: whether a transport may call a parameter's loader without
                `load`. If not, `load` calls `watch_loaders` before it lets a
                parameter's loader be called. A replay calls none, and watching hundreds
                of loaders costs milliseconds beside decoding.

        """
        if direct_writes.writes(self._module):
            self._direct = direct_writes.DirectWrites(self._module, self.wrote)
        self._is_over = False
        self.stand_before(load)
        if at_once:
            self.watch_loaders()

    def watch_loaders(self) -> None:
        """Watch the writes of every parameter's loader from now on."""
        if self._watching:
            return
        for prefix, layer in with_breaks(self._module.named_modules()):
            # With expert parallelism, the loader of this rank skips the experts of
            # other ranks.
            takes_all = getattr(layer, "_expert_map", None) is None
            if is_quantised(layer):
                self._let_pass(layer)
            elif takes_all:
                self._see_again(layer, prefix)
            for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None:
                    continue
                loader = getattr(tensor, "weight_loader", None)
                is_deferred = key not in upstream.SKIP_LOAD_TENSORS
                if name not in self.fills:
                    if loader is not None and is_deferred:
                        self._watching.append((tensor, loader))
                        tensor.weight_loader = self._unless_asked(loader)
                    continue
                self._watching.append((tensor, loader))
                tensor.weight_loader = self._watched(
                    name,
                    loader or upstream.default_weight_loader,
                    is_replayable=not is_quantised(layer),
                    is_deferred=is_deferred,
                    takes_all=takes_all,
                )

    def unwatch(self) -> None:
        """Leave the tree as it was."""
        self._is_over = True
        if self._outside:
            vars(self._module)["load_weights"] = self._outside.pop()
            if vars(self._module)["load_weights"] is None:
                del vars(self._module)["load_weights"]
        self.unwatch_loaders()

    def unwatch_loaders(self) -> None:
        """Stop watching the loaders of parameters."""
        # Upstream keeps these tensors and their loaders for the next reload. A tied
        # tensor is watched twice, so the order is reversed.
        for tensor, loader in reversed(self._watching):
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        self._watching.clear()

    def _let_pass(self, layer: torch.nn.Module) -> None:
        """Accept a tensor for a layer that is complete without it.

        A checkpoint has the shape of an int4 weight for each part of a fused layer, and
        one of them is enough. Nothing is written, so a missing part is still noticed.
        """

        def load(*args: object, **kwargs: object) -> None:
            self.num_loads += 1

        # The loader then finds the parameters that processing has made.
        processed, _ = upstream.get_layerwise_info(layer).kernel_tensors or ({}, {})
        for key, tensor in processed.items():
            if key in REPEATED and tensor is not layer._parameters.get(key):
                loader = getattr(tensor, "weight_loader", None)
                self._watching.append((tensor, loader))
                tensor.weight_loader = load

    def _see_again(self, layer: torch.nn.Module, prefix: str) -> None:
        """Notice a tensor for a layer that is complete and packed already.

        The packed tensor is in place of the loaded one, and has no loader. Upstream
        would drop
        the tensor, or reject it for its shape.
        """
        processed, _ = upstream.get_layerwise_info(layer).kernel_tensors or ({}, {})
        for key, tensor in processed.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in self.fills and tensor is not layer._parameters.get(key):
                loader = getattr(tensor, "weight_loader", None)
                self._watching.append((tensor, loader))
                tensor.weight_loader = functools.partial(
                    self._filled_again, name, loader or upstream.default_weight_loader
                )

    def _unless_asked(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """`loader` of a parameter that need not be filled; does nothing while it is
        only asked.

        Upstream keeps each tensor that comes for a scale, and copies it at the end. A
        tensor that is only asked about has no content.
        """

        def online_process_loader(*args: object, **kwargs: object) -> Any:
            return True if self._asked is not None else loader(*args, **kwargs)

        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
        return online_process_loader

    def _filled_again(
        self, name: str, loader: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A tensor has come for a parameter that is full, or that a method has kept."""
        if self._asked is not None:
            self._asked.add(name)
            return True
        if is_calling() and self.lets_write and name not in self._quantised:
            return _own_loader(loader)(*args, **kwargs)
        self._require_loader(name)
        self.num_loads += 1
        self.refilled.add(name)
        self.touched.add(name)
        return True

    def _require_loader(self, name: str) -> None:
        """Raise an error unless the model's own loader calls a parameter's loader.

        Raises:
            Conflict: a method of a worker extension calls it. It has to load by
                `load_weights` of the model, which verifies its tensors.
            WrongPhase: the load has ended.

        """
        if is_of_method():
            error = Conflict(
                f"the worker extension fills {name} of the shadow model itself, "
                "without load_weights of the model, so its tensors cannot be verified; "
                "start the engine with --inflight-adopt off"
            )
            raise rejected(error)
        if self._is_over:
            raise WrongPhase(
                f"a loader of {name} was kept from an update that has ended, and "
                "nothing is loaded by it any more; take the parameter's loader anew in "
                "each update"
            )

    def _is_drafting(self) -> bool:
        return getattr(self._module, "is_drafting", False)

    def _watched(
        self,
        name: str,
        loader: Callable[..., Any],
        *,
        is_replayable: bool,
        is_deferred: bool,
        takes_all: bool,
    ) -> Callable[..., Any]:
        fill = self.fills[name]

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            param = args[0] if args else kwargs["param"]
            if self._is_drafting() and not name.startswith(DRAFT):
                self.num_loads += 1
                return None  # the layer belongs to the target model; see drafter.py
            if self._asked is not None:
                self._asked.add(name)
                return True  # loaders of experts report whether they used the tensor
            if is_calling() and self.lets_write and name not in self._quantised:
                # Its copies are looked at one by one, and none is put off.
                return _own_loader(loader)(*args, **kwargs)
            self._require_loader(name)
            loaded = args[1] if len(args) > 1 else kwargs.get("loaded_weight")
            if isinstance(loaded, torch.Tensor):
                _require_dtype(param, loaded)
            self.begin(name)
            self.loaded.add(name)
            self.has_strays |= self.entry is None
            before = () if self.entry is None else self.entry.filled
            own = {view for param_name, view in before if param_name == name}
            if self.entry is not None and not is_replayable:
                self.entry.is_whole = False  # the layer is processed in other memory
            with (
                RecordedWrites(name, param, self.handed, self.entry) as writes,
                as_fresh(self._device, param, loaded),
            ):
                result = loader(*args, **kwargs)
            self.num_loads += 1
            # Upstream drops a tensor for a layer that is complete.
            is_dropped = takes_all and not writes.views
            is_full = is_dropped and sum(fill.views.values()) >= fill.numel
            if is_full or not (writes.views.keys() - own).isdisjoint(fill.views):
                self.refilled.add(name)
            fill.views.update(writes.views)
            return result

        # Upstream's layerwise reload wraps a loader unless the loader has the name of
        # its own wrapper, and unwraps by following __wrapped__. A loader that may write
        # in place is not wrapped; under that name it would be unwrapped.
        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
        if not is_deferred:
            online_process_loader.__name__ = "in_place_loader"
        return online_process_loader


def _own_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    """A parameter's loader without upstream's wrappers, which put its copies off."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader


def _require_dtype(param: torch.Tensor, loaded: torch.Tensor) -> None:
    """Raise `TypeError` if a copy would change the numbers of `loaded`."""
    if loaded.dtype == param.dtype:
        return
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (loaded, param)]
    if not PLAIN.issuperset(dtypes):
        raise TypeError(f"it is {dtypes[0]}, the model's is {dtypes[1]}")
