"""What a new version must pass on its way in, tensor by tensor.

Every transport, ours or somebody else's, hands its tensors to the shadow's
`load_weights`. The intake stands in that door: it renames, has every tensor inspected
(inspection.py) and digested, counts bytes for the progress report, and stops the
stream when the update was cancelled. Behind the door it watches which part of which
parameter each tensor fills, so that at the end a missing shard of a fused parameter is
as visible as a missing tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.errors import Cancelled, InflightError, WeightsMismatch
from vllm.inflight.stage.audit import Audit, Pair
from vllm.inflight.stage.classifier import SCORE, tensor_names
from vllm.inflight.stage.content import Content
from vllm.inflight.stage.coverage import Coverage
from vllm.inflight.stage.drift import Sampler
from vllm.inflight.stage.inspection import Inspection
from vllm.inflight.stage.pace import undirected
from vllm.inflight.stage.plan import Entry, replay
from vllm.inflight.stage.shadow import Shadow
from vllm.inflight.update import Manifest
from vllm.inflight.wire.assembly import Home

MOST_ASKED = 8
"""Unknown tensors after which a loader is not asked any more: each time it goes through
all that there is."""


class Intake:
    """The door of one update on one rank."""

    def __init__(
        self,
        shadow: Shadow,
        manifest: Manifest,
        *,
        verify: bool,
        allow_nonfinite: bool,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        first_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._shadow = shadow
        self._manifest = manifest
        self._verify = verify
        self._allow_nonfinite = allow_nonfinite
        self._cancelled = cancelled
        self._progress = progress
        self._first_write = first_write
        """Called before anything is written, as often as that may be the first time."""
        assert shadow.module is not None
        self._module = shadow.module
        self.coverage = Coverage(
            shadow.module,
            shadow.required,
            shadow.behind,
            shadow.quantised,
            shadow.device,
        )
        self._inspection = Inspection(
            manifest,
            shadow.known_names,
            shadow.spares,
            shadow.origin,
            asks_loader=shadow.asks_loader,
            allow_nonfinite=allow_nonfinite,
        )
        self._audit = Audit(shadow.device, shadow.tables, shadow.plan)
        self._sampler = Sampler(shadow.views, shadow.plan, shadow.device)
        self._renamed: set[str] = set()
        """Parameters that are filled by names other than their own in a checkpoint."""
        self._broken: Exception | None = None
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
        has cost nothing.
        """
        current: list[str] = []
        try:
            batches = self._drawn(weights)
            first = next(batches, None)
            if first is None:
                return set()
            self._first_write()
            with self.coverage.watching():
                return self._load(self._admit(chain([first], batches), current))
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Upstream's loaders refuse by assertion, KeyError or ValueError,
            # without the tensor's name: it is the one handed over last.
            if error is self._broken or not current:
                raise
            self._inspection.note_refused(current[0], error)
            raise self._mismatch() from error
        finally:
            self._broken = None  # it holds the transport's frames, and their memory

    def _load(self, weights: Iterable[Pair]) -> Any:
        return self._shadow.load(weights)

    def _admit(
        self, batches: Iterable[list[Pair]], current: list[str]
    ) -> Iterator[Pair]:
        """What the model's loader has to see; what the plan knows is done here."""
        coverage = self.coverage
        for batch in batches:
            if self._cancelled():
                raise Cancelled("the update was aborted")
            with undirected():
                accepted = self._accepted(batch)
            accepted = self._without_head(accepted, current)
            with undirected():
                fresh = self._replay(accepted)
            fresh = [pair for pair in fresh if not self._inspection.is_spare(pair[0])]
            if fresh:
                coverage.stand_behind()
            while fresh:
                name, tensor = fresh.pop(0)
                current[:] = [name]
                before = coverage.num_loads
                entry = Entry(tensor.shape, tensor.dtype)
                coverage.handed, coverage.entry = tensor, entry
                if self._inspection.is_strange(name):
                    # The call may itself find that the entry is not whole.
                    if not self._takes(name, tensor):
                        entry.is_whole = False
                else:
                    yield name, tensor
                    if coverage.num_loads == before:
                        self.unfilled.append(name)
                if self._inspection.is_renamed(name, coverage.fills):
                    self._renamed.update(param for param, _ in entry.filled)
                if entry.num_unread and self._shadow.is_alone:
                    self._inspection.note_cut(name, entry.num_unread)
                elif self._shadow.plan.entry(name, tensor) is None:
                    self._shadow.plan.keep(name, entry)
                # A transport uses memory again that nobody looks into.
                coverage.handed = coverage.entry = None
                del tensor
            self._progress(self.num_bytes, self._inspection.num_seen)
        current.clear()

    def _without_head(self, accepted: list[Pair], current: list[str]) -> list[Pair]:
        """Load the score of a classifier, if what it is made of has come.

        Returns the tensors that the model's loader has to see: all but its head.
        """
        if (classifier := self._shadow.classifier) is None:
            return accepted
        for name, tensor in accepted:
            if not classifier.reads(name):
                continue
            current[:] = [name]
            score = classifier.score(tensor)
            self.coverage.stand_behind()
            # Of a tensor that nobody sent, so it is loaded each time, and not replayed.
            entry = Entry(score.shape, score.dtype, is_whole=False)
            self.coverage.handed, self.coverage.entry = score, entry
            self._load([(SCORE, score)])
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
    ) -> Home | None:
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
        """Check one tensor, its content too if it is on the host."""
        if not self._inspection.admits(name, tensor):
            return False
        if not self._verify or tensor.is_cuda:
            return True
        num, bad = self._shadow.num_threads, 0
        if not self._allow_nonfinite:
            (bad,) = ops.count_nonfinite([tensor], num_threads=num)
        (digest,) = ops.digest([tensor], num_threads=num)
        return self._inspection.judge(name, digest, bad)

    def _takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the loader takes a tensor by a name that the model does not have.

        Loaders may rename by themselves. It is called with this one alone, so that a
        refusal ends no other's load.
        """
        coverage, inspection = self.coverage, self._inspection
        if inspection.num_unknown >= MOST_ASKED:
            inspection.note_wrong(name, f"not looked at, after {MOST_ASKED} unknown")
            return False
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

    def verdict(self) -> Content:
        """What arrived; raises `WeightsMismatch` unless it can be served.

        Completeness is judged on the parameters: every element of every one has
        been written, whatever the checkpoint tensors are called; of a subset, of
        every one that was begun.
        """
        inspection = self._inspection
        with undirected():
            for name, digest, bad in self._audit.results():
                inspection.judge(name, digest, bad)
            samples = self._sampler.samples()
        if self.coverage.has_strays:
            self._shadow.plan.forget()  # they would not come if all else were replayed
        for param in sorted(self._renamed & self.coverage.refilled):
            inspection.note_wrong(param, "it is filled by tensors of two names")
        inspection.compare_heads()
        missing = self.coverage.short(self.coverage.due(self._manifest))
        if missing or inspection.objects:
            raise self._mismatch(missing, is_end=True)
        inspection.require_subset()
        self._pass_over()
        return Content(inspection.facts(), samples)

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
        module, classifier = self._module, self._shadow.classifier
        names = {param: tensor_names(module, param, classifier) for param in missing}
        return self._inspection.refusal(names, is_end=is_end)
