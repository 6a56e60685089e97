"""The door: `load_weights` as a method of a worker extension calls it.

The checks of an update are behind it. What the method copies into parameters itself
goes through it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from vllm.inflight.errors import Conflict
from vllm.inflight.transport.buckets.tensor_list import Pair
from vllm.inflight.worker.adopted_call import AdoptedCall, calling, current
from vllm.inflight.worker.model import registrations
from vllm.inflight.worker.model.layers import are_same, contents, parameters
from vllm.inflight.worker.staging.adopted.parameter_writes import ParameterWrites
from vllm.inflight.worker.staging.adopted.weight_memory import LIVE, Known, WeightMemory
from vllm.inflight.worker.staging.throttle import undirected
from vllm.inflight.yielding import with_breaks

ToDevice = Callable[[torch.Tensor], torch.Tensor]

BATCH_BYTES = 256 << 20
"""Bytes of tensors that are loaded at once."""


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return tensor


@contextmanager
def default_device(device: torch.device) -> Iterator[None]:
    """Let tensors be made on `device`, unless a call names another device.

    A default device sends every call of torch through Python, so none is set again.
    """
    if torch.get_default_device() == device:
        yield
        return
    with torch.device(device):
        yield


class Batches:
    """Tensors that are all there, in batches of at most `BATCH_BYTES`.

    A larger tensor is a batch of its own. Between two batches staging rests. Tensors of
    one batch are checked and replayed together, which takes less Python.

    Args:
        pairs: names and tensors.
        names: takes the names of those that were drawn, in order.
        to_device: called with each tensor when its batch is drawn.

    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        names: list[str],
        to_device: ToDevice = as_it_is,
    ) -> None:
        self._pairs, self._names, self._to_device = pairs, names, to_device

    def __iter__(self) -> Iterator[Pair]:
        return chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Pair]]:
        """The tensors, in lists; whoever gets one may change it."""
        batch: list[Pair] = []
        num_bytes = 0
        for name, tensor in self._pairs:
            if batch and num_bytes + tensor.nbytes > BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            self._names.append(name)
            batch.append((name, self._to_device(tensor)))
            num_bytes += tensor.nbytes
        if batch:
            yield batch


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
        before_write: called before each write of the method itself; it may raise.
        to_device: called with each tensor before it is loaded; see host_tensors.py.

    Attributes:
        failure: the first error of a load, or of what was rejected. A method may handle
            it, and report success.
        memory: of the parameters.
        first: the name of the first tensor of the update.
        call: the latest call of a method, which may be over. Threads that are older
            than it belong to it, too, while they load.

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
        before_write: Callable[[], None] = lambda: None,
        to_device: ToDevice = as_it_is,
    ) -> None:
        self._load, self._model, self._clones = load, model, clones
        self._writes, self._before_write = writes, before_write
        self.memory = WeightMemory(model, live)
        self._children = [(m, dict(m._modules)) for m in model.modules()]
        self._noted: tuple[list[object], list[int]] | None = None
        self._registered: object = None
        """What was registered last when all layers were last looked at."""
        registrations.follow()
        self.note_homes()
        self._device, self._to_device = device, to_device
        self.failure: Exception | None = None
        self.first: str | None = None
        self.call: AdoptedCall | None = None
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
        if (call := current() or self.call) is None:
            raise Conflict(
                "tensors are loaded for a worker extension, and no method of it runs"
            )
        with call.loading():
            return self._loaded(weights, call)

    def _loaded(self, weights: Iterable[Pair], call: AdoptedCall) -> set[str]:
        names: list[str] = []
        self.bring_home(unregistered=not self._is_used)
        incoming: Batches | Iterator[Pair] = self._drawn(weights, call, names)
        if type(weights) in (list, tuple) and not self._clones:
            pairs = cast(Sequence[Pair], weights)
            incoming = Batches(pairs, names, self._to_device)
        try:
            with (
                calling(False),
                _disable_current_modes(),
                default_device(self._device),
                self._on_stream(),
            ):
                self._load(incoming)
        except Exception as error:
            self.note(error)
            raise
        finally:
            self.first = self.first or next(iter(names), None)
            self._note_load()
        return set(names)

    def _drawn(
        self, weights: Iterable[Pair], call: AdoptedCall, names: list[str]
    ) -> Iterator[Pair]:
        """Tensors that an iterator of the method gives; their names are noted."""
        usual = torch.get_default_device()
        modes = [mode for mode in _get_current_dispatch_mode_stack()]

        def drawn() -> Iterator[Pair]:
            tensors = iter(weights)
            while True:
                # An iterator is code of the extension, as the method is.
                with (
                    call.drawing(),
                    calling(True),
                    default_device(usual),
                    ExitStack() as stack,
                ):
                    for mode in modes:
                        stack.enter_context(mode)
                    pair = next(tensors, None)
                if pair is None:
                    return
                name, tensor = pair
                names.append(name)
                here = self._to_device(tensor)
                yield name, tensor.clone() if self._clones and here is tensor else here

        return drawn()

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
                default_device(self._device),
                self._on_stream(),
            ):
                self._before_write()
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
            self.note_homes()
        if not self._is_used:
            # The first load has begun the load of all layers, and checked the plan.
            self._is_used, self._states = True, self._now()

    def note_homes(self) -> None:
        """Remember the parameters and their places; nobody else changes them.

        With `clones` a load may, so it is called after each load, and when a load has
        begun. A trainer may make a call for each tensor, so the model is walked only if
        there is something new.
        """
        if not self._is_changed():
            return
        self._registered = registrations.latest()
        self._layers = list(self._model.modules())
        self._homes = [(*at, at[-1].data) for at in parameters(self._model)]
        self._params = [param for *_, param, _ in self._homes]
        self._noted = self._contents()
        self.memory.moved()

    def _is_changed(self, *, unregistered: bool = False) -> bool:
        """Whether layers, parameters or places are others than those remembered.

        Args:
            unregistered: whether to look for what was put into a module past torch's
                registration as well. That looks at every layer, which takes about as
                long as the load of a small tensor.

        """
        if self._noted is None:
            return True
        registered, (were, were_at) = registrations.latest(), self._noted
        with undirected():
            if _places(self._params) != were_at:
                return True
            if registered is self._registered and not unregistered:
                return False
            found = contents(self._layers)
        if not are_same(found, were):
            return True
        self._registered = registered
        return False

    def _contents(self) -> tuple[list[object], list[int]]:
        """All layers and parameters of the model, and where parameters are."""
        with undirected():
            return contents(self._layers), _places(self._params)

    def bring_home(self, *, unregistered: bool = False) -> None:
        """Put layers and parameters back that a method has replaced.

        That is noted as a failure: what was put there was never checked, and compiled
        graphs go on with the memory that they know.

        Args:
            unregistered: see `_is_changed`; at the end of an update, and before its
                first load.

        """
        if not self._is_changed(unregistered=unregistered):
            return
        for layer, children in self._children:
            if layer._modules != children:
                layer._modules.update(children)
                self._note_replaced(f"the layers of {type(layer).__name__}")
        for name, layer, key, param, place in self._homes:
            is_own = layer._parameters.get(key) is param
            if is_own and len({*_places([param, place])}) == 1:
                continue
            param.data = place
            layer._parameters[key] = param
            registrations.changed()
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
        self.bring_home(unregistered=True)
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


def _places(params: Sequence[torch.Tensor]) -> list[int]:
    """The addresses of parameters; one without memory has that of its storage."""
    found = [*map(torch.Tensor.data_ptr, params)]  # without a function of Python
    if all(found):
        return found
    both = zip(found, params, strict=True)
    return [at or -int(param.untyped_storage()._cdata) for at, param in both]


def write_conflict(
    method: str, what: object, why: str = "in a way that cannot be verified"
) -> Conflict:
    """The error of a write that is not let through; `why` follows it as a clause."""
    return Conflict(
        f"{method} of the worker extension writes into {what} itself, {why}: an "
        "adopted method gives its tensors to load_weights, or copies them into "
        "parameters, each element once; start the engine with --inflight-adopt off"
    )
