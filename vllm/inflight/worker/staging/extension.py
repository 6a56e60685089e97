"""The methods of a worker extension, executed on the shadow weights.

Another framework's method reaches the weights by `model_runner.model` of its worker. So
the method gets a stand-in for the worker. The stand-in has all attributes of the
worker, except that its model is the shadow model. Its `load_weights` is a `Door`, with
the checks of an update behind it. The method brings its tensors by its own transport.
What it copies into parameters itself goes through the door as well.

Threads that the method starts belong to its call, see guard.py.

While the method runs, the load of the shadow model is ours: what upstream does to begin
and to end a load has no effect in this thread, see adopted_call.py. Collecting garbage
and emptying torch's cache have none either, because both stop decoding.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from vllm.inflight import messages, upstream
from vllm.inflight.errors import EngineFault, InflightError
from vllm.inflight.frameworks.known_call import methods_of
from vllm.inflight.frameworks.table import known_calls, matched
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.tensor_list import Pair
from vllm.inflight.worker.adopted_call import (
    AdoptedCall,
    calling,
    is_calling,
    loading,
    running,
)
from vllm.inflight.worker.integrity.outside_writes import SOURCE
from vllm.inflight.worker.model.drafter import ModelWithDrafter
from vllm.inflight.worker.model.layers import parameters
from vllm.inflight.worker.staging.guard import Guard, follow_threads, write_conflict
from vllm.inflight.worker.staging.parameter_writes import ParameterWrites
from vllm.inflight.worker.staging.weight_memory import LIVE, Known, WeightMemory
from vllm.inflight.yielding import with_breaks


@functools.cache
def _make_calm() -> None:
    """Let what stops decoding do nothing in a thread that runs an extension's method.

    A collection of garbage holds the interpreter's lock. Emptying torch's cache waits
    for the device. The functions are replaced once in a process, for good.
    """
    for module, name, nothing in (
        (gc, "collect", 0),
        (torch.cuda, "empty_cache", None),
    ):
        setattr(module, name, _unless_calling(getattr(module, name), nothing))


def _unless_calling(original: Callable[..., Any], nothing: object) -> Any:
    @functools.wraps(original)
    def calm(*args: object, **kwargs: object) -> Any:
        return nothing if is_calling() else original(*args, **kwargs)

    return calm


DRAFTERS = ("drafter", "speculator")
"""Attributes of vLLM's two model runners that hold the drafter."""


@contextmanager
def _listed_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Let `named_parameters` of a model walk it at once.

    A method may write each parameter as it comes to it. The first write begins the load
    of layers, which changes what would be walked.
    """

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(list(type(model).named_parameters(model, *args, **kwargs)))

    vars(model)["named_parameters"] = named_parameters
    try:
        yield
    finally:
        del vars(model)["named_parameters"]


@contextmanager
def _default_device(device: torch.device) -> Iterator[None]:
    """Let tensors be made on `device`, unless a call names another device.

    A default device sends every call of torch through Python, so none is set again.
    """
    if torch.get_default_device() == device:
        yield
        return
    with torch.device(device):
        yield


class Door:
    """`load_weights` of the shadow model, as a method of an extension calls it.

    Args:
        load: the `load_weights` of the update loader.
        model: the shadow model.
        live: the live model.
        clones: whether layers keep tensors after the call. The sender uses the memory
            of its tensors again, so they are cloned.
        device: the default device of the load.
        writes: takes what the method writes itself; None if it may write nothing.
        first_write: called before a write that may be the first one.

    Attributes:
        failure: the first error of a load, or of what was rejected. A method may handle
            it, and report success.
        memory: of the parameters.

    """

    def __init__(
        self,
        load: Callable[..., Any],
        model: torch.nn.Module,
        live: torch.nn.Module,
        *,
        clones: bool,
        device: torch.device,
        writes: ParameterWrites | None = None,
        first_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._load, self._model, self._clones = load, model, clones
        self._writes, self._first_write = writes, first_write
        self.memory = WeightMemory(model, live)
        self._children = [(m, dict(m._modules)) for m in model.modules()]
        self.note_homes()
        self._device = device
        self.failure: Exception | None = None
        self.stream: torch.cuda.Stream | None = None
        """The stream of staging, while a method runs on a GPU."""
        self._is_used = False
        self._states = self._now()
        """The parameters when nothing but the update loader had written them."""

    def __call__(self, weights: Iterable[Pair]) -> set[str]:
        """Load tensors; returns their names.

        Raises:
            Conflict: this thread may not load now, see `AdoptedCall.loading`.

        """
        with loading():
            return self._loaded(weights)

    def _loaded(self, weights: Iterable[Pair]) -> set[str]:
        names: set[str] = set()
        self.bring_home()
        usual = torch.get_default_device()
        modes = [mode for mode in _get_current_dispatch_mode_stack()]

        def noted() -> Iterator[Pair]:
            tensors = iter(weights)
            while True:
                # An iterator is code of the extension, as the method is.
                with calling(True), _default_device(usual), ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    pair = next(tensors, None)
                if pair is None:
                    return
                name, tensor = pair
                names.add(name)
                yield name, tensor.clone() if self._clones else tensor

        try:
            with (
                calling(False),
                _disable_current_modes(),
                _default_device(self._device),
                self._on_stream(),
            ):
                self._load(noted())
        except Exception as error:
            self.note(error)
            raise
        finally:
            self._note_load()
        return names

    def note(self, error: Exception) -> None:
        """Note an error of this update; the first one counts."""
        self.failure = self.failure or error

    def may_be_read(self, known: Known) -> bool:
        """Whether a method may read the content of a parameter."""
        if known.model == LIVE:
            return True
        return self._writes is not None and self._writes.may_be_read(known.name)

    def obstacle(self, known: Known) -> str:
        """Why a method may not write a parameter itself, as a clause."""
        obstacle = None
        if self._writes is not None and known.model != LIVE:
            obstacle = self._writes.obstacle(known.name)
        return obstacle or "in a way that cannot be verified"

    def takes(
        self, known: list[Known], target: torch.Tensor, source: torch.Tensor
    ) -> bool:
        """Whether a copy into these parameters can be accounted for."""
        if not known:
            return True
        if self._writes is None or len(known) > 1 or known[0].model == LIVE:
            return False
        is_free = self._writes.obstacle(known[0].name) is None
        return is_free and known[0].view(target) is not None

    def write(
        self,
        known: Known,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        non_blocking: bool,
    ) -> None:
        """Copy `source` into `target`, which is a view of a parameter."""
        view = known.view(target)
        assert self._writes is not None and view is not None
        if self._clones:
            self.bring_home()
        try:
            with (
                calling(False),
                _disable_current_modes(),
                _default_device(self._device),
                self._on_stream(),
            ):
                self._first_write()
                self._writes.write(
                    known.name, view, known.param, source, non_blocking=non_blocking
                )
        except Exception as error:
            self.note(error)
            raise
        finally:
            self._note_load()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Context: the stream of staging, in order with the stream of the method."""
        own = self.stream
        if own is None or own == (current := torch.cuda.current_stream(own.device)):
            yield
            return
        own.wait_stream(current)
        with torch.cuda.stream(own):
            yield
        current.wait_stream(own)

    def _note_load(self) -> None:
        """A load may have given layers other memory, and has begun."""
        if self._clones:
            self.memory.moved()
            self.note_homes()
        if not self._is_used:
            # The first load has begun the load of all layers, and checked the plan.
            self._is_used, self._states = True, self._now()

    def note_homes(self) -> None:
        """Remember the parameters and their places; nobody else changes them.

        With `clones` a load may, so it is called after each load, and before a method.
        """
        self._homes = [(*at, at[-1].data) for at in parameters(self._model)]

    def bring_home(self) -> None:
        """Put layers and parameters back that a method has replaced.

        That is noted as a failure: what was put there was never checked, and compiled
        graphs go on with the memory that they know.
        """
        for layer, children in self._children:
            if layer._modules != children:
                layer._modules.update(children)
                self._note_replaced(f"the layers of {type(layer).__name__}")
        for name, layer, key, param, place in self._homes:
            is_own = layer._parameters.get(key) is param
            if is_own and param.data_ptr() == place.data_ptr():
                continue
            param.data = place
            layer._parameters[key] = param
            self._note_replaced(f"the place of {name}")

    def _note_replaced(self, what: str) -> None:
        self.note(write_conflict("a method", f"{what} of the shadow model"))

    def require_all_through(self, loaded: Collection[str]) -> None:
        """Raise what was rejected, or `Conflict` if parameters were written without the
        door.

        A thread of the method may have been rejected since the method has returned. No
        guard is in a thread that is older than the call; it may write, and its writes
        to `param.data` are not seen.

        Args:
            loaded: the parameters that the update loader has written.

        """
        if self.failure is not None:
            raise self.failure
        now = self._now()
        past = [
            name
            for name, state in self._states.items()
            if name not in loaded
            and now.get(name, state)[0] == state[0]
            and now.get(name, state)[1] != state[1]
        ]
        if past:
            others = f"{past[0]} and {len(past) - 1} other parameters"
            raise write_conflict("a method", others)

    def _now(self) -> dict[str, tuple[int, int]]:
        """The id and the version counter of each parameter."""
        return {
            name: (id(param), 0 if param.is_inference() else int(param._version))
            for name, param in with_breaks(self._model.named_parameters())
        }


class ExtensionCalls(StagedEngine):
    """The calls of one worker's extension.

    Attributes:
        worker: the worker; set once, before the first call.

    """

    init_info_cls = upstream.WeightTransferInitInfo
    update_info_cls = upstream.WeightTransferUpdateInfo

    worker: upstream.WorkerBase
    usual_device: torch.device | None = None
    """The default device of the thread that executes worker calls as upstream does."""
    _stand_in: Any = None
    _results: dict[tuple[int, int], Any] | None = None
    _source: dict[str, Any] | None = None
    """What the model's config said of its files before the update."""

    def init_transfer_engine(self, init_info: object) -> None:
        """Do nothing: the extension makes its own connections."""

    def shutdown(self) -> None:
        """Do nothing, for the same reason."""

    def parse_update_info(self, update_info: Any) -> Any:
        """Reject a chunk of another client; raises `ValueError`."""
        raise ValueError(
            "the update under way belongs to a worker extension, which brings its "
            "tensors by its own calls; end it with POST /abort_weight_update"
        )

    def receive_weights(self, update_info: object) -> None:
        """Never called, because no chunk can be parsed."""
        raise NotImplementedError

    def call(self, command: messages.CallExtension, door: Door) -> Any:
        """Call a method on the shadow weights; returns its result.

        Args:
            command: names the method, and has its arguments.
            door: of the update; it is told of what was rejected.

        Raises:
            EngineFault: the method has failed.

        """
        _make_calm()
        follow_threads()
        if self._stand_in is None:
            self._stand_in = stand_in(self.worker, self.model)
        if command.method is None:
            name, method = "load_weights", self.model.load_weights
        else:
            name, method = command.method, getattr(self._stand_in, command.method)
        call = AdoptedCall(name, door.note)
        door.note_homes()
        if torch.device(self.worker.device).type == "cuda":
            door.stream = torch.cuda.current_stream()
        try:
            usual = self.usual_device or torch.device("cpu")
            with (
                running(call),
                Guard(call, door),
                _default_device(usual),
                _listed_parameters(_target_of(self.model)),
            ):
                return method(*command.args, **command.kwargs)
        except InflightError:
            raise
        except BaseException as error:
            raise EngineFault(
                f"{name} of the worker extension has failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            call.end()
            door.bring_home()

    def note_source(self) -> None:
        """Remember which files the model's config names."""
        config = self.worker.vllm_config.model_config
        self._source = {field: getattr(config, field) for field in SOURCE}

    def put_source_back(self) -> None:
        """Let the config name these files again, since a method may set others."""
        for field, value in (self._source or {}).items():
            setattr(self.worker.vllm_config.model_config, field, value)

    def keep(self, serial: int, number: int, result: object) -> None:
        """Keep the result of call `number` of an update until it is taken."""
        others = self._results or {}
        self._results = {k: v for k, v in others.items() if k[0] == serial}
        self._results[serial, number] = result

    def take(self, serial: int, number: int) -> list[Any]:
        """The result of a call, in a list; the list is empty if there is none."""
        results = self._results or {}
        if (serial, number) not in results:
            return []
        return [results.pop((serial, number))]


def stand_in(worker: upstream.WorkerBase, model: torch.nn.Module) -> Any:
    """An object that is `worker`, except that its runner shows `model`.

    The stand-in and the worker have the same attributes, so that a connection of the
    extension is known to both. What an extension caches of parameters would be wrong on
    the other one. Its known calls name these attributes, and they stay apart.

    The runner shows no drafter. The live one is not to be written while it drafts, and
    a version without the drafter's tensors leaves it as it is.
    """
    runner = worker.model_runner
    absent = {name: _absent(name) for name in DRAFTERS}
    own_runner = _like(runner, absent | {"model": _fixed(of_target(model))})
    rows = matched(methods_of(type(worker), known_calls()))
    private: dict[str, Any] = {}
    names = {name for row in rows for name in row.private}
    apart = {name: _kept_in(private, name) for name in names}
    return _like(worker, apart | {"model_runner": _fixed(own_runner)})


def _target_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.target if isinstance(model, ModelWithDrafter) else model


def of_target(model: torch.nn.Module) -> Any:
    """The model without its drafter; what it loads goes through the loader of both."""
    if not isinstance(model, ModelWithDrafter):
        return model
    loader = property(lambda self: model.load_weights)
    return _like(model.target, {"load_weights": loader})


def _like(owner: Any, properties: dict[str, Any]) -> Any:
    """An object with the attributes of `owner`, and these properties in front."""
    kind = type(f"Staged{type(owner).__name__}", (type(owner),), properties)
    made: Any = object.__new__(kind)
    made.__dict__ = vars(owner)
    return made


def _fixed(value: object) -> property:
    return property(lambda self: value)


def _absent(name: str) -> property:
    def read(self: object) -> Any:
        raise AttributeError(
            f"an adopted call replaces the model alone, and sees no {name}"
        )

    return property(read)


def _kept_in(store: dict[str, Any], name: str) -> property:
    def read(self: object) -> Any:
        if name not in store:
            raise AttributeError(name)
        return store[name]

    def write(self: object, value: object) -> None:
        store[name] = value

    def delete(self: object) -> None:
        store.pop(name, None)

    return property(read, write, delete)
