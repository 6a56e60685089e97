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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.inflight import messages, upstream
from vllm.inflight.errors import EngineFault, InflightError
from vllm.inflight.frameworks.known_call import located, methods_of
from vllm.inflight.frameworks.table import known_calls, matched
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.worker.adopted_call import (
    AdoptedCall,
    is_calling,
    running,
)
from vllm.inflight.worker.integrity.outside_writes import SOURCE
from vllm.inflight.worker.model.kinds.drafter import ModelWithDrafter
from vllm.inflight.worker.staging.adopted.door import Door, default_device
from vllm.inflight.worker.staging.adopted.guard import Guard, follow_threads


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


@functools.cache
def _make_void(step: str) -> None:
    """Let a function that prepares or processes layers do nothing in such a thread."""
    if (found := located(step)) is not None:
        module, name = found
        setattr(module, name, _unless_calling(getattr(module, name), None))


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
    _results: dict[tuple[int, int], tuple[Any, str | None]] | None = None
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

    def call(
        self,
        command: messages.CallExtension,
        door: Door,
        waits: Callable[[str, threading.Thread], bool],
    ) -> Any:
        """Call a method on the shadow weights; returns its result.

        Args:
            command: names the method, and has its arguments.
            door: of the update; it is told of what was rejected.
            waits: called again and again when the method has returned and a thread of
                it still loads, with the name of the method and that thread; whether to
                wait for it.

        Raises:
            EngineFault: the method has failed.

        """
        _make_calm()
        follow_threads()
        if self._stand_in is None:
            rows = matched(methods_of(type(self.worker), known_calls()))
            for step in {step for row in rows for step in row.load_steps}:
                _make_void(step)
            self._stand_in = stand_in(self.worker, self.model)
        if command.method is None:
            name, method = "load_weights", self.model.load_weights
        else:
            name, method = command.method, getattr(self._stand_in, command.method)
        door.call = call = AdoptedCall(name, door.note)
        if torch.device(self.worker.device).type == "cuda":
            door.stream = torch.cuda.current_stream()
        try:
            usual = self.usual_device or torch.device("cpu")
            with (
                running(call),
                Guard(call, door),
                default_device(usual),
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
            call.end(functools.partial(waits, name))
            door.bring_home()

    def note_source(self) -> None:
        """Remember which files the model's config names."""
        config = self.worker.vllm_config.model_config
        self._source = {field: getattr(config, field) for field in SOURCE}

    def put_source_back(self) -> None:
        """Let the config name these files again, since a method may set others."""
        for field, value in (self._source or {}).items():
            setattr(self.worker.vllm_config.model_config, field, value)

    def keep(self, serial: int, number: int, result: object, first: str | None) -> None:
        """Keep the result of call `number` of an update until it is taken.

        Args:
            serial: of the update.
            number: of the call.
            result: of the method.
            first: the name of the first tensor of the update.

        """
        others = self._results or {}
        self._results = {k: v for k, v in others.items() if k[0] == serial}
        self._results[serial, number] = result, first

    def take(self, serial: int, number: int) -> list[tuple[Any, str | None]]:
        """The result of a call and the first tensor, in a list; empty without one."""
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
