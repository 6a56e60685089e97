"""The destination table: where each checkpoint tensor is served, known from the start.

The model's own loaders are called when the engine starts, with tensors of the start
checkpoint's names, shapes and dtypes, and without content. The parameters have no
memory. What a loader would write is recorded, and proved with index patterns
(replay_check.py).

With shadow parameters the table is the replay plan: the first update is replayed. What
is not in the table is loaded by the first update, and recorded then. With delta staging
every element needs its place in the table, but for those of parameters that a loader
computes: scratch.py finds out whether these can be loaded beside the live ones.

The proof of a large model may take longer than an engine should wait. After some time
the engine starts all the same. The next update then proves the rest before it writes.

Quantised layers are left out: upstream processes them at every whole update, and what
it has made of them is compared as a whole. Where a delta may change them, kept_table.py
finds out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from math import prod

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.replay_plan import Entry
from vllm.inflight.worker.shadow.parameters import lent_memory
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.coverage import Coverage, Fill
from vllm.inflight.worker.staging.scratch import find_computed

MOST_PROOF_S = 60.0
"""Most seconds that the start of an engine waits for the proof."""

MOST_NAMED = 4
"""Most parameters that a message names."""

Pair = tuple[str, torch.Tensor]

logger = upstream.init_logger(__name__)


def fill_table(shadow: ShadowModel) -> str | None:
    """Record and prove where the tensors of the start checkpoint are served.

    Returns:
        why the model cannot be updated with one set of weights; None if it can, or if
        it has two. An engine whose start checkpoint is not known learns at its first
        update.

    """
    is_logged = shadow.log is not None
    has_table = is_logged or shadow.plan.is_replayed
    if shadow.module is None or not has_table or not len(shadow.start_checkpoint):
        return None
    began = time.monotonic()
    if is_logged:
        filled = _record_for_log(shadow)
        recorded = time.monotonic()
        is_whole = _prove(shadow)
        # A place that is recorded and not proved yet may still turn out to be wrong.
        # Updates are rejected then.
        if (reason := _computed_obstacle(shadow, filled, is_whole)) is not None:
            return reason
    else:
        recorded, is_whole = _fill_plan(shadow)
    logger.info(
        "%s: the places of %d tensors are proved; to find them took %.1f s, and to "
        "prove them %.1f s",
        "delta staging" if is_logged else "replay plan",
        shadow.plan.num_proved,
        recorded - began,
        time.monotonic() - recorded,
    )
    if not is_whole:
        logger.warning(
            "the proof of the replay plan was ended after %.0f s, so that the engine "
            "starts: the places of %d tensors are proved, and those of %d are not. The "
            "next update proves these before it writes, and takes longer",
            MOST_PROOF_S,
            shadow.plan.num_proved,
            shadow.plan.num_unproved,
        )
    return None


class _TimeIsUp(Exception):
    """The start of the engine waits no longer for the proof."""


def _prove(shadow: ShadowModel) -> bool:
    """Prove what is recorded; returns whether there was enough time for all of it."""
    ends = time.monotonic() + MOST_PROOF_S

    def between(num_bytes: int) -> None:
        if time.monotonic() >= ends:
            raise _TimeIsUp

    try:
        shadow.learn(between)
    except _TimeIsUp:
        shadow.plan.confirm()  # the next update proves it
        return False
    finally:
        if shadow.device.type == "cuda":
            # torch would keep what the largest parameter's proof took: twice its
            # bytes, and so 2 GiB of a model with 8 billion parameters.
            torch.cuda.empty_cache()
    return True


def _record_for_log(shadow: ShadowModel) -> dict[str, set[str]]:
    """Record where tensors are served, with delta staging.

    Each call of a model's loader walks through the whole model. So all tensors are
    given in one call, and only what that has not shown is given tensor by tensor.

    Returns:
        tensor → the parameters that it fills.

    """
    with torch.no_grad():
        trace = Trace(shadow)
        trace.run()
        filled = trace.filled
        if not trace.is_of_single_tensors:
            shadow.plan.forget()
            filled = {}
        if _not_filled(shadow, is_proved=False):
            trace = Trace(shadow)
            trace.run_one_by_one()
            filled |= trace.filled
        return filled


def _computed_obstacle(
    shadow: ShadowModel, filled: Mapping[str, set[str]], is_proved: bool
) -> str | None:
    """Why parameters that loaders compute cannot be updated; None if they can.

    Args:
        shadow: the shadow model, whose plan is recorded.
        filled: tensor → the parameters that it fills.
        is_proved: whether all of the plan has been proved.

    """
    if not (short := _not_filled(shadow, is_proved=is_proved)):
        return None
    try:
        with torch.no_grad(), shadow.device:
            wrong = find_computed(shadow, short, filled)
    except torch.OutOfMemoryError:
        return "there is no memory to try what its loader computes"
    if not wrong:
        return None
    num_more = len(wrong) - MOST_NAMED
    more = f" and {num_more} more" if num_more > 0 else ""
    return (
        "its loader does not make of the start checkpoint's tensors alone all of what "
        f"fills {', '.join(wrong[:MOST_NAMED])}{more}"
    )


def _fill_plan(shadow: ShadowModel) -> tuple[float, bool]:
    """Record and prove the replay plan; the first update records what fails here.

    Returns:
        when it was recorded, on the clock of `time.monotonic`; and whether there was
        enough time for the proof.

    """
    assert shadow.module is not None
    module, plan = shadow.module, shadow.plan
    names = {name for name, _ in module.named_parameters()}
    plan.is_replayed = False  # no entry holds the memory that is lent
    recorded, is_whole = time.monotonic(), True
    try:
        with torch.no_grad(), lent_memory(module, names, torch.device("meta")):
            trace = Trace(shadow)
            trace.run()
            recorded = time.monotonic()
            if trace.is_of_single_tensors and trace.unsure is not None:
                plan.reject(trace.unsure)
                is_whole = _prove(shadow)
                if short := _not_filled(shadow, is_proved=False):
                    with shadow.device:
                        wrong = find_computed(shadow, short, trace.filled)
                    if wrong:  # no delta changes these tensors
                        shadow.computed.clear()
            else:
                plan.forget()
    except Exception:  # loaders raise many kinds of errors, and memory may be missing
        logger.warning("the replay plan is left to the first update", exc_info=True)
        plan.forget()
        shadow.computed.clear()
    plan.move_in(dict(module.named_parameters()))
    return recorded, is_whole


class Trace:
    """Calls the model's loader with the tensors of the start checkpoint.

    The tensors have no content, and the parameters no memory. What the loader would do
    with each tensor is recorded in the plan.

    Args:
        shadow: the shadow model, its parameters on `meta`.

    """

    def __init__(self, shadow: ShadowModel) -> None:
        assert shadow.module is not None
        self._shadow = shadow
        self._coverage = Coverage(
            shadow.module, shadow.required, set(), (), shadow.device
        )
        self.filled: dict[str, set[str]] = {}
        """Tensor → the parameters that it fills."""
        self._current: str | None = None
        """The tensor that the loader has now."""
        self._is_rejected = False
        """Whether the loader has rejected that tensor."""
        self._doubtful: set[str] | None = set()
        """Parameters that a rejected tensor may fill; None if these may be any."""
        self._has_failed_after_all = False
        """Whether a loader has failed when it had taken all tensors."""

    def run(self) -> None:
        """Give the loader all tensors in one call, as an update does.

        A tensor that it rejects ends the call, and the next tensor begins another.
        """
        tensors = self._tensors(self._shadow.start_checkpoint.known)
        with self._watched():
            while (following := next(tensors, None)) is not None:
                self._load(chain([following], tensors))

    def run_one_by_one(self) -> None:
        """Give the loader each tensor that is not recorded, in a call of its own.

        A loader may keep tensors until it has them all. In such a call it writes them
        while it has one tensor.
        """
        known, plan = self._shadow.start_checkpoint.known, self._shadow.plan
        with self._watched():
            for pair in self._tensors([n for n in known if plan.known(n) is None]):
                self._load([pair])

    @property
    def is_of_single_tensors(self) -> bool:
        """Whether the record shows all that the loader has done.

        It does not if parameters are filled from tensors that the loader has kept or
        made.
        """
        return not (self._has_failed_after_all or self._coverage.has_strays)

    @property
    def unsure(self) -> set[str] | None:
        """Tensors that may fill the same elements as a rejected tensor.

        Then the order of both decides, which the record does not show. None if all
        tensors may.
        """
        if self._doubtful is None:
            return None
        plan = self._shadow.plan
        return {name for param in self._doubtful for name in plan.names_of(param)}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._coverage.watch(lambda weights: None)
        try:
            yield
        finally:
            self._coverage.unwatch()

    def _load(self, weights: Iterable[Pair]) -> None:
        try:
            with self._coverage.watching():
                self._shadow.load(weights)
        except Exception:  # every loader raises its own kind of error
            name = self._current
            logger.debug("the loader did not take %r", name, exc_info=True)
            if name is None:  # it had taken them all
                self._has_failed_after_all = True
                return
            self._is_rejected = True
            found = self._coverage.touched | self._shadow.places.params_of(name)
            if not found or self._doubtful is None:
                self._doubtful = None
            else:
                self._doubtful |= found

    def _tensors(self, names: Iterable[str]) -> Iterator[Pair]:
        """The tensors; what the loader has done with one is recorded at the next."""
        shadow, coverage = self._shadow, self._coverage
        for name in names:
            shape, dtype = shadow.start_checkpoint.known[name]
            if shape is None or dtype is None or not self._is_loaded(name):
                continue
            # Memory that nobody writes to takes nothing.
            tensor = torch.empty(
                tuple(shape), dtype=getattr(torch, dtype), device="cpu"
            )
            entry = Entry(tensor.shape, tensor.dtype)
            coverage.touched.clear()
            coverage.handed, coverage.entry = tensor, entry
            self._current, self._is_rejected = name, False
            yield name, tensor
            coverage.handed = coverage.entry = self._current = None
            if entry.num_unread and shadow.is_alone:
                continue
            self.filled[name] = set(coverage.touched)
            if not self._is_rejected:
                shadow.plan.keep(name, entry)

    def _is_loaded(self, name: str) -> bool:
        """Whether the loader of an update gets a tensor, and its layer has places."""
        shadow = self._shadow
        head = shadow.classifier
        if head is not None and head.reads(name) and not head.is_tied:
            return False
        return name not in shadow.ignored and not _is_processed(shadow, name)


def _is_processed(shadow: ShadowModel, name: str) -> bool:
    """Whether a tensor is of a quantised layer, which has no places for it."""
    if not shadow.quantised:
        return False
    return not shadow.quantised.isdisjoint(shadow.places.params_of(name))


def _not_filled(shadow: ShadowModel, *, is_proved: bool) -> list[str]:
    """Parameters with elements that no entry fills, or no proved entry."""
    fills = {
        name: Fill(shape.numel())
        for name, shape in shadow.required.items()
        if name not in shadow.quantised
    }
    for _, entry in shadow.plan.items():
        for param, view in entry.filled if entry.is_proved or not is_proved else ():
            fills[param].views[view] = prod(view[1])
    return [name for name, fill in fills.items() if fill.missing]
