"""Deltas on a rank with shadow parameters: only what changes is read and written.

The shadow weights are one version behind the served ones, or equal to them. They are
brought up first: by the places that the last delta has changed, or by a copy of the
parameters that differ. Then each change is read from the served weights, proved, and
written into the shadow weights.

With delta staging there are none. The changes go into a log, and a commit exchanges
them with the served bits (change_log.py).

The proof: a digest adds up over elements (docs/digest.md). So the digest of the new
tensor is that of the served one, plus what the changed elements contribute now, minus
what they contributed before. It has to be the announced one. The elements that do not
change are those of the served version, whose digest is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight import ops
from vllm.inflight.delta import Changes, Part
from vllm.inflight.delta.decode import apply, decode_unproved
from vllm.inflight.delta.decoded import DecodedPart, Numbers
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.delta.part import bring_tables
from vllm.inflight.delta.parts import ArrivingParts, Pair
from vllm.inflight.errors import Cause, DeltaUnsupported, Malformed
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.update import TensorSpec
from vllm.inflight.worker.delta.changed_samples import ChangedSamples
from vllm.inflight.worker.delta.destinations import (
    Destinations,
    Found,
    KnownDestinations,
)
from vllm.inflight.worker.delta.device_writer import DeviceWriter, copy_elements
from vllm.inflight.worker.delta.order import Order
from vllm.inflight.worker.delta.shares import Term, held_by_several, share
from vllm.inflight.worker.delta.targets import KnownTargets, Targets
from vllm.inflight.worker.model.layers import parameters_by_name
from vllm.inflight.worker.replay_plan import Entry
from vllm.inflight.worker.shadow.carry_over import copy_unsent
from vllm.inflight.worker.shadow.changed_elements import (
    ChangedElements,
    Stretch,
    elements,
)
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.verify.checks import IS_TIED, untied
from vllm.inflight.worker.verify.content import Content, Facts

MOST_DECODED = 1 << 30
"""Most bytes that the changes of several parts take when they are decoded together,
beside where they stay. Each decoding takes about ten launches, and each launch time
that decoding has not."""
MOST_WITH_ONE_SET = 128 << 20
"""The same with delta staging, which is for engines that have little memory."""

Problem = tuple[str, Cause, str]
"""A tensor, what is wrong with it, and the sentence that says so."""


class DeltaWriter:
    """Writes one delta into the shadow weights of one rank, or into its log.

    Args:
        shadow: the shadow model, whose parameters lie where they are served.
        specs: the announced tensors; the parts have their numbers.
        served: the content of the served weights.
        live: the served parameters.
        allow_nonfinite: whether NaN and Inf are accepted.
        received: called with the bytes of each part, and the tensors so far.
        between: called after each parameter that is brought up, with the bytes so far.

    """

    def __init__(
        self,
        shadow: ShadowModel,
        specs: Mapping[str, TensorSpec],
        served: Content,
        *,
        live: Mapping[str, torch.Tensor],
        allow_nonfinite: bool,
        received: Callable[[int, int], None],
        between: Callable[[int], None],
    ) -> None:
        assert shadow.module is not None
        self._shadow = shadow
        self._log = shadow.log
        self._specs = list(specs.values())
        self._served = served
        self._allow_nonfinite = allow_nonfinite
        self._received = received
        self._between = between
        self._parts = ArrivingParts()
        self._order = Order(self._specs)
        self._live = live
        self._new: Mapping[str, torch.Tensor] = {}
        """The shadow parameters; none with delta staging."""
        if self._log is None:
            self._new = parameters_by_name(shadow.module)
        self._targets = Targets.of([])
        """What the tensors are written into; known when it has begun."""
        self._announced = _halves([spec.digest for spec in self._specs])
        """The digest of each tensor, in halves."""
        self._sums = np.zeros((len(self._specs), 2), dtype=np.uint64)
        """What the digest of each tensor changes by."""
        self._num_bad = np.zeros(len(self._specs), dtype=np.int64)
        """Elements of each tensor that become NaN or Inf."""
        self._num_entries = np.zeros(len(self._specs), dtype=np.int64)
        """Changed elements that have come of each tensor."""
        self._num_written = np.zeros(len(self._specs), dtype=np.int64)
        """Of these, the elements that this rank serves."""
        self.computed: dict[str, torch.Tensor] = {}
        """Changed tensors of which a loader computes parameters, whole, on the host."""
        self._samples: ChangedSamples | None = None
        """Those of the version that the delta leads to; None if they are not known."""
        self._on_device: DeviceWriter | None = None
        self._results: Numbers | None = None
        """Of the parts that are proved; see `DeviceWriter.results`."""
        self._faults: list[torch.Tensor] = []
        """Of parts that were decoded on the GPU, whose data may be malformed."""

    def begin(self) -> None:
        """Bring the shadow weights up to what is served.

        Raises:
            DeltaUnsupported: a tensor of the delta is not served as a copy.

        """
        assert self._shadow.module is not None
        self._begin_computed()
        self._targets = self._found_targets(self._shadow.module)
        computed = (self._shadow.computed[name] for name in self.computed)
        written = self.params.union(*computed)
        for name in written if self._log is None else ():
            if self._new[name].device != self._live[name].device:
                raise DeltaUnsupported(
                    "the shadow weights are in host memory, where no delta is applied",
                    remedy="Send whole versions, or start with another "
                    "--inflight-staging.",
                )
        if self._log is None:
            bring_up(self._shadow, self._live, self._new, self._between)
        if self._served.samples is not None:
            names, sizes = list(self._facts), self._targets.tensors[:, 0]
            self._samples = ChangedSamples(self._served.samples, names, sizes)
        if self._shadow.device.type == "cuda":
            self._on_device = DeviceWriter(
                self._shadow.device,
                self._live,
                self._new if self._log is None else self._log,
                self._targets,
                self._samples,
            )

    def _begin_computed(self) -> None:
        """Copy the tensors that loaders compute with; raises as `begin`."""
        changed = self._shadow.computed.keys() & self._facts.keys()
        kept = self._served.tensors
        if missing := self._shadow.computed_with(changed) - kept.keys():
            raise self._not_a_copy(min(missing))
        self.computed = {name: kept[name].clone() for name in changed}

    def take(self, pairs: Iterable[Pair]) -> None:
        """Apply the parts of one chunk.

        Raises:
            Malformed: a part is invalid, or the parts are not in order.

        """
        arrived: list[Part] = []
        for name, tensor in pairs:
            arrived += self._parts.add(name, tensor)
            del tensor  # a transport reuses memory that no tensor refers to
        bring_tables(arrived)
        parts = [part.on(self._shadow.device) for part in arrived]
        for part in parts:
            self._order.check(part)
        for together in self._batches(parts):
            self._write(together)
            num_bytes = sum(part.num_bytes for part in together)
            self._received(num_bytes, int(np.count_nonzero(self._num_entries)))

    def require_sound(self) -> None:
        """Raise `Malformed` if the data of a part was malformed.

        On a GPU this waits for the parts so far, so it is asked once for each chunk.
        """
        faults, self._faults = self._faults, []
        if faults and self._on_device is not None:
            self._results = self._on_device.results(faults)

    def problems(self) -> list[Problem]:
        """What is wrong with the tensors as they are now.

        Raises:
            Malformed: a part has not arrived, or its data is malformed.
            ChangeLogFull: with delta staging, the log had no room for all changes.

        """
        self._parts.require_all()
        self.require_sound()
        if self._log is not None:
            self._log.require_room()
        if (results := self._results) is not None:
            self._sums = results[:, :2].view(np.uint64)
            self._num_bad, self._num_written = results[:, 2], results[:, 3]
        digests = self._served_digests + self._sums  # modulo 2**64
        is_wrong = (digests != self._announced).any(1)
        is_wrong &= self._targets.has_all
        is_bad = (self._num_bad > 0) & (not self._allow_nonfinite)
        found: list[Problem] = []
        for number in np.flatnonzero(is_wrong | is_bad | (self._num_entries == 0)):
            spec = self._specs[number]
            if not self._num_entries[number]:
                why = "the manifest announces a change of it, and none came"
                found.append((spec.name, Cause.MISSING, why))
            elif is_wrong[number]:
                digest = ops.Digest(*digests[number].tolist())
                why = (
                    f"with these changes its digest is {digest.hex()}, announced was "
                    f"{spec.digest}: the changes were made for other weights than are "
                    "served, or some of them were lost"
                )
                found.append((spec.name, Cause.DIGEST, why))
            else:
                why = (
                    f"{self._num_bad[number]} of its changed elements become NaN or Inf"
                )
                found.append((spec.name, Cause.NOT_FINITE, why))
        wrong = {name for name, _, _ in found}
        heads = [name for name in self._untied_heads() if name not in wrong]
        return found + [(name, *IS_TIED) for name in heads]

    def _untied_heads(self) -> list[str]:
        """Tied heads that would differ from the embedding, which is served for them."""
        ignored = self._shadow.ignored
        if not ignored.has_tied_head:
            return []
        # A subset may have left the digest of a head behind that nobody serves.
        before = set(untied(self._served.facts, ignored)) - self._facts.keys()
        found = untied({**self._served.facts, **self._facts}, ignored)
        return [name for name in found if name not in before]

    @functools.cached_property
    def _served_digests(self) -> NDArray[np.uint64]:
        """The digest of each tensor as it is served, in halves."""
        facts = self._served.facts
        halves = [facts[spec.name][2] for spec in self._specs]
        return np.array(halves, dtype=np.uint64).reshape(-1, 2)

    @functools.cached_property
    def params(self) -> set[str]:
        """The parameters that the delta writes; known when it has begun."""
        return set(self._targets.params)

    def shares(self) -> list[int] | None:
        """This rank's share of the tensors that are cut over ranks, the sum of all
        shares, and what was found of parts that several ranks hold; None if there is
        no other rank. See shares.py."""
        if self._shadow.is_alone:
            return None
        targets = self._targets
        is_cut = (targets.tensors[:, 3] > 0) & ~targets.has_all
        cut = np.flatnonzero(is_cut).tolist()
        several = [number for number in cut if self._num_holders(number) > 1]
        return (
            share(map(self._found, cut))
            + share(map(self._expected, cut))
            + held_by_several(map(self._held, several))
        )

    @property
    def unserved(self) -> list[str]:
        """The announced tensors that another rank has to serve."""
        is_unserved = (self._targets.tensors[:, 3] == 0) & ~self._targets.is_idle
        return [self._specs[n].name for n in np.flatnonzero(is_unserved).tolist()]

    def _found(self, number: int) -> Term:
        """What this rank has found of a tensor that is cut."""
        digest = ops.Digest(*self._sums[number].tolist())
        return self._specs[number].name, digest, int(self._num_written[number])

    def _expected(self, number: int) -> Term:
        """What all ranks should find of it together."""
        a, b = (self._announced[number] - self._served_digests[number]).tolist()
        holders = self._num_holders(number)
        difference = ops.Digest(a * holders % 2**64, b * holders % 2**64)
        num = int(self._num_entries[number]) * holders
        return self._specs[number].name, difference, num

    def _held(self, number: int) -> tuple[int, object, Term]:
        """What this rank has found of a part that other ranks hold as well."""
        parts = [copied.part for copied in self._targets.places[number].copies]
        return self._num_holders(number), parts, self._found(number)

    def _num_holders(self, number: int) -> int:
        """How many ranks hold this rank's part of a tensor."""
        return self._targets.places[number].num_holders(self._shadow.tp_size)

    def content(self, tensors: Mapping[str, torch.Tensor]) -> Content:
        """The content of the changed tensors.

        Args:
            tensors: those that are kept as they are sent.

        """
        samples = None if self._samples is None else self._samples.samples()
        return Content(self._facts, samples, tensors)

    @functools.cached_property
    def _facts(self) -> dict[str, Facts]:
        """The changed tensors as they were announced.

        Of a tensor that is cut, the ranks prove the digest together: see shares.py. Of
        one that is idle nobody does, as nothing of it is served.
        """
        return {
            spec.name: (spec.dtype, spec.shape, (a, b))
            for spec, (a, b) in zip(self._specs, self._announced.tolist(), strict=True)
        }

    def _found_targets(self, module: torch.nn.Module) -> Targets:
        """What the tensors are written into; raises as `begin`."""
        known = KnownDestinations.of(module)
        facts, specs = self._served.facts, self._specs
        forms = [(spec.name, spec.shape, spec.dtype) for spec in specs]
        served = [(n, *facts[n][1::-1]) if n in facts else None for n, _, _ in forms]
        if forms != served:
            for spec in specs:
                self._find(spec, known)  # raises for one of them
        kept = KnownTargets.of(module, self._shadow.plan.number)
        return kept.find(forms, specs, functools.partial(self._find, known=known))

    def _find(
        self, spec: TensorSpec, known: KnownDestinations
    ) -> tuple[Destinations, bool]:
        """Where a tensor is served, and whether the engine has no use for it."""
        facts = self._served.facts.get(spec.name)
        plan, is_shared = self._shadow.plan, self._shadow.is_whole_over_ranks
        entry = plan.known(spec.name) or self._shadow.kept.known(spec.name)
        found = known.find(spec.name, entry)
        # No element of a computed tensor has a place.
        is_idle = spec.name in self.computed
        is_idle |= found is None and self._is_unused(spec.name)
        if is_idle or (is_shared and entry is None and plan.passes_over(spec.name)):
            found = Destinations.nowhere(spec.shape, getattr(torch, spec.dtype))
        is_served = found is not None and (
            found.has_all or is_idle or (is_shared and found.is_once)
        )
        if facts is None or found is None or not is_served:
            if entry is not None and any(not each.is_exact for each in entry.copies):
                raise self._of_another_dtype(spec, entry)
            raise self._not_a_copy(spec.name)
        shape, dtype = found.form
        if found.form != (spec.shape, spec.dtype) or facts[:2] != (dtype, shape):
            raise Malformed(
                f"the delta announces {spec.name!r} as {list(spec.shape)} "
                f"{spec.dtype}, and {list(shape)} {dtype} of it is served"
            )
        return found, is_idle

    def _is_unused(self, name: str) -> bool:
        """Whether the loader takes such a tensor and no rank serves anything of it."""
        shadow = self._shadow
        is_idle = shadow.may_idle(name) and shadow.plan.passes_over(name)
        return is_idle or shadow.ignored.is_spare(name)

    def _not_a_copy(self, name: str) -> DeltaUnsupported:
        return DeltaUnsupported(
            f"{name!r} is not served here as a copy of the checkpoint's tensor, so a "
            f"delta cannot change it element by element{self._why(name)}",
            tensors=[name],
        )

    def _why(self, name: str) -> str:
        """Why a tensor of a quantised layer is not served as a copy."""
        shadow = self._shadow
        paths = {param.rpartition(".")[0] for param in shadow.places.params_of(name)}
        found = [shadow.unkept[path] for path in sorted(paths & shadow.unkept.keys())]
        return f" (of its quantised layer: {found[0]})" if found else ""

    def _of_another_dtype(self, spec: TensorSpec, entry: Entry) -> DeltaUnsupported:
        """The error for a tensor that the loader converts."""
        served = {
            str(self._live[copied.param].dtype).removeprefix("torch.")
            for copied in entry.copies
        }
        dtype = ", ".join(sorted(served))
        return DeltaUnsupported(
            f"{spec.name!r} comes as {spec.dtype} and is served as {dtype}, so a delta "
            "cannot change it element by element",
            tensors=[spec.name],
            remedy=f"Cast it to {dtype} in the trainer before it is compared (dtype= "
            "of Publisher and of Weights), or send whole versions.",
        )

    def _batches(self, parts: Sequence[Part]) -> Iterable[Sequence[Part]]:
        """Parts that are decoded together; on the host each of them alone."""
        if self._on_device is None or len(parts) < 2:
            return ([part] for part in parts)
        return self._on_device.batches(parts, self._most_decoded)

    @functools.cached_property
    def _most_decoded(self) -> int:
        """Bytes that several parts may take until they are written."""
        most = MOST_DECODED if self._log is None else MOST_WITH_ONE_SET
        return int(min(most, self._shadow.spare_bytes() / 4))

    def _write(self, parts: Sequence[Part]) -> None:
        """Decode parts, and write their changes."""
        for part in parts:
            rows = part.rows
            np.add.at(self._num_entries, rows["number"], rows["num_entries"])
        if self._on_device is None:
            for part in parts:
                changes = decode_unproved(part)
                for each in changes:
                    self._write_on_host(each)
                self._compute(changes)
            return
        launches = Launches(self._shadow.device)
        decoded = self._on_device.write(parts, self._shadow.note_changed, launches)
        launches.run()
        if decoded is not None:
            assert decoded.fault is not None
            self._faults.append(decoded.fault)
            self._compute(decoded)

    def _compute(self, decoded: DecodedPart) -> None:
        """Apply the changes of tensors that loaders compute with."""
        numbers = decoded.groups.numbers.tolist()
        names = [self._specs[number].name for number in numbers]
        if self.computed.keys().isdisjoint(names):
            return
        self.require_sound()  # else a place may be any number
        for group, name in enumerate(names):
            if (tensor := self.computed.get(name)) is not None:
                changes = decoded.changes_of(group)
                places, bits = to_host(changes.places).long(), to_host(changes.bits)
                apply(replace(changes, places=places, bits=bits), tensor.view(-1))

    def _write_on_host(self, changes: Changes) -> None:
        number, bits = changes.number, changes.bits
        places = self._targets.places[number]
        dtype = places.entry.dtype
        if self._samples is not None:
            self._samples.write_on_host(changes)
        for found in places.find(changes.places):
            if found.chosen is None:
                at, change = changes.places, bits
            else:
                at, change = changes.places[found.chosen], bits[found.chosen]
            old = elements(self._live[found.param], bits.dtype)[found.offsets]
            new = old + change if changes.are_differences else change
            self._put(found, old, new)
            self._num_written[number] += len(new)
            terms = ops.digest_of_changes(at, old, new, dtype.itemsize)
            self._sums[number] += np.array([terms.a, terms.b], dtype=np.uint64)
            if not self._allow_nonfinite:
                (bad,) = ops.count_nonfinite([new.view(dtype)])
                self._num_bad[number] += bad

    def _put(self, found: Found, old: torch.Tensor, new: torch.Tensor) -> None:
        """Write elements of a parameter into the shadow weights, or into the log."""
        if self._log is not None:
            self._log.add(found.param, found.offsets, old, new)
            return
        # Noted before it is written, so that an aborted update is brought up too.
        stretch = Stretch(found.param, 0, len(new), new.element_size())
        offsets = found.offsets.to(torch.int32)
        self._shadow.note_changed(ChangedElements(offsets, (stretch,)))
        elements(self._new[found.param], new.dtype)[found.offsets] = new


def _halves(digests: Sequence[str | None]) -> NDArray[np.uint64]:
    """Digests of 32 hex digits in halves, uint64 [n, 2].

    A manifest was checked before, so a delta has a valid digest of each tensor.
    """
    octets = bytes.fromhex("".join([digest or "" for digest in digests]))
    halves = np.frombuffer(octets, dtype=">u8").astype(np.uint64)
    return halves.reshape(-1, 2)


def bring_up(
    shadow: ShadowModel,
    live: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    between: Callable[[int], None],
) -> None:
    """Make the shadow weights equal to the served ones where they differ.

    Args:
        shadow: the shadow model; it knows where both may differ.
        live: the served parameters.
        new: the shadow parameters.
        between: called after each parameter with the bytes copied so far. An exception
            from it ends the copying; what is left still counts as different.

    """
    logs = [log.without(shadow.stale) for log in shadow.changed]
    with torch.no_grad():
        copy_unsent(shadow, set(), between)
        num_bytes = 0
        if logs and logs[0].offsets.is_cuda:
            between(copy_elements(logs, live, new))
            logs = []
        for log in logs:
            log.copy(live, new)
            num_bytes += log.num_bytes
            between(num_bytes)
    shadow.changed.clear()
