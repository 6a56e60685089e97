"""The update loader: takes the tensors of an update from a transport, and loads them.

Every transport, ours or another, gives its tensors to `load_weights` of the shadow
model. During an update, the update loader is in the place of that method. It renames
each tensor, checks it (verify/checks.py), digests it, and counts bytes for progress
reports. It stops the stream when the update is aborted. Behind the model's own loader,
it watches which part of which parameter each tensor fills (coverage.py). So a missing
shard of a fused parameter is as visible as a missing tensor.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.errors import (
    Cancelled,
    Cause,
    EngineFault,
    InflightError,
    StagingUnavailable,
    WeightsMismatch,
)
from vllm.inflight.ops.gpu_digest import GpuDigest, Pair
from vllm.inflight.tensor_names import PLAIN
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.update import Manifest, TensorSpec
from vllm.inflight.worker.adopted_call import require_in_time
from vllm.inflight.worker.delta.dense import (
    Came,
    Comparison,
    KnownTables,
    log_parameter,
)
from vllm.inflight.worker.delta.destinations import KnownDestinations
from vllm.inflight.worker.delta.fill import fill
from vllm.inflight.worker.delta.whole_tensors import DeltaTensors
from vllm.inflight.worker.delta.writer import DeltaWriter
from vllm.inflight.worker.integrity.scrub import Digests, digests_of
from vllm.inflight.worker.model.kinds.classifier import SCORE
from vllm.inflight.worker.model.layers import parameters_by_name
from vllm.inflight.worker.replay_plan import Entry, replay
from vllm.inflight.worker.shadow.parameters import make_empty
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.adopted.parameter_writes import ParameterWrites
from vllm.inflight.worker.staging.coverage import Coverage
from vllm.inflight.worker.staging.scratch import ScratchParameters
from vllm.inflight.worker.staging.throttle import undirected
from vllm.inflight.worker.verify.checks import Problem, TensorChecks, rejection
from vllm.inflight.worker.verify.content import Content, Facts
from vllm.inflight.worker.verify.drift import Sampler
from vllm.inflight.yielding import with_breaks


class UpdateLoader:
    """Loads one update on one rank.

    Args:
        shadow: the shadow model that is loaded into.
        manifest: the announced tensors, and the options of the update.
        verify: whether contents are digested.
        allow_nonfinite: whether NaN and Inf are accepted.
        cancelled: whether the update was aborted.
        progress: called with the bytes and the tensors loaded so far.
        first_write: called before every write that may be the first one.
        between_flips: context in which no flip exchanges live and shadow weights.
        served: the content of the live weights, if it is known tensor by tensor.
        between: called while weights are copied, with the bytes copied so far.
        fills: with delta staging, whether the live weights are lost, and are filled in
            place.

    """

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
        served: Content | None = None,
        between: Callable[[int], None] = lambda num_bytes: None,
        fills: bool = False,
    ) -> None:
        self._shadow = shadow
        self._fills = fills
        self._manifest = manifest
        self._verify = verify
        self._allow_nonfinite = allow_nonfinite
        self._cancelled = cancelled
        self._progress = progress
        self._first_write = first_write
        """Called before every write that may be the first one."""
        self._between_flips = between_flips
        """Context in which no flip exchanges live and shadow weights."""
        assert shadow.module is not None
        self._module = shadow.module
        shadow.plan.drop_unconfirmed()
        self._live: Mapping[str, torch.Tensor] = {}
        """With delta staging: the live parameters."""
        self._comparison: Comparison | None = None
        """With delta staging: compares tensors with the live parameters."""
        if shadow.log is not None:
            self._live = parameters_by_name(shadow.live)
            known = KnownDestinations.of(shadow.module)
            tables = KnownTables.of(shadow.module)
            self._comparison = Comparison(shadow.log, self._live, known, tables)
        shadow.take_processed = self._take_processed
        self.marks: Digests = {}
        """With delta staging: digests of the parameters of quantised layers."""
        self.coverage = Coverage(
            shadow.module,
            shadow.required,
            shadow.stale,
            shadow.quantised,
            shadow.device,
        )
        self._checks = TensorChecks(
            manifest,
            shadow.known_names,
            shadow.ignored,
            shadow.start_checkpoint,
            asks_loader=shadow.asks_loader,
            allow_nonfinite=allow_nonfinite,
        )
        served_as = None if allow_nonfinite else self._served_as
        self._gpu_digest = GpuDigest(
            shadow.device, shadow.tables, shadow.plan, served_as
        )
        self._converted: dict[str, torch.dtype] = {}
        """Tensors that are served in a dtype of smaller range → that dtype."""
        self._computed: dict[str, list[str]] = {}
        """Parameters that a loader computes → the tensors they are made of."""
        self._sampler = Sampler(shadow.views, shadow.plan, shadow.device)
        self._renamed: set[str] = set()
        """Parameters that are filled under names other than their checkpoint names."""
        self._dtypes = {
            getattr(torch, dtype)
            for dtype in set(shadow.dtypes.values())
            if dtype in PLAIN
        }
        """The dtypes of parameters that tensors of another dtype are converted to."""
        self._is_lent = False
        """Whether a trainer may write into the tensors of the call under way."""
        self._transport_error: Exception | None = None
        self._current: str | None = None
        """The tensor that the model's loader got last."""
        self._is_rejected = False
        """Whether the loader has rejected that tensor."""
        self._is_owed = False
        """Whether there were tensors of which the model's loader got none, so that it
        was not called for them."""
        self._served = served
        self._between = between
        self._delta: DeltaTensors | None = None
        """What makes whole tensors of a delta; None before its first chunk."""
        self._writer: DeltaWriter | None = None
        """What writes a delta element by element; None before its first chunk."""
        # A plan on a GPU may be given up, and is not replayed any more then, either.
        is_packed = shadow.device.type == "cpu" and not shadow.plan.is_replayed
        is_packed &= shadow.log is None
        self._keeps = is_packed and verify and bool(manifest.tensors)
        self._kept: dict[str, torch.Tensor] = {}
        """The accepted tensors, on the CPU build, for a later delta."""
        self._scratch = ScratchParameters(shadow, self.coverage)
        self.writes = ParameterWrites(shadow, self.coverage)
        """What a method of a worker extension writes into parameters itself."""
        self.written_digest: str | None = None
        """Of these parameters, once the verdict is known. None: there are none. Empty:
        contents are not digested."""
        self.unfilled: list[str] = []
        """Tensors that filled nothing on this rank; another stage may use them."""
        self.num_bytes = 0
        self.num_in_place = 0
        """Tensors that were received in their final place."""

    @property
    def is_partial(self) -> bool:
        """Whether the update may leave parameters of the model unchanged."""
        return self._manifest.is_partial

    @property
    def is_delta(self) -> bool:
        """Whether the update changes elements of what is served."""
        return self._manifest.base is not None

    @property
    def writes_elements(self) -> bool:
        """Whether single elements are written, and nothing is loaded."""
        has_places = self._shadow.plan.is_replayed or self._shadow.log is not None
        return self.is_delta and has_places

    @property
    def is_drafters(self) -> bool:
        """Whether the update is for the drafter alone."""
        return self._manifest.draft

    def load_weights(self, weights: Iterable[Pair]) -> Any:
        """Stand in for `load_weights` of the shadow model.

        Nothing is written before the first tensor has arrived, so a transfer that fails
        earlier costs nothing. If the model's loader rejects a tensor, the loader is
        called again for the following ones, so that the error can name all of them; see
        `require_taken`.

        Raises:
            Conflict: a thread of an adopted call loads, and its method has returned.

        """
        require_in_time()
        if self.writes_elements:
            return self._write(weights)
        if self.is_delta:
            weights = self._changed(weights)
        return self._load_all(weights)

    def _write(self, parts: Iterable[Pair]) -> None:
        """Write a delta into shadow parameters or a log, element by element."""
        batches = self._drawn(parts)
        try:
            if (first := next(batches, None)) is None:
                return
            self._first_write()
            if self._writer is None:
                assert self._served is not None
                self._writer = DeltaWriter(
                    self._shadow,
                    self._manifest.tensors,
                    self._served,
                    live=self._live or parameters_by_name(self._shadow.live),
                    allow_nonfinite=self._allow_nonfinite,
                    received=self._received,
                    between=self._between,
                )
                with undirected():
                    self._writer.begin()
                self.unfilled = self._writer.unserved
            for batch in chain([first], batches):
                if self._cancelled():
                    raise Cancelled("the update was aborted")
                with undirected():
                    self._writer.take(batch)
        finally:
            self._transport_error = None

    def _received(self, num_bytes: int, num_tensors: int) -> None:
        """A part of a delta was written, of so many bytes."""
        self.num_bytes += num_bytes
        self._progress(self.num_bytes, num_tensors)

    def _load_all(self, weights: Iterable[Pair]) -> Any:
        try:
            batches = self._drawn(weights)
            first = next(batches, None)
            if first is None:
                return set()
            self._first_write()
            incoming = self._admit(chain([first], batches))
            while True:
                try:
                    if (following := next(incoming, None)) is None:
                        self._is_owed = True
                        return None
                    rest = chain([following], incoming)
                    del following
                    with self.coverage.watching():
                        return self._load(rest)
                except (InflightError, torch.OutOfMemoryError):
                    raise
                except Exception as error:
                    # Upstream's loaders reject by assertion, KeyError or ValueError,
                    # without the tensor's name. It is the tensor that the loader got
                    # last.
                    if error is self._transport_error or self._current is None:
                        raise
                    self._checks.note_rejected(self._current, error)
                    self._is_rejected, self._current = True, None
                    # The frames hold memory that a transport wants to use again.
                    traceback.clear_frames(error.__traceback__)
        finally:
            self._transport_error = None  # it holds frames, and their memory

    def _changed(self, parts: Iterable[Pair]) -> Iterator[Pair]:
        """The tensors that a delta changes, whole."""
        if self._delta is None:
            assert self._served is not None
            self._delta = DeltaTensors(
                self._manifest.tensors, self._served.tensors.get, self._count_bytes
            )
        return self._delta.tensors(parts)

    def _count_bytes(self, number: int) -> None:
        self.num_bytes += number

    def require_taken(self) -> None:
        """Raise `WeightsMismatch` if the model's loader has rejected a tensor, and
        `Malformed` if a part of a delta cannot be decoded.

        Called after each chunk: further tensors would be sent in vain.
        """
        if self._writer is not None:
            self._writer.require_sound()
        if self._checks.is_rejected:
            raise self._mismatch()

    def require_accepted(self) -> None:
        """Raise `WeightsMismatch` if a tensor that has come is wrong in any way."""
        if self._checks.has_rejected:
            raise self._mismatch()

    def _load(self, weights: Iterable[Pair]) -> Any:
        return self._shadow.load(weights)

    def _admit(self, batches: Iterable[list[Pair]]) -> Iterator[Pair]:
        """The tensors that the model's loader has to load; others are replayed here."""
        coverage = self.coverage
        for batch in batches:
            if self._cancelled():
                raise Cancelled("the update was aborted")
            with undirected():
                accepted = self._accepted(batch)
            lent = [*accepted] if self._is_lent else []
            accepted = self._without_head(accepted)
            with undirected():
                fresh = self._replay(accepted)
            fresh = [pair for pair in fresh if not self._checks.is_spare(pair[0])]
            if fresh:
                coverage.watch_loaders()
            while fresh:
                name, tensor = fresh.pop(0)
                if lent:  # a loader may keep what it gets
                    tensor = tensor.clone()
                if self._checks.is_not_asked_about(name):
                    self._checks.note_unknown(name)
                    continue
                is_computed = name in self._shadow.computed
                if is_computed and self._verify:
                    self._scratch.keep(name, tensor)
                if is_computed and self._shadow.log is not None:
                    self._take_computed(name, tensor)
                    del tensor
                    continue
                before = coverage.num_loads
                coverage.touched.clear()
                entry = Entry(tensor.shape, tensor.dtype)
                coverage.handed, coverage.entry = tensor, entry
                if self._checks.is_unknown_name(name):
                    # The call itself may find that the entry is not whole.
                    if not self._takes(name, tensor):
                        entry.is_whole = False
                else:
                    self._current = name
                    yield name, tensor
                    self._current = None
                    if self._is_rejected:
                        self._is_rejected, entry.is_whole = False, False
                    elif coverage.num_loads == before:
                        self.unfilled.append(name)
                if self._checks.is_renamed(name, coverage.fills):
                    self._renamed |= coverage.touched
                for param, _ in () if entry.is_traced else entry.filled:
                    self._computed.setdefault(param, []).append(name)
                if entry.num_unread and self._shadow.is_alone:
                    self._checks.note_cut(name, entry.num_unread)
                elif self._shadow.log is not None:
                    is_processed = not self._shadow.quantised.isdisjoint(
                        coverage.touched
                    )
                    is_taken = coverage.num_loads > before and not is_processed
                    if is_taken and not self._checks.is_rejected:
                        self._take_new(name, tensor, entry)
                elif self._shadow.plan.entry(name, tensor) is None:
                    self._shadow.plan.keep(name, entry)
                # A transport reuses memory that no tensor refers to.
                coverage.handed = coverage.entry = None
                del tensor
            if lent and self._verify:
                # What was logged is what was digested before, unless the trainer has
                # written in between. Then this digest is another one.
                with undirected():
                    self._gpu_digest.add(lent)
            self._progress(self.num_bytes, self._checks.num_seen)

    def _take_computed(self, name: str, tensor: torch.Tensor) -> None:
        """Have the loader compute with a tensor; log or fill in what is whole by that.

        Args:
            name: of the tensor, which is in `shadow.computed`.
            tensor: as it came.

        """
        before = self.coverage.num_loads
        try:
            whole = self._scratch.load(name, tensor)
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # loaders raise many kinds of errors
            self._checks.note_rejected(name, error)
            traceback.clear_frames(error.__traceback__)  # they hold memory
            return
        if self.coverage.num_loads == before:
            self.unfilled.append(name)
        for param, content in whole.items():
            if not self._allow_nonfinite:
                made_of = self._shadow.computed.items()
                names = (name for name, params in made_of if param in params)
                self._note_nonfinite(names, content)
            self._take_processed(param, content)

    def _take_new(self, name: str, tensor: torch.Tensor, entry: Entry) -> None:
        """Log or fill in a tensor of a form that the destination table did not have.

        Args:
            name: of the tensor.
            tensor: as it came.
            entry: what its loader has just done, without memory to write to.

        Raises:
            StagingUnavailable: the loader does more than to copy it.

        """
        plan = self._shadow.plan
        known = plan.known(name)
        plan.keep(name, entry)
        if plan.passes_over(name):
            return  # a drafter's copy of a layer that is its model's
        self.coverage.unwatch_loaders()
        try:
            self._shadow.learn()
        finally:
            self.coverage.watch_loaders()
        if plan.entry(name, tensor) is not entry or not entry.is_proved:
            if known is not None:
                plan.restore(name, known)
            raise StagingUnavailable(
                f"{name!r} cannot be updated with --inflight-staging delta: the "
                f"model's loader does not only copy a tensor of shape "
                f"{list(tensor.shape)} and dtype {_name_of(tensor.dtype)}",
                tensors=[name],
                remedy="Send the tensor as the start checkpoint has it, or start the "
                "engine with another --inflight-staging.",
            )
        self._take_known([Came(name, entry, tensor)])

    def _take_known(self, known: Sequence[Came]) -> None:
        """Log what differs from the live weights; fill it in if these are lost."""
        assert self._comparison is not None
        if self._fills:
            fill(self._live, [(entry, tensor) for _, entry, tensor in known])
        else:
            self._comparison.log_differences(known)

    def _take_processed(self, param: str, content: torch.Tensor) -> None:
        """Log or fill in a parameter that is no copy of tensors.

        Args:
            param: its name.
            content: what its loader, or processing, has made of its tensors.

        Raises:
            EngineFault: it has another form than is served.

        """
        served = self._live[param].data
        if (content.shape, content.dtype) != (served.shape, served.dtype):
            raise EngineFault(
                f"loading has made {list(content.shape)} {_name_of(content.dtype)} "
                f"of {param}, and {list(served.shape)} {_name_of(served.dtype)} is "
                "served"
            )
        assert self._shadow.log is not None
        with undirected():
            if content.stride() != served.stride():  # a digest follows the memory
                content = make_empty(served, served.device).copy_(content)
            self.marks |= digests_of([(param, content)], served.device)
            if self._fills:
                served.copy_(content)
            else:
                log_parameter(self._shadow.log, self._live, param, content)

    def _without_head(self, accepted: list[Pair]) -> list[Pair]:
        """Load the score of a classifier, if the tensor it is made of has come.

        Returns the tensors that the model's loader has to see: all except the head.
        """
        if (classifier := self._shadow.classifier) is None:
            return accepted
        for name, tensor in accepted:
            if not classifier.reads(name):
                continue
            self._current = name
            score = classifier.score(tensor)
            self.coverage.watch_loaders()
            # The score was computed here and not sent, so it is loaded each time and
            # never replayed.
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
        """The accepted tensors of a batch, under the model's names."""
        accepted: list[Pair] = []
        while batch:
            sent_name, tensor = batch.pop(0)
            name = self._manifest.model_name(sent_name)
            if self._accept(name, tensor):
                accepted.append((name, tensor))
                if self._delta is None:
                    self.num_bytes += tensor.nbytes
                self.num_in_place += self._shadow.plan.is_home(name, tensor)
        self._sampler.add(accepted)
        # A method may load tensors of the host beside those of the GPU.
        if self._verify and (on_gpu := [pair for pair in accepted if pair[1].is_cuda]):
            # Checked at the end of the update: reading a result now would wait for the
            # GPU.
            self._gpu_digest.add(on_gpu)
        return accepted

    def _replay(self, pairs: list[Pair]) -> list[Pair]:
        """Load the tensors that the plan replays, in one call; returns the others."""
        plan = self._shadow.plan
        comparison = self._comparison
        fresh: list[Pair] = []
        known: list[Came] = []
        if comparison is not None:  # a record is of a tensor without gaps
            pairs = [(name, tensor.contiguous()) for name, tensor in pairs]
        for name, tensor in pairs:
            entry = plan.entry(name, tensor)
            if entry is None or not entry.is_proved:
                fresh.append((name, tensor))
                continue
            known.append(Came(name, entry, tensor))
            self.coverage.replayed(entry)
            if self._checks.is_renamed(name, self.coverage.fills):
                self._renamed.update(param for param, _ in entry.filled)
        if comparison is None:
            replay([(entry, tensor) for _, entry, tensor in known])
        else:
            self._take_known(known)
        return fresh

    def _drawn(self, weights: Iterable[Pair]) -> Iterator[list[Pair]]:
        """`weights` in batches, each as large as the transport makes it."""
        make = getattr(weights, "batches", None)
        if (into := getattr(weights, "into", None)) is not None:
            with undirected():
                into(self._place)
        lend = getattr(weights, "lend", None) if self._may_be_lent else None
        self._is_lent = lend is not None
        if lend is not None:
            lend()
        batches = make() if make else ([pair] for pair in weights)
        while True:
            try:
                with undirected() if make else nullcontext():
                    batch = next(batches, None)
            except Exception as error:
                # Remembered as an error of the transport, and not of the model.
                self._transport_error = error
                raise
            if batch is None:
                return
            yield batch

    @property
    def _may_be_lent(self) -> bool:
        """Whether whole tensors are only compared, so that nobody writes or keeps
        them.

        A trainer may write by mistake while they are compared. Digests tell that.
        """
        is_compared = self._comparison is not None and not self._fills
        return is_compared and not self.is_delta and self._verify

    def _place(
        self, sent_name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Destination | None:
        """Where a transport may receive a tensor that has not been checked yet."""
        name = self._manifest.model_name(sent_name)
        if not self._checks.may_come(name):
            return None
        plan, home = self._shadow.plan, self._shadow.place(name, shape, dtype)
        if home is not None:
            self._first_write()
            # The replay check runs before the first write, and may have changed the
            # plan.
            home = self._shadow.place(name, shape, dtype)
        if home is not None:
            self._shadow.stale.update(plan.filled_by(name))
        return home

    def _accept(self, name: str, tensor: torch.Tensor) -> bool:
        """Check a tensor, on the host also its content; returns whether it may be
        loaded."""
        if not self._checks.accepts(name, tensor):
            return False
        if not self._verify or tensor.is_cuda:
            return True
        num, bad = self._shadow.num_threads, 0
        if not self._allow_nonfinite:
            served_as = [self._served_as(name, tensor.dtype)]
            (bad,) = ops.count_nonfinite([tensor], served_as=served_as, num_threads=num)
        (digest,) = ops.digest([tensor], num_threads=num)
        # A tensor with bad content is loaded all the same, as on a GPU, where content
        # is checked at the end. So no parameter looks unfilled because of it.
        self._judge(name, digest, bad)
        if self._keeps:
            # A transport reuses its memory; a delta has made memory of its own.
            self._kept[name] = tensor if self._delta is not None else tensor.clone()
        return True

    def _judge(self, name: str, digest: ops.Digest, num_nonfinite: int) -> None:
        converted = self._converted.get(name)
        served_as = None if converted is None else _name_of(converted)
        self._checks.judge(name, digest, num_nonfinite, served_as)

    def _served_as(self, name: str, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype a tensor is served in, if its range is smaller; else None."""
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
        """Load a tensor by a name that the model does not have.

        Loaders may rename. The loader is called with this tensor alone, so that a
        rejection ends the load of no other tensor. Returns whether the loader went
        through; it may have passed over the tensor.
        """
        coverage, checks = self.coverage, self._checks
        before = coverage.num_loads
        try:
            self._load([(name, tensor)])
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # loaders raise many kinds of errors
            checks.note_rejected(name, error)
            return False
        if coverage.num_loads == before and name in self._shadow.start_checkpoint:
            self.unfilled.append(name)  # perhaps it filled nothing at the start, too
        elif coverage.num_loads == before:
            checks.note_unknown(name)
        return True

    def foresee(
        self,
        announced: Mapping[str, TensorSpec],
        *,
        are_all: bool,
        is_open: bool = False,
    ) -> None:
        """Raise `WeightsMismatch` if tensors that are announced cannot be accepted.

        Names, shapes and dtypes are checked, before a byte has come. Nothing is
        written, and
        the rollback target stays.

        Args:
            announced: the tensors, under the model's names.
            are_all: whether no other tensors will come.
            is_open: whether a load is under way in the shadow model.

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
            rejection = self._checks.problems_announced(
                self._unlike_served(announced),
                self._shadow.places,
                ask,
                are_all=are_all,
            )
        if rejection is not None:
            raise rejection

    def _unlike_served(
        self, announced: Mapping[str, TensorSpec]
    ) -> Mapping[str, TensorSpec]:
        """Of a delta, the tensors that are not served in that form.

        The others were accepted when they came for the version that is served.
        """
        if not self.is_delta or self._served is None:
            return announced
        facts = self._served.facts
        return {
            name: spec
            for name, spec in announced.items()
            if (fact := facts.get(name)) is None or fact[:2] != (spec.dtype, spec.shape)
        }

    def foresee_files(
        self, announced: TensorList, *, are_all: bool, is_open: bool = False
    ) -> None:
        """The same for files, whose headers have been read."""
        model_name = self._manifest.model_name
        dtypes = (str(dtype).removeprefix("torch.") for dtype in announced.dtypes)
        specs_read = zip(announced.names, announced.shapes, dtypes, strict=True)
        specs = (
            TensorSpec(model_name(name), tuple(shape), dtype)
            for name, shape, dtype in with_breaks(specs_read)
        )
        tensors = {spec.name: spec for spec in specs}
        self.foresee(tensors, are_all=are_all, is_open=is_open)

    def _asked(self, spec: TensorSpec) -> tuple[set[str], Exception | None]:
        """The parameters that the model's loader would fill, and its exception."""
        dtype = getattr(torch, spec.dtype)
        try:
            hollow = torch.empty(spec.shape, dtype=dtype, device="meta")
        except RuntimeError:  # no tensor has so many elements
            return set(), None
        return self.coverage.asked(self._load, (spec.name, hollow))

    @property
    def written(self) -> set[str]:
        """Parameters that a delta has written element by element."""
        return set() if self._writer is None else self._writer.params

    @property
    def shares(self) -> list[int] | None:
        """Of a delta, see `DeltaWriter.shares`."""
        return None if self._writer is None else self._writer.shares()

    def due(self) -> Set[str]:
        """The parameters that the update has to fill."""
        return self.coverage.due(self._manifest)

    def tally(self) -> dict[str, int]:
        """The tally of the parameters that the update has to fill."""
        return self.coverage.tally(self._manifest)

    def leave_unsent(self) -> list[str]:
        """Let parameters that nothing was sent for keep their live values.

        Returns:
            the names of these parameters.

        """
        unsent = self.coverage.due(self._manifest) - self.coverage.begun
        if unsent:
            self._manifest = replace(self._manifest, subset=("*",))
        return sorted(unsent)

    def complete(self) -> None:
        """Load again the unchanged tensors of parameters that a delta has changed.

        A parameter may be fused of several tensors, and a layer may be packed from
        several parameters. What a delta does not change of them is loaded as it is
        served.

        A loader may do something when it has got its last tensor, so it is called here
        if the tensors that came last were replayed without it. A call walks through the
        whole model, which is too slow for each of many small loads.
        """
        if self._is_owed:
            with self.coverage.watching():
                self._load(iter(()))
        if self._delta is None:
            return
        self._load_all(self._delta.rest())
        assert self._served is not None
        facts, tensors = self._served.facts, self._served.tensors
        plan, places = self._shadow.plan, self._shadow.places
        names: set[str] = set()
        for param in self.coverage.short(self.coverage.due(self._manifest)):
            names.update(plan.names_of(param), places.names_of(param))
        names = {n for n in names - self._manifest.tensors.keys() if n in tensors}
        if not names:
            return
        self._expect(sorted(names), facts)
        self._load_all((name, tensors[name]) for name in sorted(names))

    def verdict(self) -> Content:
        """The content of the update; raises `WeightsMismatch` unless it can be served.

        Completeness is checked on the parameters, whatever the tensors are called.
        Every element of every parameter has to be written; for a subset, of every
        parameter that was begun.
        """
        if self._writer is not None:
            return self._verdict_of(self._writer)
        checks = self._checks
        self._require_written_once()
        with undirected():
            for name, digest, bad in self._gpu_digest.results():
                self._judge(name, digest, bad)
            samples = self._sampler.samples()
        if self.coverage.has_strays and self._shadow.log is not None:
            raise StagingUnavailable(
                "the model's loader fills parameters from tensors that it has kept or "
                "computed, which --inflight-staging delta cannot follow",
                remedy="Start the engine with another --inflight-staging.",
            )
        if self.coverage.has_strays:
            self._shadow.plan.forget()  # a replay would leave them out
        why = "it is filled by tensors of two names"
        for param in sorted(self._renamed & self.coverage.refilled):
            checks.note_wrong(param, Cause.DUPLICATE, why)
        checks.compare_heads(
            self._served.facts if self._served and self.is_delta else {}
        )
        self._note_unused(lambda name: not self._shadow.may_idle(name))
        missing = self.coverage.short(self.coverage.due(self._manifest))
        if missing or checks.objects:
            raise self._mismatch(missing, is_end=True)
        checks.require_subset()
        self._pass_over()
        self._note_unused()
        if checks.objects:
            raise self._mismatch(is_end=True)
        self._digest_written()
        self._shadow.plan.confirm()
        return Content(checks.facts(), samples, self._kept | self._scratch.kept)

    def _require_written_once(self) -> None:
        """Raise `WeightsMismatch` if an element that a method has written itself was
        written again, by the method or by `load_weights`."""
        problems = list(self.writes.problems())
        for name, cause, why in problems:
            self._checks.note_wrong(name, cause, why)
        if problems:
            raise self._mismatch()

    def _digest_written(self) -> None:
        """Digest what a method has written itself, and check its numbers."""
        if not self.writes.names:
            return
        if not self._verify:
            self.written_digest = ""
            return
        with undirected():
            digests = self.writes.digests()
        if not self._allow_nonfinite:
            for name, cause, why in self.writes.nonfinite(digests):
                self._checks.note_wrong(name, cause, why)
        if self._checks.has_rejected:
            raise self._mismatch()
        self.written_digest = self.writes.digest(digests)

    def _verdict_of(self, writer: DeltaWriter) -> Content:
        """The content of what a delta changes; raises as `verdict` does."""
        with undirected():
            problems = writer.problems()
        if not problems:
            self._compute_again(writer.computed)
            return writer.content(self._scratch.kept)
        wrong = {name: Problem(cause, why) for name, cause, why in problems}
        raise rejection({}, wrong, [], [], {}, num_asked=0)

    def _compute_again(self, changed: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `shadow.computed` that a delta has changed.

        Those that share a parameter with one are loaded again, too.

        Args:
            changed: the tensors, whole.

        Raises:
            WeightsMismatch: what is made of a tensor cannot be served.

        """
        if not changed:
            return
        assert self._served is not None
        facts, kept = self._served.facts, self._served.tensors
        rest = sorted(self._shadow.computed_with(changed) - changed.keys())
        self._expect(rest, facts)
        self._load_all([*changed.items(), *((name, kept[name]) for name in rest)])
        self.require_accepted()
        for name in (*changed, *rest):
            for param in self._shadow.computed[name]:
                if self.coverage.fills[param].missing:
                    raise WeightsMismatch(
                        f"the loader has not computed all of {param}",
                        remedy="Send the whole version.",
                        tensors=[name],
                    )

    def _expect(self, names: Iterable[str], facts: Mapping[str, Facts]) -> None:
        """Accept tensors of the served version beside those that are announced."""
        self._checks.expect(
            {
                name: TensorSpec(name, shape, dtype, ops.Digest(*digest).hex())
                for name in names
                for dtype, shape, digest in (facts[name],)
            }
        )

    def require_finite(self) -> None:
        """Raise `WeightsMismatch` if a loader has computed NaN or Inf from finite
        numbers.

        Called when all layers are loaded. Plain copies are not checked again. A loader
        may compute other numbers, an exponential for example.
        """
        if self._allow_nonfinite or not self._computed:
            return
        params = dict(self._module.named_parameters())
        for param, names in self._computed.items():
            found = params.get(param)  # a quantised layer may have lost it
            is_lost = found is None or found.is_meta
            if not is_lost:
                self._note_nonfinite(names, params[param].data)
        if self._checks.has_rejected:
            raise self._mismatch()

    def _note_nonfinite(self, names: Iterable[str], content: torch.Tensor) -> None:
        """Note tensors of which a loader has made NaN or Inf."""
        (bad,) = ops.count_nonfinite([content])
        for name in names if bad else ():
            why = f"the model's loader makes {bad} numbers of it that are NaN or Inf"
            self._checks.note_wrong(name, Cause.NOT_FINITE, why)

    def is_spare(self, name: str) -> bool:
        """Whether a tensor may come although it fills nothing."""
        return self._checks.is_spare(name)

    def _note_unused(self, is_meant: Callable[[str], bool] = lambda name: True) -> None:
        """Note tensors that filled nothing, unless another rank may use them."""
        if self._shadow.has_all:
            for name in filter(is_meant, self.unfilled):
                self._checks.note_unused(name)

    def _pass_over(self) -> None:
        """Drop those unfilled tensors that filled nothing at the start either."""
        idle = set(filter(self._shadow.may_idle, self.unfilled))
        if not idle or (self._manifest.subset and not self.coverage.begun):
            return  # the subset would replace nothing
        # Other ranks' layers and experts are many; they are known: see `may_idle`.
        is_known = not self._shadow.has_all
        if is_known or self.coverage.passes_over(self._load, self._checks.hollow(idle)):
            self.unfilled = [n for n in self.unfilled if n not in idle]

    def _mismatch(
        self, missing: Iterable[str] = (), *, is_end: bool = False
    ) -> WeightsMismatch:
        """The error of this update; `missing` are parameters that are not full."""
        return self._checks.rejection(
            missing, self._shadow.places, self._filled_by, is_end=is_end
        )

    def _filled_by(self, name: str) -> set[str]:
        """The parameters that a tensor fills, or would have filled."""
        found = set(self._shadow.plan.filled_by(name))
        found = found or self._shadow.places.params_of(name)
        if not found:
            for _, hollow in self._checks.hollow([name]):
                found, _ = self.coverage.asked(self._load, (name, hollow))
        return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
