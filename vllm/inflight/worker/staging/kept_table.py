"""The table of kept tensors: quantised layers that serve the checkpoint's own bytes.

Upstream processes a quantised layer once its tensors are loaded. Many kernels read the
bytes and scales of the checkpoint all the same: as they are, turned, or in another
shape. Then a delta may change single elements of the layer. Other kernels permute the
bytes, or compute new ones. No delta changes their layers.

The kernel is not asked. When the engine starts, each quantised layer is loaded from
patterns and processed, as at any update, in memory of its own. No two elements of the
layer's tensors have the same pattern. A layer is kept only if all of its parameters
show these patterns where the table says, or show the same content whatever was loaded.
Processing may leave some values alone and change others. So further patterns have all
finite values of bytes, scales of zero, and scales next to the smallest and the largest
number of their dtype. Whoever computes with these gets other bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm.inflight import upstream
from vllm.inflight.ops.reference import row_major
from vllm.inflight.worker.model import layerwise_reload
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.model.layers import layers
from vllm.inflight.worker.replay_check import (
    PIECE,
    as_integers,
    is_equal,
)
from vllm.inflight.worker.replay_plan import Copied, Entry, View
from vllm.inflight.worker.shadow.parameters import make_empty
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.coverage import Coverage, Fill

USUAL = -12, 5
"""Usual scales are between these powers of two."""

ZERO_SHARE = 1 / 16
"""The share of zeros among random scales."""

logger = upstream.init_logger(__name__)

Patterns = dict[str, torch.Tensor]
Params = Mapping[str, torch.Tensor]


class Form(NamedTuple):
    """Shape and dtype of a checkpoint tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Made(NamedTuple):
    """What processing has made of a layer."""

    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    """What the layer, its scheme and its kernel keep in Python."""


class Candidate(NamedTuple):
    """Where a parameter may be served that was loaded: in which one, and the strides
    there for the dimensions of the loaded one."""

    param: str
    strides: tuple[int, ...]


def fill_kept(shadow: ShadowModel) -> None:
    """Find the tensors of quantised layers that are served as the checkpoint has them.

    The result is in `shadow.kept`, and for other layers the reason in `shadow.unkept`.
    A layer whose tensors the start checkpoint does not have is in neither.
    """
    # The CPU build makes whole tensors of a delta, and processes their layers.
    is_by_element = shadow.log is not None or shadow.plan.is_replayed
    if shadow.module is None or not shadow.quantised or not is_by_element:
        return
    began = time.monotonic()
    live, second = dict(layers(shadow.live)), dict(layers(shadow.module))
    with torch.no_grad(), shadow.device:
        for path, forms in _by_layer(shadow).items():
            trial = Trial(shadow, path, live[path], second[path], forms)
            try:
                entries = trial.run()
            except NotKept as reason:
                shadow.unkept[path] = str(reason)
                continue
            except Exception as error:  # memory is missing, or a layer is unlike others
                logger.warning("layer %s was not tried", path, exc_info=True)
                shadow.unkept[path] = f"it was not tried: {error!r}"
                continue
            for name, entry in entries.items():
                shadow.kept.keep(name, entry)
                shadow.kept.prove([entry])
    if shadow.log is None:
        # The patterns are in the shadow weights.
        shadow.stale.update(shadow.quantised)
    logger.info(
        "%d tensors of quantised layers are served as a checkpoint has them; to find "
        "them took %.1f s",
        len(shadow.kept),
        time.monotonic() - began,
    )


def _by_layer(shadow: ShadowModel) -> dict[str, dict[str, Form]]:
    """Quantised layer → the tensors of the start checkpoint that fill it."""
    found: dict[str, dict[str, Form]] = {}
    for name, (shape, dtype) in shadow.start_checkpoint.known.items():
        params = shadow.places.params_of(name) & shadow.quantised
        paths = {param.rpartition(".")[0] for param in params}
        if shape is None or dtype is None or len(paths) != 1:
            continue
        form = Form(torch.Size(shape), getattr(torch, dtype))
        found.setdefault(paths.pop(), {})[name] = form
    return found


class NotKept(Exception):
    """A layer is not served as the checkpoint has it; the message says why."""


class Trial:
    """Loads one layer from patterns, and looks at what processing makes of them.

    Args:
        shadow: the shadow model.
        path: name of the layer.
        served: the layer of the live model.
        layer: that of the shadow model.
        forms: of the tensors of a checkpoint that fill the layer.

    """

    def __init__(
        self,
        shadow: ShadowModel,
        path: str,
        served: torch.nn.Module,
        layer: torch.nn.Module,
        forms: Mapping[str, Form],
    ) -> None:
        self._shadow = shadow
        self._path = path
        self._layer = layer
        self._forms = forms
        self._served = served
        own = served._parameters.items()
        self._live = {key: param for key, param in own if param is not None}
        self._copies: dict[str, list[tuple[str, Copied]]] = {}
        """Parameter in load format → each copy into it, and its tensor."""
        self._places: dict[str, list[Candidate]] = {}
        """Parameter in load format → where it may be served."""
        self._constant: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
        """Other tensors of the layer, and its numbers; the same for every pattern."""

    def run(self) -> dict[str, Entry]:
        """The entry of each tensor of the layer.

        Raises:
            NotKept: the layer is not served as the checkpoint has it.

        """
        for beside in quantized.kept(self._served, self._served):
            raise NotKept(f"its kernel keeps a copy of it ({beside[-1]})")
        for number, patterns in enumerate(self._patterns()):
            if number:
                made = self._loaded(partial(self._shadow.load, patterns.items()))
            else:
                made = self._first_loaded(patterns)
            self._look(made, patterns)
        return self._entries()

    def _first_loaded(self, patterns: Patterns) -> Made:
        """Load the layer for the first time, and record what its loaders copy.

        Each call of a model's loader walks through the whole model, and a layer of
        experts has hundreds of tensors. So all are given in one call. A loader may keep
        tensors until it has them all: it gets each in a call of its own then.
        """
        try:
            return self._loaded(partial(self._record, patterns, at_once=True))
        except NotKept:
            self._copies.clear()
            return self._loaded(partial(self._record, patterns, at_once=False))

    def _patterns(self) -> Iterator[Patterns]:
        device = self._shadow.device
        num = sum(form.shape.numel() for form in self._forms.values())
        bits = min(_bits(form.dtype) for form in self._forms.values())
        for digit in range(max(1, math.ceil((num - 1).bit_length() / bits))):
            first, patterns = 0, Patterns()
            for name, form in self._forms.items():
                patterns[name] = _numbered(form, first, bits * digit, bits, device)
                first += form.shape.numel()
            yield patterns
        for seed, size in enumerate(("usual", "small", "large")):
            generator = torch.Generator(device).manual_seed(seed)
            forms = self._forms.items()
            yield {name: _random(form, size, generator) for name, form in forms}

    def _loaded(self, load: Callable[[], object]) -> Made:
        """What processing makes of the layer when it is loaded from patterns."""
        layer, made = self._layer, list[Made]()
        try:
            upstream.initialize_layerwise_reload(layer)
            with self._watched(made):
                load()
        except (NotKept, torch.OutOfMemoryError):
            raise
        except Exception as error:  # loaders and kernels raise many kinds of errors
            logger.debug("layer %s took no pattern", self._path, exc_info=True)
            raise NotKept(f"it was not loaded from patterns: {error}") from error
        finally:
            layerwise_reload.leave(layer)
        if len(made) != 1:
            raise NotKept("the start checkpoint does not fill all of it")
        return made[0]

    @contextmanager
    def _watched(self, made: list[Made]) -> Iterator[None]:
        """Context: what processing makes of the layer is added to `made`."""
        method: Any = self._layer.quant_method
        original = method.process_weights_after_loading
        own = vars(method).get("process_weights_after_loading")

        def process(layer: torch.nn.Module) -> None:
            original(layer)
            params, buffers = layer._parameters.items(), layer._buffers.items()
            made.append(
                Made(
                    {key: param.data for key, param in params if param is not None},
                    {key: tensor for key, tensor in buffers if tensor is not None},
                    dict(_numbers(layer)),
                )
            )

        method.process_weights_after_loading = process
        try:
            yield
        finally:
            del method.process_weights_after_loading
            if own is not None:
                method.process_weights_after_loading = own

    def _record(self, patterns: Patterns, *, at_once: bool) -> None:
        """Load the layer, in one call or in one for each tensor, and record it."""
        layer, shadow = self._layer, self._shadow
        own = {k: p.shape for k, p in layer._parameters.items() if p is not None}
        coverage = Coverage(layer, own, set(), (), shadow.device)
        coverage.watch_loaders()
        try:
            # A bias has its memory all the time, and is written once more when the last
            # tensor has come.
            names = sorted(patterns, key=self._is_hollow)
            handed = self._handed(names, patterns, coverage)
            if at_once:
                shadow.load(handed)
            else:
                for pair in handed:
                    shadow.load([pair])
        finally:
            coverage.handed = coverage.entry = None
            coverage.unwatch()
        for key in self._copies:
            self._places[key] = list(self._places_of(own[key]))

    def _handed(
        self, names: Iterable[str], patterns: Patterns, coverage: Coverage
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors; what the loader has done with one is recorded at the next."""
        for name in names:
            entry = Entry(patterns[name].shape, patterns[name].dtype)
            coverage.handed, coverage.entry = patterns[name], entry
            yield name, patterns[name]
            copies = {(copied.param, copied.view) for copied in entry.copies}
            if not entry.is_traced or not len(copies) == len(entry.filled) > 0:
                raise NotKept(f"the model's loader does not only copy {name}")
            for copied in entry.copies:
                self._copies.setdefault(copied.param, []).append((name, copied))

    def _is_hollow(self, name: str) -> bool:
        keys = (p.rpartition(".")[2] for p in self._shadow.places.params_of(name))
        held = [self._layer._parameters.get(key) for key in keys]
        return any(param is not None and param.is_meta for param in held)

    def _places_of(self, shape: torch.Size) -> Iterator[Candidate]:
        """Where a parameter of this shape may be served, if bytes stay as they are."""
        for key, served in self._live.items():
            if served.numel() != shape.numel():
                continue
            strides = []
            if served.shape == shape:
                strides.append(served.stride())
            if served.dim() == 2 and served.shape == shape[::-1]:
                strides.append(served.stride()[::-1])
            if served.is_contiguous():
                strides.append(tuple(row_major(shape)))
            yield from (Candidate(key, each) for each in dict.fromkeys(strides))

    def _look(self, found: Made, patterns: Patterns) -> None:
        """Keep the places that show the patterns, and compare everything else."""
        made = found.params
        if made.keys() != self._live.keys():
            raise NotKept("processing leaves other parameters than are served")
        for key, served in self._live.items():
            content = made[key]
            if (content.shape, content.dtype) != (served.shape, served.dtype):
                raise NotKept(f"processing gives {key} another form than is served")
            if content.stride() != served.stride():
                made[key] = make_empty(served, content.device).copy_(content)
        for key, places in self._places.items():
            shown = [p for p in places if self._shows(made[p.param], key, p, patterns)]
            if not shown:
                raise NotKept(f"its kernel reads {key} in another form")
            self._places[key] = shown
        shown_in = {place.param for each in self._places.values() for place in each}
        rest = {key: made[key] for key in self._live.keys() - shown_in}
        rest |= found.buffers
        if self._constant is None:
            rest = {key: tensor.clone() for key, tensor in rest.items()}
            self._constant = rest, found.numbers
        first, numbers = self._constant
        for key in rest.keys() | first.keys():
            a, b = rest.get(key), first.get(key)
            if a is None or b is None or not _is_same(a, b):
                raise NotKept(f"processing computes {key} from it")
        if found.numbers != numbers:
            raise NotKept("processing computes numbers from it")

    def _shows(
        self, content: torch.Tensor, key: str, place: Candidate, patterns: Patterns
    ) -> bool:
        """Whether a processed parameter shows the patterns of `key`."""
        for name, copied in self._copies[key]:
            pattern = patterns[name]
            view = self._view(key, copied.view, place)
            if view is None or content.dtype != pattern.dtype:
                return False
            offset, shape, stride = copied.part
            expected = pattern.as_strided(shape, stride, offset)
            at, _, steps = view
            found = content.as_strided(shape, steps, content.storage_offset() + at)
            if not is_equal(found, expected):
                return False
        return True

    def _view(self, key: str, view: View, place: Candidate) -> View | None:
        shape = self._shadow.required[f"{self._path}.{key}" if self._path else key]
        return moved(view, shape, place.strides)

    def _entries(self) -> dict[str, Entry]:
        found = {
            name: Entry(form.shape, form.dtype) for name, form in self._forms.items()
        }
        filled: dict[str, Fill] = {}
        for key, places in self._places.items():
            served_in = {place.param for place in places}
            if len(served_in) > 1:
                raise NotKept(f"{key} is served twice")
            place = places[0]
            if place.param in filled:
                raise NotKept(f"{place.param} is made of two parameters")
            fill = filled[place.param] = Fill(self._live[place.param].numel())
            param = f"{self._path}.{place.param}" if self._path else place.param
            for name, copied in self._copies[key]:
                view = self._view(key, copied.view, place)
                assert view is not None
                fill.views[view] = math.prod(view[1])
                moved_copy = copied._replace(param=param, view=view)
                found[name].copies.append(moved_copy)
                found[name].filled.append((param, view))
            if fill.missing:
                raise NotKept(f"{key} is padded")
        if any(not entry.copies for entry in found.values()):
            raise NotKept("a tensor of it is served nowhere")
        return found


def moved(view: View, shape: torch.Size, strides: tuple[int, ...]) -> View | None:
    """A view of a row-major tensor, in memory where its dimensions have other strides.

    Args:
        view: of a tensor of `shape`.
        shape: of the tensor.
        strides: of the dimensions of `shape` in the other memory.

    Returns:
        None if a dimension of the view is none of the tensor.

    """
    offset, sizes, steps = view
    own = row_major(shape)
    starts = []
    for step in own:
        start, offset = divmod(offset, step)
        starts.append(start)
    new = []
    for size, step in zip(sizes, steps, strict=True):
        dims = [d for d, n in enumerate(shape) if n > 1 and own[d] == step]
        if size == 1:
            new.append(1)
            continue
        if len(dims) != 1 or starts[dims[0]] + size > shape[dims[0]]:
            return None
        new.append(strides[dims[0]])
    first = sum(n * step for n, step in zip(starts, strides, strict=True))
    return first, sizes, tuple(new)


def _numbers(layer: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The numbers that a layer, its scheme and its kernel keep in Python."""
    owners: Iterable[Any] = (
        layer,
        quantized.scheme_of(layer),
        quantized.kernel_of(layer),
    )
    for at, owner in enumerate(owners):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, quantized.SCALARS):
                yield f"{at}.{name}", value


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same form and the same bits."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return not a.numel() or bool(is_equal(a, b))


def _bits(dtype: torch.dtype) -> int:
    """Bits of a number that one pattern of this dtype holds.

    A float of two bytes or more has them in its mantissa, so that a scale is a usual
    number. Bytes have no bits of NaN.
    """
    if dtype is torch.bool:
        return 1
    if not dtype.is_floating_point:
        return min(8 * dtype.itemsize, 32)
    if dtype.itemsize == 1:
        return 6
    return -round(math.log2(torch.finfo(dtype).eps))


def _numbered(
    form: Form, first: int, shift: int, bits: int, device: torch.device
) -> torch.Tensor:
    """A tensor of so many bits of the numbers of its elements, from `first` on."""
    pattern = torch.empty(form.shape, dtype=form.dtype, device=device)
    flat = as_integers(pattern).view(-1)
    base = 0
    if form.dtype.is_floating_point and form.dtype.itemsize > 1:
        one = torch.ones((), dtype=form.dtype, device="cpu")
        base = int(as_integers(one))
    for start in range(0, len(flat), PIECE):
        end = min(start + PIECE, len(flat))
        numbers = torch.arange(first + start, first + end, device=device)
        flat[start:end] = ((numbers >> shift) & ((1 << bits) - 1)) + base
    return pattern


def _random(form: Form, size: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of random finite values: all those of a byte, and scales of a size."""
    device = generator.device
    pattern = torch.empty(form.shape, dtype=form.dtype, device=device)
    flat = pattern.view(-1)
    is_wide = form.dtype.is_floating_point and form.dtype.itemsize > 1
    bits = 1 if form.dtype is torch.bool else min(8 * form.dtype.itemsize, 32)
    lowest, highest = _powers(form.dtype, size) if is_wide else (0, 1 << bits)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE]
        drawn = torch.randint(
            lowest, highest, (len(piece),), generator=generator, device=device
        )
        if is_wide:
            share = torch.rand(
                len(piece), generator=generator, device=device, dtype=torch.float64
            )
            scales = torch.ldexp(1 + share, drawn)
            piece.copy_(torch.where(share < ZERO_SHARE, 0, scales))
            continue
        integer = as_integers(piece)
        integer.copy_(drawn)
        if form.dtype.is_floating_point:
            integer[~piece.to(torch.float32).isfinite()] = 1
    return pattern


def _powers(dtype: torch.dtype, size: str) -> tuple[int, int]:
    """The powers of two between which scales of a size are."""
    lowest, highest = (
        math.frexp(number)[1] - 1
        for number in (torch.finfo(dtype).tiny, torch.finfo(dtype).max)
    )
    return {
        "usual": USUAL,
        "small": (lowest, lowest + 8),
        "large": (highest - 8, highest),
    }[size]
