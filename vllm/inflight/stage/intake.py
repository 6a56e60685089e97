"""What a new version must pass on its way in, tensor by tensor.

Every transport, ours or somebody else's, hands its tensors to the shadow's
`load_weights`. The intake stands in that door: it renames, compares with the
manifest, digests, refuses NaN, counts bytes for the progress report, and stops
the stream when the update was cancelled. Behind the door it watches which part
of which parameter each tensor fills, so that at the end a missing shard of a
fused parameter is as visible as a missing tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.errors import Cancelled, InflightError, WeightsMismatch
from vllm.inflight.names import matcher
from vllm.inflight.stage.audit import Audit, Pair
from vllm.inflight.stage.content import Content
from vllm.inflight.stage.coverage import Coverage
from vllm.inflight.stage.drift import Sampler
from vllm.inflight.stage.experts import tensor_names
from vllm.inflight.stage.plan import Entry, replay
from vllm.inflight.stage.refusal import refusal, require_matches
from vllm.inflight.stage.shadow import Shadow
from vllm.inflight.update import Manifest
from vllm.inflight.wire.assembly import Home

PLAIN = {"bfloat16", "float16", "float32", "float64"}
"""Dtypes of one number in several lengths: what comes in one can be kept in another."""


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
    ) -> None:
        self._shadow = shadow
        self._manifest = manifest
        self._verify = verify
        self._allow_nonfinite = allow_nonfinite
        self._cancelled = cancelled
        self._progress = progress
        assert shadow.module is not None
        self._module = shadow.module
        self.coverage = Coverage(shadow.module, shadow.required, shadow.behind)
        self._known = shadow.known_names
        self._is_declared = matcher(manifest.subset)
        self._seen: dict[str, ops.Digest] = {}
        self._entries: dict[str, tuple[tuple[int, ...], str]] = {}
        self._wrong: dict[str, str] = {}
        self._unknown: dict[str, tuple[list[int], str]] = {}
        self._audit = Audit(shadow.device, shadow.tables, shadow.plan)
        self._sampler = Sampler(shadow.views, shadow.plan, shadow.device)
        self._broken: Exception | None = None
        self.unfilled: list[str] = []
        """Tensors that filled nothing on this rank; another stage may use them."""
        self.num_bytes = 0

    @property
    def is_partial(self) -> bool:
        """Whether parameters of the model keep what is served if nothing comes."""
        return bool(self._manifest.subset) or self.is_drafters

    @property
    def is_drafters(self) -> bool:
        """Whether all of it is the drafter's."""
        return self._manifest.draft

    # ------------------------------------------------------------ the door
    def load_weights(self, weights: Iterable[Pair]) -> Any:
        """Stands in for the shadow's own `load_weights`."""
        module = self._module
        current: list[str] = []
        try:
            # The class's: the instance's own is this method.
            load: Callable[..., Any] = type(module).load_weights  # type: ignore[attr-defined]
            with self.coverage.watching():
                return load(module, self._admit(weights, current))
        except (InflightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if error is self._broken:
                raise
            # Upstream's loaders refuse by assertion, KeyError or ValueError,
            # without the tensor's name: it is the one handed over last.
            if not current:
                raise
            name = current[0]
            shape, dtype = self._entries.get(name, ((), ""))
            if name not in self._known:
                self._unknown[name] = (list(shape), dtype)
                raise self._mismatch() from error
            self._wrong[name] = (
                f"the model cannot take it with shape {list(shape)} and dtype "
                f"{dtype}: {str(error) or type(error).__name__}"
            )
            raise self._mismatch() from error

    def _admit(self, weights: Iterable[Pair], current: list[str]) -> Iterator[Pair]:
        """What the model's loader has to see; what the plan knows is done here."""
        coverage = self.coverage
        for batch in self._drawn(weights):
            if self._cancelled():
                raise Cancelled("the update was aborted")
            fresh = self._replay(self._accepted(batch))
            while fresh:
                name, tensor = fresh.pop(0)
                if name.endswith(self._shadow.spares):
                    continue
                current[:] = [name]
                before = coverage.num_loads
                entry = Entry(tensor.shape, tensor.dtype)
                coverage.handed, coverage.entry = tensor, entry
                yield name, tensor
                if coverage.num_loads == before:
                    self.unfilled.append(name)
                if self._shadow.plan is not None:
                    self._shadow.plan.keep(name, entry)
                # A transport uses memory again that nobody looks into.
                coverage.handed = None
                del tensor
            self._progress(self.num_bytes, len(self._seen))
        current.clear()

    def _accepted(self, batch: list[Pair]) -> list[Pair]:
        """Those of a batch that may go on, under the model's names."""
        accepted: list[Pair] = []
        while batch:
            sent_name, tensor = batch.pop(0)
            name = self._manifest.model_name(sent_name)
            if self._accept(name, tensor):
                accepted.append((name, tensor))
                self.num_bytes += tensor.nbytes
        self._sampler.add(accepted)
        if self._verify and accepted and accepted[0][1].is_cuda:
            # Judged with the verdict: asking now would wait for the GPU.
            self._audit.add(accepted)
        return accepted

    def _replay(self, pairs: list[Pair]) -> list[Pair]:
        """Load what the plan knows, in one call; returns the others."""
        plan = self._shadow.plan
        if plan is None:
            return pairs
        fresh, known = [], []
        for name, tensor in pairs:
            entry = plan.entry(name, tensor)
            if entry is None:
                fresh.append((name, tensor))
                continue
            known.append((entry, tensor))
            self.coverage.replayed(entry)
        replay(known)
        return fresh

    def _drawn(self, weights: Iterable[Pair]) -> Iterator[list[Pair]]:
        """`weights`, as many at once as their transport has."""
        batches = getattr(weights, "batches", None)
        if (into := getattr(weights, "into", None)) is not None:
            into(self._place)
        try:
            yield from batches() if batches else ([pair] for pair in weights)
        except Exception as error:
            # Remembered as a failure of the transport, and not the model's.
            self._broken = error
            raise

    def _place(
        self, sent_name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Home | None:
        """Where a transport may receive a tensor, before anybody has looked at it."""
        name = self._manifest.model_name(sent_name)
        if not self._may_come(name):
            return None
        plan, home = self._shadow.plan, self._shadow.place(name, shape, dtype)
        if plan is not None and home is not None:
            self._shadow.behind.update(plan.filled_by(name))
        return home

    def _may_come(self, name: str) -> bool:
        return not self._manifest.subset or self._is_declared(name)

    def _accept(self, name: str, tensor: torch.Tensor) -> bool:
        """Check one tensor; what is wrong is kept, so a refusal lists it all."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if name in self._seen:
            self._wrong[name] = "it was sent twice"
            return False
        self._entries[name] = (shape, dtype)
        spec = self._manifest.tensors.get(name)
        if not self._may_come(name):
            self._wrong[name] = "no pattern of the subset declares it"
            return False
        if self._manifest.tensors and spec is None:
            self._wrong[name] = "the manifest does not announce it"
            return False
        if spec is not None and (spec.shape, spec.dtype) != (shape, dtype):
            self._wrong[name] = (
                f"announced as {list(spec.shape)} {spec.dtype}, "
                f"arrived as {list(shape)} {dtype}"
            )
            return False
        if not self._is_known(name, shape, dtype):
            return False
        self._seen[name] = ops.Digest.ZERO
        if not self._verify or tensor.is_cuda:
            return True
        bad = 0 if self._allow_nonfinite else ops.count_nonfinite([tensor])[0]
        return self._judge(name, ops.digest([tensor])[0], bad)

    def _judge(self, name: str, digest: ops.Digest, num_nonfinite: int) -> bool:
        """Whether the content of a tensor is what was announced, and can be served."""
        self._seen[name] = digest
        spec = self._manifest.tensors.get(name)
        if spec is not None and spec.digest not in (None, digest.hex()):
            self._wrong[name] = (
                f"its digest is {digest.hex()}, announced was {spec.digest}"
            )
            return False
        if num_nonfinite and not self._allow_nonfinite:
            self._wrong[name] = f"{num_nonfinite} of its elements are NaN or Inf"
            return False
        return True

    def _is_known(self, name: str, shape: tuple[int, ...], dtype: str) -> bool:
        if name.endswith(self._shadow.spares):
            return True
        if name not in self._known:
            if not self._shadow.asks_loader:
                self._unknown[name] = (list(shape), dtype)
            return self._shadow.asks_loader
        # The shape is known to the loaders, for every shard; they refuse.
        expected = self._known[name][1] or dtype
        if dtype != expected and not {dtype, expected} <= PLAIN:
            self._wrong[name] = f"it is {dtype}, the model's is {expected}"
            return False
        return True

    def verdict(self) -> Content:
        """What arrived; raises `WeightsMismatch` unless it can be served.

        Completeness is judged on the parameters: every element of every one has
        been written, whatever the checkpoint tensors are called; of a subset, of
        every one that was begun.
        """
        for name, digest, bad in self._audit.results():
            self._judge(name, digest, bad)
        subset = self._manifest.subset
        if subset and self._shadow.asks_loader:
            require_matches(subset, {**self._known, **self._entries})
        if subset and not (self._seen or self._wrong or self._unknown):
            raise WeightsMismatch(
                f"nothing was sent of the subset {', '.join(subset[:8])}",
                tensors=subset,
            )
        missing = self.coverage.short(self._due())
        announced = self._manifest.tensors.keys() - self._seen.keys()
        if missing or announced or self._wrong or self._unknown:
            raise self._mismatch(missing, sorted(announced - self._wrong.keys()))
        facts = {
            name: (dtype, shape, self._seen[name])
            for name, (shape, dtype) in self._entries.items()
            if name in self._seen
        }
        return Content(facts, self._sampler.samples())

    def _due(self) -> set[str]:
        """The parameters that have to be full.

        Those of a quantised layer are processed together, or not at all.
        """
        due = self.coverage.due(self._manifest)
        if not self._manifest.subset:
            return due
        paths = {name.rpartition(".")[0] for name in due}
        quantised = self._shadow.quantised
        return due | {name for name in quantised if name.rpartition(".")[0] in paths}

    def _mismatch(
        self, missing: Iterable[str] = (), announced: Iterable[str] = ()
    ) -> WeightsMismatch:
        absent = [n for p in missing for n in self._absent(p)]
        absent += [n for n in announced if n not in absent]
        return refusal(self._unknown, self._wrong, absent, self._known)

    def _absent(self, param: str) -> list[str]:
        names = tensor_names(self._module, param)
        return [n for n in names if n not in self._seen] or names
