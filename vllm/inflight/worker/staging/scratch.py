"""Scratch memory: what a loader computes is compared as a whole, with delta staging.

Most loaders copy, so each element of a tensor has its place in a live parameter. Some
compute: Mamba's `A` is -exp of the checkpoint's tensor, and Llama 4 permutes the rows
of its queries and keys. Such a parameter is loaded by its own loader, into memory as
large as the parameter. Once all of its tensors have come, the result is compared with
what is served, and the memory is free again.

When the engine starts, each of these parameters is loaded twice, into memory of
different content. What depends on that, or is not filled, cannot be loaded so.

Small tensors of this kind are kept as they came, in host memory. So a delta may change
elements of them: the changed tensor is made whole, and its parameter is computed again.
That is so with shadow parameters, too, where loaders compute in these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from vllm.inflight import ops, upstream
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.worker.integrity.scrub import digests_of
from vllm.inflight.worker.replay_check import MARGIN_BYTES
from vllm.inflight.worker.replay_plan import Entry
from vllm.inflight.worker.shadow.parameters import lend, standing_in
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.coverage import Coverage

LARGEST = 8
"""The numbers of a trial are below this: no loader overflows at their exponential."""

NUM_DRAWN = 1 << 20
"""Random numbers of a trial. A larger tensor has them again and again."""

KEPT_SHARE = 256
"""Tensors are kept if all of them take at most this part of the weights' bytes."""

logger = upstream.init_logger(__name__)


class ScratchParameters:
    """Memory of the parameters that loaders compute, during one update.

    Args:
        shadow: the shadow model, whose parameters have no memory.
        coverage: of the update.
        content: what all elements are before they are loaded.

    """

    def __init__(
        self, shadow: ShadowModel, coverage: Coverage, content: int = 0
    ) -> None:
        self._shadow, self._coverage, self._content = shadow, coverage, content
        self._held: dict[str, torch.nn.Parameter] = {}
        """Parameters that are not whole yet."""
        self.kept: dict[str, torch.Tensor] = {}
        """Tensors as they came, on the host."""
        self._keeps = _are_small(shadow)

    def load(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Load a tensor of `shadow.computed`.

        Returns:
            the content of each parameter that is whole by that. Loaders raise many
            kinds of errors.

        """
        coverage, params = self._coverage, self._shadow.computed[name]
        coverage.touched.clear()
        coverage.handed, coverage.entry = tensor, Entry(tensor.shape, tensor.dtype)
        try:
            with self._lent(params):
                self._shadow.load([(name, tensor)])
        finally:
            coverage.handed = coverage.entry = None
        whole = [param for param in params if not coverage.fills[param].missing]
        return {param: self._held.pop(param).data for param in whole}

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor for a later delta, if all of them are small."""
        if self._keeps:
            self.kept[name] = to_host(tensor) if tensor.is_cuda else tensor.clone()

    @contextmanager
    def _lent(self, params: Collection[str]) -> Iterator[None]:
        """Context: these parameters have memory, and what was loaded into it."""
        module = self._shadow.module
        assert module is not None
        if missing := set(params) - self._held.keys():
            for name, param in lend(module, missing, self._device(missing)).items():
                self._held[name] = param
                param.fill_(self._content)
        held = {name: self._held[name] for name in params}
        with standing_in(module, held), self._coverage.watching_memory():
            yield

    def _device(self, params: Iterable[str]) -> torch.device:
        """The device of the engine; the host where that has no room."""
        shadow = self._shadow
        assert shadow.module is not None
        num_bytes = sum(shadow.module.get_parameter(name).nbytes for name in params)
        has_room = num_bytes + MARGIN_BYTES < shadow.spare_bytes()
        return shadow.device if has_room else torch.device("cpu")


def find_computed(
    shadow: ShadowModel, short: Iterable[str], filled: Mapping[str, Collection[str]]
) -> list[str]:
    """Find the tensors of which loaders compute parameters.

    The result is in `shadow.computed`. With delta staging, no entry of the plan is left
    of these tensors. With shadow parameters large ones are of no use there.

    Args:
        shadow: the shadow model, its parameters on `meta`, whose plan has been proved.
        short: parameters that the plan does not fill.
        filled: tensor of the start checkpoint → the parameters that it fills.

    Returns:
        the parameters that cannot be loaded so.

    """
    wanted, computed = set(short), shadow.computed
    # A tensor fills all of its parameters at once, and a parameter wants all of its
    # tensors.
    while more := {
        name: frozenset(params)
        for name, params in filled.items()
        if name not in computed and not wanted.isdisjoint(params)
    }:
        computed |= more
        wanted.update(*more.values())
    if shadow.log is not None:
        shadow.plan.reject(computed)
    elif not _are_small(shadow):
        computed.clear()
        return []
    seen = [_trial(shadow, content) for content in (0, 1)]
    wrong = {name for name in wanted if seen[0].get(name) != seen[1].get(name)}
    wrong |= wanted - seen[0].keys()
    logger.info(
        "of %d tensors the model's loader computes %d parameters, at every update",
        len(computed),
        len(wanted - wrong),
    )
    return sorted(wrong)


def _are_small(shadow: ShadowModel) -> bool:
    """Whether the tensors that loaders compute with may all be kept."""
    num_bytes = sum(tensor.nbytes for _, tensor in _hollow(shadow))
    return num_bytes <= shadow.nbytes // KEPT_SHARE


def _hollow(shadow: ShadowModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `shadow.computed`, as in the start checkpoint but without
    content."""
    for name in shadow.computed:
        shape, dtype = shadow.start_checkpoint.known[name]
        assert shape is not None and dtype is not None
        form = tuple(shape), getattr(torch, dtype)
        yield name, torch.empty(form[0], dtype=form[1], device="meta")


def _trial(shadow: ShadowModel, content: int) -> dict[str, ops.Digest]:
    """Load all computed parameters from random numbers, the same at each trial.

    Returns:
        the digest of each parameter that was filled, every element by one tensor.

    """
    assert shadow.module is not None
    coverage = Coverage(shadow.module, shadow.required, set(), (), shadow.device)
    scratch = ScratchParameters(shadow, coverage, content)
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.rand(NUM_DRAWN, generator=generator, device="cpu").mul_(LARGEST)
    found: dict[str, ops.Digest] = {}
    coverage.watch(lambda weights: None)
    try:
        for name, hollow in _hollow(shadow):
            tensor = torch.empty_like(hollow, device="cpu")
            for piece in tensor.view(-1).split(NUM_DRAWN):
                piece.copy_(drawn[: len(piece)])
            try:
                whole = scratch.load(name, tensor)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # every loader raises its own kind of error
                logger.debug("the loader did not take %r", name, exc_info=True)
                continue
            found |= digests_of(list(whole.items()), shadow.device)
    finally:
        coverage.unwatch()
    return {n: digest for n, digest in found.items() if n not in coverage.refilled}
