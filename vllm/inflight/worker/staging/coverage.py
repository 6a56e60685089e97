"""Coverage: which elements of a parameter have been written by its loaders.

A fused parameter is filled by several tensors, a sharded one by a part of one;
what counts is that in the end every element was written, whatever the tensors
were called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.tensor_names import PLAIN
from vllm.inflight.update import DRAFT, Manifest
from vllm.inflight.worker.model import direct_writes, layerwise_reload
from vllm.inflight.worker.model.quantized import is_quantised
from vllm.inflight.worker.replay_plan import Entry, RecordedWrites, View, are_apart
from vllm.inflight.worker.staging.rounding import HOST, as_fresh
from vllm.inflight.worker.verify.checks import REPEATED
from vllm.inflight.yielding import with_breaks


@dataclass(slots=True)
class Fill:
    """Which views of one parameter have been written."""

    numel: int
    views: dict[View, int] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Elements that nothing was written to."""
        views = [view for view, count in self.views.items() if count]
        if sum(self.views.values()) == self.numel and are_apart(views):
            return 0
        # Views that overlap (a loader that writes twice) cannot just be added up. On
        # the host, since a GPU that serves has no memory to spare.
        written = torch.zeros(self.numel, dtype=torch.bool, device="cpu")
        for offset, shape, stride in views:
            written.as_strided(shape, stride, offset).fill_(True)
        return self.numel - int(written.sum())


class Coverage:
    """What one update writes into one tree, watched behind its loaders.

    Args:
        module: the tree.
        required: parameter name → shape, of all there is to fill.
        behind: names of the parameters whose content is not what is served; every
            one is entered here before the first write to it.
        quantised: those of quantised layers.
        device: the GPU of the engine, if it has one.

    """

    def __init__(
        self,
        module: torch.nn.Module,
        required: Mapping[str, torch.Size],
        behind: set[str],
        quantised: Collection[str] = (),
        device: torch.device = HOST,
    ) -> None:
        self._module = module
        self._device = device
        self._behind = behind
        self._quantised = quantised
        self.fills = {n: Fill(shape.numel()) for n, shape in required.items()}
        """What has been written of each parameter."""
        self.begun: set[str] = set()
        """Parameters that a loader was called for, whatever it wrote."""
        self.refilled: set[str] = set()
        """Parameters of which something was written twice, by two tensors."""
        self.num_loads = 0
        self.has_strays = False
        """Whether a loader was called with what no tensor that came is made of."""
        self.handed: torch.Tensor | None = None
        """What the loaders have at this moment, and what they do with it."""
        self.entry: Entry | None = None
        self.touched: set[str] = set()
        """Parameters that were begun with the tensor that the loaders have."""
        self._asked: set[str] | None = None
        """While a loader is only asked: the parameters that it would fill."""
        self._watching: list[tuple[Any, Any]] = []
        self._outside: list[Any] = []
        """What stood in the place of the module's `load_weights`, while we do."""
        self._direct: direct_writes.DirectWrites | None = None

    @property
    def is_whole(self) -> bool:
        """Whether something has come for every parameter, a drafter's included."""
        return self.begun >= self.fills.keys()

    def due(self, manifest: Manifest) -> set[str]:
        """The parameters that an update has to fill.

        Of a subset, those it has begun, and all of a quantised layer, whose parameters
        are processed together or not at all. Else all of the model's, or of the
        drafter's if that was announced; and all of the drafter's if one of them was
        begun, or if its tensors are among the model's.
        """
        if manifest.subset:
            paths = {name.rpartition(".")[0] for name in self.begun}
            together = (n for n in self._quantised if n.rpartition(".")[0] in paths)
            return self.begun.union(together)
        drafted = manifest.draft or getattr(self._module, "is_mtp", False)
        drafted = drafted or any(name.startswith(DRAFT) for name in self.begun)
        return {
            name
            for name in self.fills
            if (drafted if name.startswith(DRAFT) else not manifest.draft)
        }

    def short(self, names: set[str]) -> list[str]:
        """Parameters of `names` with elements that nothing wrote."""
        return [
            name for name, fill in self.fills.items() if name in names and fill.missing
        ]

    def replayed(self, entry: Entry) -> None:
        """What was recorded of a tensor is about to be done again."""
        for name, view in entry.filled:
            self.begin(name)
            if view in self.fills[name].views:
                self.refilled.add(name)
            self.fills[name].views[view] = prod(view[1])

    def wrote(self, name: str, param: torch.Tensor, source: torch.Tensor) -> None:
        """All of a parameter is about to be written, past its loader.

        Raises:
            TypeError: a copy would make other numbers of `source`.
            ValueError: it would repeat them, or leave some of what came.

        """
        _require_dtype(param, source)
        came = source if self.handed is None else self.handed
        if source.shape != param.shape or came.numel() != param.numel():
            raise ValueError(
                f"{list(source.shape)} of it are for {list(param.shape)} of the model"
            )
        self.begin(name)
        self.num_loads += 1
        self.fills[name].views[0, tuple(param.shape), param.stride()] = param.numel()
        if self.entry is not None:
            self.entry.is_whole = False

    def watching(self) -> AbstractContextManager[Any]:
        """While the model's own loader runs."""
        return self._direct or nullcontext()

    def passes_over(self, load: Callable[..., Any], hollow: Iterable[Any]) -> bool:
        """Whether `load` has no use for tensors; they come again, without content.

        A loader may have kept them until all had come, and a transport has used their
        memory again by then: that one would try to copy now what is not there. One that
        keeps them on for a partner (FP8's of an indexer, which are refused) would not.
        """
        before = self.num_loads
        try:
            with self.watching():
                load(hollow)
        except Exception:  # each loader and each kind of copy has its own
            return False
        return self.num_loads == before

    def asked(
        self, load: Callable[..., Any], hollow: Any
    ) -> tuple[set[str], Exception | None]:
        """The parameters that `load` would fill with a tensor, and what it raises.

        Nothing is written: a loader is called, and those of parameters are not. What it
        writes past those is not seen, and fails, for it has no content.

        Args:
            load: the model's.
            hollow: the name and a tensor without content.

        """
        found: set[str] = set()
        self.stand_behind()
        before, self._asked = self.num_loads, found
        try:
            load([hollow])
        except Exception as error:  # each loader has its own for what it does not know
            return found, error.with_traceback(None)
        finally:
            self._asked, self.num_loads = None, before
        return found, None

    @contextmanager
    def hollow(self) -> Iterator[None]:
        """While the model's loader is asked of a tree in which no load is under way.

        Its layers have no memory meanwhile, so nothing can be written to what the tree
        holds; afterwards they have what they had.
        """
        try:
            upstream.initialize_layerwise_reload(self._module)
            yield
        finally:
            self._step_back()
            layerwise_reload.leave(self._module)

    def begin(self, name: str) -> None:
        """A parameter is about to be written to."""
        self._behind.add(name)
        self.begun.add(name)
        self.touched.add(name)

    def stand_before(self, load: Callable[..., Any]) -> None:
        """Let `load` stand in for the module's `load_weights`; nothing else changes."""
        if not self._outside:
            self._outside.append(vars(self._module).get("load_weights"))
        self._module.load_weights = load  # type: ignore[assignment]

    def watch(self, load: Callable[..., Any], *, at_once: bool = True) -> None:
        """Let `load` stand before the loaders, and stand behind each of them.

        Args:
            load: in the place of the module's `load_weights`.
            at_once: whether a transport may call a parameter's loader past `load`. If
                none does, it is for `load` to call `stand_behind` before it lets one be
                called: where all is replayed none is, and to stand behind hundreds
                takes milliseconds beside decoding.

        """
        if direct_writes.writes(self._module):
            self._direct = direct_writes.DirectWrites(self._module, self.wrote)
        self.stand_before(load)
        if at_once:
            self.stand_behind()

    def stand_behind(self) -> None:
        """See what every loader writes, from now on."""
        if self._watching:
            return
        for prefix, layer in with_breaks(self._module.named_modules()):
            # Of experts that are shared out, this rank passes the others' over.
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
        if self._outside:
            vars(self._module)["load_weights"] = self._outside.pop()
            if vars(self._module)["load_weights"] is None:
                del vars(self._module)["load_weights"]
        self._step_back()

    def _step_back(self) -> None:
        """Take what stands behind the loaders away."""
        # Upstream keeps these tensors for the next reload, loaders and all.
        # One that is tied was stood behind twice.
        for tensor, loader in reversed(self._watching):
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        self._watching.clear()

    def _let_pass(self, layer: torch.nn.Module) -> None:
        """Let a tensor pass that comes for a layer which is complete without it.

        The shape of an int4 weight is in a checkpoint for each part of a fused one, and
        one is enough. Nothing is written, so what a layer lacks is still missed.
        """

        def load(*args: Any, **kwargs: Any) -> None:
            self.num_loads += 1

        # What the loader then finds is what its layer was processed into.
        processed, _ = upstream.get_layerwise_info(layer).kernel_tensors or ({}, {})
        for key, tensor in processed.items():
            if key in REPEATED and tensor is not layer._parameters.get(key):
                loader = getattr(tensor, "weight_loader", None)
                self._watching.append((tensor, loader))
                tensor.weight_loader = load

    def _see_again(self, layer: torch.nn.Module, prefix: str) -> None:
        """See what comes for a layer that is complete, and packed, already.

        It is in place of what was loaded then, and has no loader: upstream would drop
        what comes, or refuse it for its shape.
        """
        processed, _ = upstream.get_layerwise_info(layer).kernel_tensors or ({}, {})
        for key, tensor in processed.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in self.fills and tensor is not layer._parameters.get(key):
                loader = getattr(tensor, "weight_loader", None)
                self._watching.append((tensor, loader))
                tensor.weight_loader = functools.partial(self._filled_again, name)

    def _unless_asked(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """`loader`, of a parameter that need not be filled; nothing while it is asked.

        Upstream keeps each tensor that comes for a scale, and copies it at the end. One
        that is only asked about has no content to be copied.
        """

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            return True if self._asked is not None else loader(*args, **kwargs)

        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
        return online_process_loader

    def _filled_again(self, name: str, *args: Any, **kwargs: Any) -> bool:
        """A tensor has come for a parameter that is full."""
        if self._asked is not None:
            self._asked.add(name)
            return True
        self.num_loads += 1
        self.refilled.add(name)
        self.touched.add(name)
        return True

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
                return None  # a layer that is its model's; see drafter.py
            if self._asked is not None:
                self._asked.add(name)
                return True  # those of experts say whether they had a use for it
            loaded = args[1] if len(args) > 1 else kwargs.get("loaded_weight")
            if isinstance(loaded, torch.Tensor):
                _require_dtype(param, loaded)
            self.begin(name)
            self.has_strays |= self.entry is None
            before = () if self.entry is None else self.entry.filled
            own = {view for param_name, view in before if param_name == name}
            if self.entry is not None and not is_replayable:
                self.entry.is_whole = False  # it is processed in memory of its own
            with (
                RecordedWrites(name, param, self.handed, self.entry) as writes,
                as_fresh(self._device, param, loaded),
            ):
                result = loader(*args, **kwargs)
            self.num_loads += 1
            # Upstream drops what comes for a layer that is complete.
            is_dropped = takes_all and not writes.views
            is_full = is_dropped and sum(fill.views.values()) >= fill.numel
            if is_full or not (writes.views.keys() - own).isdisjoint(fill.views):
                self.refilled.add(name)
            fill.views.update(writes.views)
            return result

        # Upstream's layerwise reload wraps a loader unless it finds its own
        # name on it, and unwraps by following __wrapped__. What it lets a model
        # write in place it does not wrap, and would take this one off unasked.
        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]
        if not is_deferred:
            online_process_loader.__name__ = "in_place_loader"
        return online_process_loader


def _require_dtype(param: torch.Tensor, loaded: torch.Tensor) -> None:
    """Raise `TypeError` where a copy would make other numbers of what came."""
    if loaded.dtype == param.dtype:
        return
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (loaded, param)]
    if not PLAIN.issuperset(dtypes):
        raise TypeError(f"it is {dtypes[0]}, the model's is {dtypes[1]}")


def tally(fills: Mapping[str, Fill]) -> dict[str, int]:
    """How many parameters there are, are begun, and have had as much as they need.

    Cheap enough for every chunk: what a loader wrote twice is counted twice, and only
    the verdict looks closer.
    """
    written = [(fill.numel, sum(fill.views.values())) for fill in fills.values()]
    return {
        "total": len(written),
        "begun": sum(count > 0 for _, count in written),
        "complete": sum(count >= numel for numel, count in written),
    }
