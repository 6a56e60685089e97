"""The tripwire of one rank: it detects writes into live weights that no update makes.

A worker extension, a function given to `collective_rpc`, or Python code in the engine's
own process may write into live weights. The tripwire detects four signs of it:

| sign | what it detects |
|---|---|
| a tensor goes into `load_weights` of a live model | every load, at its first tensor |
| upstream's reload sets a layer aside, or writes it | every reload |
| version counters and addresses of parameters | writes by torch, except `.data` |
| fingerprints of parameters (fingerprint.py) | changed bytes in memory |

The first two are noted when they happen, and posted on the status board. The other two
are compared with an earlier reference when the engine core asks.

Some kernels declare that they write weights which they only read, as the CPU build's
for int4 does. Torch's compiler then copies such a weight back in each step, and its
version counter rises. The warm-up shows which weights these are. Their counters are
not compared.

When upstream's reload has set a layer aside, the parameters of the layer have no memory
until all of its tensors have come. A step on such a layer would end the engine.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vllm.inflight import upstream
from vllm.inflight.errors import Conflict
from vllm.inflight.update import DRAFT, WEIGHTS
from vllm.inflight.worker.adopted_call import is_of_method, rejected
from vllm.inflight.worker.integrity import fingerprint
from vllm.inflight.worker.model import layerwise_reload, registrations
from vllm.inflight.worker.model.kinds.drafter import served_by, trees
from vllm.inflight.worker.model.kinds.mla import is_derived
from vllm.inflight.worker.model.kinds.quantized import has_cache_scales
from vllm.inflight.worker.model.layers import layers, parameters, parameters_by_name
from vllm.inflight.worker.model_state import ModelState, recall
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.worker_state import Adopter

logger = upstream.init_logger(__name__)

MOST_NAMED = 4
"""Most missing parameters that a report names."""

State = tuple[int, int, int]
"""Of a parameter: the id of the object, its version counter, its address."""


@dataclass(frozen=True, slots=True)
class WatchedBy:
    """The tripwire of the rank whose live model a layer belongs to."""

    tripwire: weakref.ref[Tripwire]
    """Weak: the layer does not keep the tripwire alive."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The report of a rank on writes."""

    is_written: bool = False
    """Whether there was a write since the engine core last took note."""
    is_loading: bool = False
    """Whether a reload that has not ended has set layers aside."""
    asleep: list[str] = field(default_factory=list)
    """The parts of the memory that are given back, so that nothing can be compared."""
    woken: list[str] = field(default_factory=list)
    """Parts that have got memory again since the engine core last took note."""
    lost: list[str] = field(default_factory=list)
    """Parts whose content was given up since then."""
    missing: list[str] = field(default_factory=list)
    """The first parameters that were made blank and are not fully written."""
    num_missing: int = 0
    num_required: int = 0
    """Number of parameters that were made blank; 0 if none was."""
    thread: tuple[int, int] | None = None
    """Process and thread that have begun the reload."""
    displaced: list[str] = field(default_factory=list)
    """Parameters that now lie elsewhere in another form, and stay there."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the reply of an RPC."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters whose views are kept, so that a look takes little Python."""

    params: Mapping[str, torch.nn.Parameter]
    """All of the model's, as `parameters_by_name` returned them."""
    found: list[torch.nn.Parameter]
    """Those of them that have memory."""
    addresses: list[int]
    """Of all."""
    lines: fingerprint.Lines
    """Of those that have memory."""

    @classmethod
    def of(cls, params: Mapping[str, torch.nn.Parameter]) -> Sampling:
        """The views of these parameters, where they lie now."""
        found = [param for param in params.values() if _has_memory(param)]
        lines = fingerprint.Lines([param.data for param in found])
        return cls(params, found, _addresses(params), lines)

    def is_current(self) -> bool:
        """Whether each parameter lies where it did."""
        return _addresses(self.params) == self.addresses


class Tripwire:
    """The tripwire of one rank.

    Args:
        worker: of this rank; its models are loaded.

    """

    def __init__(self, worker: upstream.WorkerBase) -> None:
        self._root = served_by(worker)
        parallel = worker.vllm_config.parallel_config
        self._moves_experts = parallel.enable_eplb
        """Whether upstream itself writes into experts, between any two steps."""
        self._board: StatusBoard | None = None
        self._is_eager = False
        self.adopter: Adopter | None = None
        """What loads in place of the live model; None if nothing does."""
        self.before_load: Callable[[], None] | None = None
        """Called before a live model is loaded into; None if nothing is."""
        self._asleep: dict[str, bool] = {}
        """Part of the memory that is given back → whether its content comes back."""
        self._woken: set[str] = set()
        self._lost: set[str] = set()
        """See `WriteReport`, as for `_woken`."""
        self._is_written = False
        self._may_load = False
        """Whether a reload was begun; it may have ended since."""
        self._thread: tuple[int, int] | None = None
        self._reference: tuple[list[State], fingerprint.Sample] | None = None
        self._blank: dict[str, torch.nn.Parameter] | None = None
        """Parameters that were made blank and are not fully written yet."""
        self._num_blank = 0
        self.is_filling = False
        """Whether an update fills lost weights in place; until its commit, none of them
        counts as written."""
        self._homes: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        """Parameters and their memory, on a device whose graphs refer to that memory.
        """
        self._loaded: dict[str, tuple[weakref.ref[torch.nn.Parameter], int]] = {}
        """Parameters and their version counters, until the engine is warmed up; of the
        CPU build only."""
        self.copied_back: frozenset[str] = frozenset()
        """Parameters that the engine's own steps write with the bytes that are there.
        """
        self._sampling: Sampling | None = None
        """How parameters that stay in their homes were sampled last."""
        self._displaced: set[str] = set()
        if worker.device.type == "cuda":
            self.keep_places()
        else:
            for name, _, _, param in parameters(self._root):
                self._loaded[name] = weakref.ref(param), _version(param)
        for tree in trees(self._root):
            for layer in tree.modules():
                ModelState.of(layer).set(WatchedBy(weakref.ref(self)))
            if hasattr(tree, "load_weights"):
                vars(tree)["load_weights"] = NotedLoad(tree)

    def attach(self, board_path: str, num_ranks: int, is_eager: bool) -> None:
        """Open the status board of the engine.

        Args:
            board_path: of its file.
            num_ranks: of the engine.
            is_eager: whether Python code beside the engine can reach the weights at
                any time,
                so that there always has to be a reference.

        """
        self._board, self._is_eager = StatusBoard(board_path, num_ranks), is_eager
        self.changed()

    def keep_places(self) -> None:
        """Keep every parameter where it is from now on.

        On a GPU, a flip exchanges the pages of these places, and graphs read them. A
        parameter that was moved is brought back when the tripwire looks at it.
        """
        for name, _, _, param in parameters(self._root):
            if _has_memory(param):
                self._homes[name] = param, param.data

    @property
    def is_asleep(self) -> bool:
        """True from a sleep of this worker until its weights are awake."""
        return WEIGHTS in self._asleep

    # ------------------------------------------------------- what is noted
    def note_asleep(self, parts: Collection[str], kept: Collection[str]) -> None:
        """Parts of the memory are given back now.

        Args:
            parts: `weights`, `kv_cache`; those that sleep already stay as they are.
            kept: the parts whose content comes back when they wake up.

        """
        for part in {*parts} - self._asleep.keys():
            self._asleep[part] = part in kept
            if part not in kept:
                self._lost.add(part)
        self._touch()

    def note_awake(self, parts: Collection[str] | None, kept: Iterable[str]) -> None:
        """Parts have memory again.

        Weights without their content are made blank, before anything can write them.

        Args:
            parts: that woke up; None for all.
            kept: patterns of the names of parameters whose content was restored.

        """
        woken = {part for part in self._asleep if parts is None or part in parts}
        has_content = {part: self._asleep.pop(part) for part in woken}
        self._woken |= woken
        if not has_content.get(WEIGHTS, True):
            try:
                self.make_blank(kept)
            except Exception:  # they count as incomplete until an update of all
                logger.exception("lost weights could not be marked")
        self._touch()

    def acknowledge_sleep(
        self, woken: Collection[str] | None = None, lost: Collection[str] | None = None
    ) -> None:
        """The engine core knows which parts have woken up, and which are lost.

        Args:
            woken: those that it knows; None for all.
            lost: likewise.

        """
        self._woken -= self._woken if woken is None else {*woken}
        self._lost -= self._lost if lost is None else {*lost}

    def note(self) -> None:
        """Live weights are being written now."""
        self._is_written = True
        self._touch()

    def note_load(self) -> None:
        """Upstream's reload is setting layers aside now."""
        self._may_load = True
        self._thread = (os.getpid(), threading.get_ident())
        self._touch()

    def note_copied(self, layer: torch.nn.Module) -> None:
        """Upstream's reload has written all of a layer.

        The CPU build packs weights, so their parameters are empty and have no bytes
        that could
        be compared.
        """
        if self._blank is not None:
            own = {id(each) for each in layer._parameters.values() if each is not None}
            for name, param in list(self._blank.items()):
                if id(param) in own and not param.numel():
                    del self._blank[name]

    # ------------------------------------------------------- what is asked
    def arm(self) -> None:
        """Take the reference, unless there is one."""
        is_busy = self.is_asleep or self.is_filling or self.is_loading()
        if self._reference is None and not is_busy:
            self._reference = self._now()

    def changed(self) -> None:
        """An update, a reload or a sleep has changed the weights, and that is known."""
        self._reference = self._blank = None
        self._num_blank, self.is_filling = 0, False
        if self._is_eager:
            self.arm()  # it never fails: a flip that was made would look undone

    def begin_fill(self) -> None:
        """An update begins to fill lost weights in place: its writes are no news.

        Until its commit, only loads and reloads of others are noticed, and from
        `end_fill` on all writes.
        """
        self.is_filling, self._reference = True, None

    def end_fill(self) -> None:
        """The update has written the last of the lost weights."""
        self._reference = self._now()

    def look(self) -> WriteReport:
        """Compare the weights with the reference; returns a report."""
        sleep: dict[str, Any] = {
            "asleep": sorted(self._asleep),
            "woken": sorted(self._woken),
            "lost": sorted(self._lost),
        }
        if self.is_asleep:
            return WriteReport(is_written=self._is_written, **sleep)
        is_loading = self.is_loading()
        if not is_loading:
            self._bring_home()
            self._compare()
        missing = [] if self._blank is None else list(self._blank)
        return WriteReport(
            is_written=self._is_written,
            is_loading=is_loading,
            missing=missing[:MOST_NAMED],
            num_missing=len(missing),
            num_required=self._num_blank,
            thread=self._thread if is_loading else None,
            displaced=sorted(self._displaced)[:MOST_NAMED],
            **sleep,
        )

    def acknowledge(self) -> None:
        """The engine core has taken note of the write."""
        registrations.changed()  # it may have given a parameter other memory
        self._is_written = False
        self._reference = None
        self.arm()

    def put_back(self) -> None:
        """Take the live model out of a reload that has not ended."""
        for tree in trees(self._root):
            layerwise_reload.leave(tree)
        self._may_load = False

    def put_back_for_step(self) -> None:
        """End a reload when a step comes in the middle of it, and must not fail."""
        if self._may_load and self.is_loading():
            logger.error(
                "a step came while a reload had set layers aside; "
                "they were put back, and that reload has failed"
            )
            self.put_back()
            self._touch()

    def make_blank(self, kept: Iterable[str] = ()) -> None:
        """Make the weights blank: all of them have to be written from now on.

        Weights of a drafter are left alone, as they decide no token. So are parameters
        that are
        computed from others.

        Args:
            kept: patterns of the names of parameters that are left as they are.

        """
        # What an update has filled in part is no version's.
        patterns = [DRAFT + "*", *(() if self.is_filling else kept)]
        blank = {}
        with torch.no_grad():
            for name, layer, key, param in parameters(self._root):
                is_kept = any(fnmatchcase(name, pattern) for pattern in patterns)
                is_made = has_cache_scales(layer) or is_derived(layer, key)
                if is_kept or is_made or not _may_be_blank(param):
                    continue
                if not param.numel() or fingerprint.make_blank(param.data):
                    blank[name] = param
        self.changed()
        self._blank, self._num_blank = blank, len(blank)

    def is_loading(self) -> bool:
        """Whether a reload that has not ended has set layers aside."""
        if self._may_load:
            self._may_load = any(
                upstream.get_layerwise_info(layer).kernel_tensors is not None
                for _, layer in layers(self._root)
            )
        return self._may_load

    def warmed_up(self) -> None:
        """Note which parameters the steps have written that ran since the start."""
        now = parameters_by_name(self._root)
        self.copied_back = frozenset(
            name
            for name, (loaded, count) in self._loaded.items()
            if (param := loaded()) is not None
            and now.get(name) is param
            and _version(param) != count
        )
        self._loaded = {}
        if not self.copied_back:
            return
        logger.info(
            "compiled steps copy %d parameters back; writes from outside into "
            "these are noticed by samples of their bytes alone",
            len(self.copied_back),
        )
        self._reference = None
        if self._is_eager:
            self.arm()

    # ------------------------------------------------------------- helpers
    def _touch(self) -> None:
        if self._board is not None:
            self._board.touch()

    def _bring_home(self) -> None:
        if not self._homes:
            return
        moved: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        # The walk that finds the layers is slow, and decoding waits for it.
        for name, param in parameters_by_name(self._root).items():
            home = self._homes.get(name)
            if home is None or _is_at_home(param, *home):
                continue
            self._is_written = True
            if (param.shape, param.dtype) != (home[1].shape, home[1].dtype):
                self._displaced.add(name)
                continue
            moved[name] = home
        if not moved:
            return
        with torch.no_grad():
            for name, layer, key, param in list(parameters(self._root)):
                if name in moved:
                    own, place = moved[name]
                    place.copy_(param.data)
                    own.data = place
                    layer._parameters[key] = own
        registrations.changed()

    def _compare(self) -> None:
        if self.is_filling and self._reference is None:
            return  # the writes are those of an update
        now = self._now()
        if now is not None and self._reference is not None:
            (states, sampled), (states_now, sampled_now) = self._reference, now
            is_same = fingerprint.is_same(sampled, sampled_now)
            self._is_written |= states != states_now or not is_same
        self._reference = now
        if self._blank and not self.is_filling:
            self._blank = {
                name: param
                for name, param, sampled in _with_samples(self._blank)
                # All of a parameter is read only if its sample looks full.
                if fingerprint.is_blank_in(sampled)
                or not param.numel()
                or fingerprint.has_blank(param.data)
            }

    def _now(self) -> tuple[list[State], fingerprint.Sample] | None:
        """States and samples of all parameters; None if they cannot be taken."""
        if self._moves_experts:
            return None
        try:
            return self._sampled()
        except Exception as error:  # no memory for it, or a tensor of another kind
            logger.warning("live weights could not be sampled: %s", error)
            return None

    def _sampled(self) -> tuple[list[State], fingerprint.Sample]:
        if not self._homes:  # what is kept would hold memory that the model has left
            named = [(n, p) for n, *_, p in parameters(self._root) if _has_memory(p)]
            lines = fingerprint.Lines([p.data for _, p in named])
            states = [_state(p, n not in self.copied_back) for n, p in named]
            return states, lines.read()
        params = parameters_by_name(self._root)
        known = self._sampling
        if known is None or known.params is not params or not known.is_current():
            self._sampling = known = Sampling.of(params)
        # Graphs of a GPU leave the counters alone.
        return [_state(param) for param in known.found], known.lines.read()

    def noted(self, weights: Iterable[Any]) -> Iterable[Any]:
        """`weights` for `load_weights`; the first tensor taken from them is noted."""
        # While every layer is set aside, only upstream's copy of a complete layer
        # writes, and that is noted there.
        if self._may_load and all(p.is_meta for *_, p in parameters(self._root)):
            return weights
        if isinstance(weights, list | tuple | dict):
            if weights:
                self.note()
            return weights
        return self._noted_when_drawn(weights)

    def _noted_when_drawn(self, weights: Iterable[Any]) -> Iterator[Any]:
        for pair in weights:
            self.note()
            yield pair


class NotedLoad:
    """The `load_weights` of a live model, which tells the tripwire of its rank.

    A copy of the model gets a `NotedLoad` of its own, and no tripwire watches the copy.

    Args:
        model: that is loaded into.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._whole = vars(model).get("load_weights")
        """The attribute that was there before; None for the method of the class."""

    def __call__(self, weights: Iterable[Any], *args: object, **kwargs: object) -> Any:
        """Load, as the model does."""
        if is_of_method():
            error = Conflict(
                "a method of the worker extension loads into the live model, which it "
                "has kept since an earlier call, and its calls are adopted; start the "
                "engine with --inflight-adopt off"
            )
            raise rejected(error)
        if (tripwire := tripwire_of(self._model)) is not None:
            adopted = None
            if tripwire.adopter is not None and not tripwire.is_loading():
                adopted = tripwire.adopter(weights)
            if adopted is not None:
                return adopted
            if tripwire.before_load is not None:
                tripwire.before_load()
            weights = tripwire.noted(weights)
        if self._whole is not None:
            return self._whole(weights, *args, **kwargs)
        load: Callable[..., Any] = type(self._model).load_weights  # type: ignore[attr-defined]
        return load(self._model, weights, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NotedLoad:
        return NotedLoad(memo.get(id(self._model), self._model))


def tripwire_of(layer: torch.nn.Module) -> Tripwire | None:
    """The tripwire of the rank whose live model has `layer`; None if there is none."""
    watched = recall(layer, WatchedBy)
    return None if watched is None else watched.tripwire()


def _with_samples(
    params: dict[str, torch.nn.Parameter],
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    samples = fingerprint.sample([param.data for param in params.values()])
    for (name, param), sampled in zip(params.items(), samples, strict=True):
        yield name, param, sampled


def _addresses(params: Mapping[str, torch.nn.Parameter]) -> list[int]:
    # A parameter without memory has the address 0, and a wrapper tensor may have none.
    return [
        0 if is_traceable_wrapper_subclass(param) else param.data_ptr()
        for param in params.values()
    ]


def _state(param: torch.nn.Parameter, has_counter: bool = True) -> State:
    return id(param), _version(param) if has_counter else 0, param.data_ptr()


def _is_at_home(
    param: torch.nn.Parameter, own: torch.nn.Parameter, place: torch.Tensor
) -> bool:
    """Whether a layer has its own parameter, where it was placed."""
    return param is own and param.data_ptr() == place.data_ptr()


def _has_memory(param: torch.Tensor) -> bool:
    """Whether there are bytes to compare; wrapper tensors have none of their own."""
    is_made_of_others = is_traceable_wrapper_subclass(param)
    return bool(param.numel()) and not (param.is_meta or is_made_of_others)


def _may_be_blank(param: torch.Tensor) -> bool:
    """Whether a parameter can be made blank; a packed one has no memory."""
    return not param.numel() or _has_memory(param)


def _version(param: torch.Tensor) -> int:
    return 0 if param.is_inference() else int(param._version)
