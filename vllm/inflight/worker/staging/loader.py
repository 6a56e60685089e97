"""What a new version must pass on its way in, tensor by tensor.

Every transport, ours or somebody else's, hands its tensors to the shadow's
`load_weights`. The intake stands in that door: it renames, has every tensor inspected
(checks.py) and digested, counts bytes for the progress report, and stops the
stream when the update was cancelled. Behind the door it watches which part of which
parameter each tensor fills, so that at the end a missing shard of a fused parameter is
as visible as a missing tensor.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.errors import Cancelled, Cause, InflightError, WeightsMismatch
from vllm.inflight.tensor_names import PLAIN
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.update import Manifest, TensorSpec
from vllm.inflight.worker.model.classifier import SCORE
from vllm.inflight.worker.replay_plan import Entry, replay
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.coverage import Coverage
from vllm.inflight.worker.staging.throttle import undirected
from vllm.inflight.worker.verify.checks import TensorChecks
from vllm.inflight.worker.verify.content import Content
from vllm.inflight.worker.verify.drift import Sampler
from vllm.inflight.worker.verify.gpu_digest import GpuDigest, Pair
from vllm.inflight.yielding import with_breaks


class UpdateLoader:
    """The door of one update on one rank."""

    def __init__(
        self,
        shadow: ShadowModel,
        manifest: Manifest,
        *,
        verify: bool,
        allow_nonfinite: bool,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        first_write: Callable[[], None] = lambda: None,
        between_flips: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._shadow = shadow
        self._manifest = manifest
        self._verify = verify
        self._allow_nonfinite = allow_nonfinite
        self._cancelled = cancelled
        self._progress = progress
        self._first_write = first_write
        """Called before anything is written, as often as that may be the first time."""
        self._between_flips = between_flips
        """While it is entered, no flip exchanges the tree for what is served."""
        assert shadow.module is not None
        self._module = shadow.module
        self.coverage = Coverage(
            shadow.module,
            shadow.required,
            shadow.behind,
            shadow.quantised,
            shadow.device,
        )
        self._inspection = TensorChecks(
            manifest,
            shadow.known_names,
            shadow.spares,
            shadow.origin,
            asks_loader=shadow.asks_loader,
            allow_nonfinite=allow_nonfinite,
        )
        served_as = None if allow_nonfinite else self._served_as
        self._audit = GpuDigest(shadow.device, shadow.tables, shadow.plan, served_as)
        self._converted: dict[str, torch.dtype] = {}
        """Tensors that are served in a dtype of smaller numbers, and that."""
        self._computed: dict[str, list[str]] = {}
        """Parameters that are no copy of what came → the tensors they are made of."""
        self._sampler = Sampler(shadow.views, shadow.plan, shadow.device)
        self._renamed: set[str] = set()
        """Parameters that are filled by names other than their own in a checkpoint."""
        self._dtypes = {
            getattr(torch, dtype)
            for dtype in set(shadow.dtypes.values())
            if dtype in PLAIN
        }
        """Of the parameters, those that what comes in another one is converted to."""
        self._broken: Exception | None = None
        self._current: str | None = None
        """The tensor that the model's loader has been handed last."""
        self._is_refused = False
        """Whether it has refused that one."""
        self.unfilled: list[str] = []
        """Tensors that filled nothing on this rank; another stage may use them."""
        self.num_bytes = 0
        self.num_in_place = 0
        """Tensors that were received where they end up."""

    @property
    def is_partial(self) -> bool:
        """Whether parameters of the model keep what is served if nothing comes."""
        return bool(self._manifest.subset) or self.is_drafters

    @property
    def is_drafters(self) -> bool:
        """Whether all of it is the drafter's."""
        return self._manifest.draft

    def load_weights(self, weights: Iterable[Pair]) -> Any:
        """Stands in for the shadow's own `load_weights`.

        Nothing is written before the first tensor is here: what breaks off before that
        has cost nothing. Where the model's loader refuses a tensor, it is called again
        for those that follow, so that the refusal can name all of them; see
        `require_taken`.
        """
        try:
            batches = self._drawn(weights)
            first = next(batches, None)
            if first is None:
                return set()
            self._first_write()
            incoming = self._admit(chain([first], batches))
            rest: Iterable[Pair] = incoming
            while True:
                try:
                    with self.coverage.watching():
                        return self._load(rest)
                except (InflightError, torch.OutOfMemoryError):
                    raise
                except Exception as error:
                    # Upstream's loaders refuse by assertion, KeyError or ValueError,
                    # without the tensor's name: it is the one handed over last.
                    if error is self._broken or self._current is None:
                        raise
                    self._inspection.note_refused(self._current, error)
                    self._is_refused, self._current = True, None
                    # The frames hold memory that a transport wants to use again.
                    traceback.clear_frames(error.__traceback__)
                if (following := next(incoming, None)) is None:
                    return None
                rest = chain([following], incoming)
                del following
        finally:
            self._broken = None  # it holds the transport's frames, and their memory

    def require_taken(self) -> None:
        """Raise `WeightsMismatch` if the model's loader has refused a tensor.

        Asked after each chunk: what follows would be sent in vain.
        """
        if self._inspection.is_refused:
            raise self._mismatch()

    def _load(self, weights: Iterable[Pair]) -> Any:
        return self._shadow.load(weights)

    def _admit(self, batches: Iterable[list[Pair]]) -> Iterator[Pair]:
        """What the model's loader has to see; what the plan knows is done here."""
        coverage = self.coverage
        for batch in batches:
            if self._cancelled():
                raise Cancelled("the update was aborted")
            with undirected():
                accepted = self._accepted(batch)
            accepted = self._without_head(accepted)
            with undirected():
                fresh = self._replay(accepted)
            fresh = [pair for pair in fresh if not self._inspection.is_spare(pair[0])]
            if fresh:
                coverage.stand_behind()
            while fresh:
                name, tensor = fresh.pop(0)
                if self._inspection.is_hopeless(name):
                    self._inspection.note_unknown(name)
                    continue
                before = coverage.num_loads
                coverage.touched.clear()
                entry = Entry(tensor.shape, tensor.dtype)
                coverage.handed, coverage.entry = tensor, entry
                if self._inspection.is_strange(name):
                    # The call may itself find that the entry is not whole.
                    if not self._takes(name, tensor):
                        entry.is_whole = False
                else:
                    self._current = name
                    yield name, tensor
                    self._current = None
                    if self._is_refused:
                        self._is_refused, entry.is_whole = False, False
                    elif coverage.num_loads == before:
                        self.unfilled.append(name)
                if self._inspection.is_renamed(name, coverage.fills):
                    self._renamed |= coverage.touched
                for param, _ in () if entry.is_traced else entry.filled:
                    self._computed.setdefault(param, []).append(name)
                if entry.num_unread and self._shadow.is_alone:
                    self._inspection.note_cut(name, entry.num_unread)
                elif self._shadow.plan.entry(name, tensor) is None:
                    self._shadow.plan.keep(name, entry)
                # A transport uses memory again that nobody looks into.
                coverage.handed = coverage.entry = None
                del tensor
            self._progress(self.num_bytes, self._inspection.num_seen)

    def _without_head(self, accepted: list[Pair]) -> list[Pair]:
        """Load the score of a classifier, if what it is made of has come.

        Returns the tensors that the model's loader has to see: all but its head.
        """
        if (classifier := self._shadow.classifier) is None:
            return accepted
        for name, tensor in accepted:
            if not classifier.reads(name):
                continue
            self._current = name
            score = classifier.score(tensor)
            self.coverage.stand_behind()
            # Of a tensor that nobody sent, so it is loaded each time, and not replayed.
            entry = Entry(score.shape, score.dtype, is_whole=False)
            self.coverage.handed, self.coverage.entry = score, entry
            self._load([(SCORE, score)])
            self._current = None
            for param, _ in entry.filled:
                self._computed.setdefault(param, []).append(name)
            self.coverage.handed = self.coverage.entry = None
        return [
            (name, tensor)
            for name, tensor in accepted
            if classifier.is_tied or not classifier.reads(name)
        ]

    def _accepted(self, batch: list[Pair]) -> list[Pair]:
        """Those of a batch that may go on, under the model's names."""
        accepted: list[Pair] = []
        while batch:
            sent_name, tensor = batch.pop(0)
            name = self._manifest.model_name(sent_name)
            if self._accept(name, tensor):
                accepted.append((name, tensor))
                self.num_bytes += tensor.nbytes
                self.num_in_place += self._shadow.plan.is_home(name, tensor)
        self._sampler.add(accepted)
        if self._verify and accepted and accepted[0][1].is_cuda:
            # Judged with the verdict: asking now would wait for the GPU.
            self._audit.add(accepted)
        return accepted

    def _replay(self, pairs: list[Pair]) -> list[Pair]:
        """Load what the plan knows, in one call; returns the others."""
        plan = self._shadow.plan
        fresh, known = [], []
        for name, tensor in pairs:
            entry = plan.entry(name, tensor)
            if entry is None or not entry.is_proved:
                fresh.append((name, tensor))
                continue
            known.append((entry, tensor))
            self.coverage.replayed(entry)
            if self._inspection.is_renamed(name, self.coverage.fills):
                self._renamed.update(param for param, _ in entry.filled)
        replay(known)
        return fresh

    def _drawn(self, weights: Iterable[Pair]) -> Iterator[list[Pair]]:
        """`weights`, as many at once as their transport has."""
        make = getattr(weights, "batches", None)
        if (into := getattr(weights, "into", None)) is not None:
            with undirected():
                into(self._place)
        batches = make() if make else ([pair] for pair in weights)
        while True:
            try:
                with undirected() if make else nullcontext():
                    batch = next(batches, None)
            except Exception as error:
                # Remembered as a failure of the transport, and not the model's.
                self._broken = error
                raise
            if batch is None:
                return
            yield batch

    def _place(
        self, sent_name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Destination | None:
        """Where a transport may receive a tensor, before anybody has looked at it."""
        name = self._manifest.model_name(sent_name)
        if not self._inspection.may_come(name):
            return None
        plan, home = self._shadow.plan, self._shadow.place(name, shape, dtype)
        if home is not None:
            self._first_write()
            # What is proved before the first write may have changed what is known.
            home = self._shadow.place(name, shape, dtype)
        if home is not None:
            self._shadow.behind.update(plan.filled_by(name))
        return home

    def _accept(self, name: str, tensor: torch.Tensor) -> bool:
        """Look at one tensor, its content too if it is on the host.

        Whether it may go on to the loader.
        """
        if not self._inspection.admits(name, tensor):
            return False
        if not self._verify or tensor.is_cuda:
            return True
        num, bad = self._shadow.num_threads, 0
        if not self._allow_nonfinite:
            served_as = [self._served_as(name, tensor.dtype)]
            (bad,) = ops.count_nonfinite([tensor], served_as=served_as, num_threads=num)
        (digest,) = ops.digest([tensor], num_threads=num)
        # Loaded whatever it holds, as on a GPU, where that is known at the end only: so
        # nothing seems to be missing that has come.
        self._judge(name, digest, bad)
        return True

    def _judge(self, name: str, digest: ops.Digest, num_nonfinite: int) -> None:
        converted = self._converted.get(name)
        served_as = str(converted).removeprefix("torch.") if converted else None
        self._inspection.judge(name, digest, num_nonfinite, served_as)

    def _served_as(self, name: str, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype that a tensor is served in, if that has no numbers as large."""
        own = ops.nonfinite_limit(dtype)
        limits = {each: ops.nonfinite_limit(dtype, each) for each in self._dtypes}
        if all(limit == own for limit in limits.values()):
            return None
        served = {
            getattr(torch, self._shadow.dtypes[param])
            for param in self._filled_by(name)
        }
        shortest = min(served & limits.keys(), key=limits.__getitem__, default=None)
        if shortest is None or limits[shortest] == own:
            return None
        self._converted[name] = shortest
        return shortest

    def _takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the loader takes a tensor by a name that the model does not have.

        Loaders may rename by themselves. It is called with this one alone, so that a
        refusal ends no other's load.
        """
        coverage, inspection = self.coverage, self._inspection
        before = coverage.num_loads
        try:
            self._load([(name, tensor)])
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each loader has its own for what it does not know
            inspection.note_refused(name, error)
            return False
        if coverage.num_loads == before and self._shadow.may_idle(name):
            self.unfilled.append(name)
        elif coverage.num_loads == before:
            inspection.note_unknown(name)
        return coverage.num_loads > before

    def foresee(
        self,
        announced: Mapping[str, TensorSpec],
        *,
        are_all: bool,
        is_open: bool = False,
    ) -> None:
        """Raise `WeightsMismatch` if tensors that are to come cannot be accepted.

        Names, shapes and dtypes are judged, before a byte has come. Nothing is written,
        and a set that a rollback can return to stays as it is.

        Args:
            announced: the tensors, under the model's names.
            are_all: whether no other tensors will come.
            is_open: whether a load is under way in the tree.

        """

        def ask(
            specs: Sequence[TensorSpec],
        ) -> list[tuple[set[str], Exception | None]]:
            if not specs:  # most models need not be asked
                return []
            with self._between_flips(), ExitStack() as asking:
                if not is_open:
                    asking.enter_context(self.coverage.hollow())
                return [self._asked(spec) for spec in with_breaks(specs)]

        with undirected():
            refusal = self._inspection.foreseen(
                announced, self._shadow.places, ask, are_all=are_all
            )
        if refusal is not None:
            raise refusal

    def foresee_files(
        self, announced: TensorList, *, are_all: bool, is_open: bool = False
    ) -> None:
        """The same of files, whose headers have been read."""
        model_name = self._manifest.model_name
        dtypes = (str(dtype).removeprefix("torch.") for dtype in announced.dtypes)
        told = zip(announced.names, announced.shapes, dtypes, strict=True)
        specs = (
            TensorSpec(model_name(name), tuple(shape), dtype)
            for name, shape, dtype in with_breaks(told)
        )
        tensors = {spec.name: spec for spec in specs}
        self.foresee(tensors, are_all=are_all, is_open=is_open)

    def _asked(self, spec: TensorSpec) -> tuple[set[str], Exception | None]:
        """The parameters that the model's loader would fill; what it raises."""
        dtype = getattr(torch, spec.dtype)
        try:
            hollow = torch.empty(spec.shape, dtype=dtype, device="meta")
        except RuntimeError:  # no tensor has so many elements
            return set(), None
        return self.coverage.asked(self._load, (spec.name, hollow))

    def verdict(self) -> Content:
        """What arrived; raises `WeightsMismatch` unless it can be served.

        Completeness is judged on the parameters: every element of every one has
        been written, whatever the checkpoint tensors are called; of a subset, of
        every one that was begun.
        """
        inspection = self._inspection
        with undirected():
            for name, digest, bad in self._audit.results():
                self._judge(name, digest, bad)
            samples = self._sampler.samples()
        if self.coverage.has_strays:
            self._shadow.plan.forget()  # they would not come if all else were replayed
        why = "it is filled by tensors of two names"
        for param in sorted(self._renamed & self.coverage.refilled):
            inspection.note_wrong(param, Cause.DUPLICATE, why)
        inspection.compare_heads()
        self._note_unused(lambda name: not self._shadow.may_idle(name))
        missing = self.coverage.short(self.coverage.due(self._manifest))
        if missing or inspection.objects:
            raise self._mismatch(missing, is_end=True)
        inspection.require_subset()
        self._pass_over()
        self._note_unused()
        if inspection.objects:
            raise self._mismatch(is_end=True)
        return Content(inspection.facts(), samples)

    def require_finite(self) -> None:
        """Raise `WeightsMismatch` if a loader has made NaN or Inf of what came.

        Asked when all layers are loaded. A copy of finite numbers is not looked at
        again; a loader may compute others of them, an exponential say.
        """
        if self._allow_nonfinite:
            return
        params = dict(self._module.named_parameters())
        for param, names in self._computed.items():
            found = params.get(param)  # that of a quantised layer may have gone
            (bad,) = (0,) if found is None else ops.count_nonfinite([found.data])
            for name in names if bad else ():
                why = (
                    f"the model's loader makes {bad} numbers of it that are NaN or Inf"
                )
                self._inspection.note_wrong(name, Cause.NOT_FINITE, why)
        if self._inspection.has_refused:
            raise self._mismatch()

    def is_spare(self, name: str) -> bool:
        """Whether a tensor may come, and fills nothing."""
        return self._inspection.is_spare(name)

    def _note_unused(self, is_meant: Callable[[str], bool] = lambda name: True) -> None:
        """Complain of tensors that filled nothing, unless another rank may use them."""
        if self._shadow.has_all:
            for name in filter(is_meant, self.unfilled):
                self._inspection.note_unused(name)

    def _pass_over(self) -> None:
        """Forget of what filled nothing that which did not at the start, either."""
        idle = set(filter(self._shadow.may_idle, self.unfilled))
        if not idle or (self._manifest.subset and not self.coverage.begun):
            return  # a subset of nothing else would replace nothing
        if self.coverage.passes_over(self._load, self._inspection.hollow(idle)):
            self.unfilled = [n for n in self.unfilled if n not in idle]

    def _mismatch(
        self, missing: Iterable[str] = (), *, is_end: bool = False
    ) -> WeightsMismatch:
        """What is wrong; `missing` are parameters that are not full."""
        return self._inspection.refusal(
            missing, self._shadow.places, self._filled_by, is_end=is_end
        )

    def _filled_by(self, name: str) -> set[str]:
        """The parameters that a tensor that came fills, or would have filled."""
        found = set(self._shadow.plan.filled_by(name))
        found = found or self._shadow.places.params_of(name)
        if not found:
            for _, hollow in self._inspection.hollow([name]):
                found, _ = self.coverage.asked(self._load, (name, hollow))
        return found
