"""Deltas on a rank with shadow parameters: only what changes is read and written.

The shadow weights are one version behind the served ones, or equal to them. They are
brought up first: by the places that the last delta has changed, or by a copy of the
parameters that differ. Then each change is read from the served weights, proved, and
written into the shadow weights.

The proof: a digest adds up over elements (docs/digest.md). So the digest of the new
tensor is that of the served one, plus what the changed elements contribute now, minus
what they contributed before. It has to be the announced one. The elements that do not
change are those of the served version, whose digest is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch

from vllm.inflight import ops
from vllm.inflight.delta import Changes, Part, decode
from vllm.inflight.delta.parts import ArrivingParts, Pair
from vllm.inflight.errors import Cause, DeltaUnsupported, Malformed
from vllm.inflight.update import TensorSpec
from vllm.inflight.worker.delta.changed_elements import (
    ChangedElements,
    Stretch,
    elements,
)
from vllm.inflight.worker.delta.destinations import Destinations
from vllm.inflight.worker.delta.device_writer import DeviceWriter
from vllm.inflight.worker.delta.order import Order
from vllm.inflight.worker.shadow.carry_over import copy_unsent
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.verify.content import Content, Facts
from vllm.inflight.worker.verify.drift import Samples, sample_places

Problem = tuple[str, Cause, str]
"""A tensor, what is wrong with it, and the sentence that says so."""


class DeltaWriter:
    """Writes one delta into the shadow weights of one rank.

    Args:
        shadow: the shadow model, whose parameters lie where they are served.
        specs: the announced tensors; the parts have their numbers.
        served: the content of the served weights.
        received: called with the bytes of each part, and the tensors so far.
        between: called after each parameter that is brought up, with the bytes so far.

    """

    def __init__(
        self,
        shadow: ShadowModel,
        specs: Mapping[str, TensorSpec],
        served: Content,
        *,
        allow_nonfinite: bool,
        received: Callable[[int, int], None],
        between: Callable[[int], None],
    ) -> None:
        assert shadow.module is not None
        self._shadow = shadow
        self._specs = list(specs.values())
        self._served = served
        self._allow_nonfinite = allow_nonfinite
        self._received = received
        self._between = between
        self._parts = ArrivingParts()
        self._order = Order(self._specs)
        self._live = dict(shadow.live.named_parameters())
        self._new = dict(shadow.module.named_parameters())
        self._places: list[Destinations] = []
        """Of each tensor that the delta changes."""
        self._dtypes = [getattr(torch, spec.dtype) for spec in self._specs]
        self._sums = [ops.Digest.ZERO] * len(self._specs)
        """What the digest of each tensor changes by."""
        self._num_bad = [0] * len(self._specs)
        """Elements of each tensor that become NaN or Inf."""
        self._come: set[int] = set()
        """The tensors that changes have come for."""
        self._on_device: DeviceWriter | None = None

    def begin(self) -> None:
        """Bring the shadow weights up to what is served.

        Raises:
            DeltaUnsupported: a tensor of the delta is not served as a copy.

        """
        self._places = [self._find(spec) for spec in self._specs]
        bring_up(self._shadow, self._live, self._new, self._between)
        if self._shadow.device.type == "cuda":
            self._on_device = DeviceWriter(
                self._shadow.device, self._live, self._new, len(self._specs)
            )

    def take(self, pairs: Iterable[Pair]) -> None:
        """Apply the parts of one chunk.

        Raises:
            Malformed: a part is invalid, or the parts are not in order.

        """
        for name, tensor in pairs:
            for part in self._parts.add(name, tensor):
                part = Part(part.table, part.data.to(self._shadow.device))
                self._order.check(part)
                self._write(list(decode(part)))
                self._received(part.num_bytes, len(self._come))
            del tensor  # a transport reuses memory that no tensor refers to

    def problems(self) -> list[Problem]:
        """What is wrong with the tensors as they are now.

        Raises:
            Malformed: a part has not arrived.

        """
        self._parts.require_all()
        if self._on_device is not None:
            for number, (a, b, bad, _) in enumerate(self._on_device.results()):
                self._sums[number] = ops.Digest(a % 2**64, b % 2**64)
                self._num_bad[number] = bad
        found: list[Problem] = []
        for number, spec in enumerate(self._specs):
            digest = self._digest(number)
            bad = 0 if self._allow_nonfinite else self._num_bad[number]
            if number not in self._come:
                why = "the manifest announces a change of it, and none came"
                found.append((spec.name, Cause.MISSING, why))
            elif digest.hex() != spec.digest:
                why = (
                    f"with these changes its digest is {digest.hex()}, announced was "
                    f"{spec.digest}: the changes were made for other weights than are "
                    "served, or some of them were lost"
                )
                found.append((spec.name, Cause.DIGEST, why))
            elif bad:
                why = f"{bad} of its changed elements become NaN or Inf"
                found.append((spec.name, Cause.NOT_FINITE, why))
        return found

    def _digest(self, number: int) -> ops.Digest:
        """The digest of a tensor with its changes."""
        facts = self._served.facts[self._specs[number].name]
        return ops.Digest(*facts[2]) + self._sums[number]

    def content(self) -> Content:
        """The content of the changed tensors."""
        facts: dict[str, Facts] = {}
        for number, spec in enumerate(self._specs):
            digest = self._digest(number)
            facts[spec.name] = spec.dtype, spec.shape, (digest.a, digest.b)
        return Content(facts, self._samples())

    def _find(self, spec: TensorSpec) -> Destinations:
        facts = self._served.facts.get(spec.name)
        entry = self._shadow.plan.known(spec.name)
        found = Destinations.of(entry)
        if facts is None or found is None or not found.has_all:
            raise DeltaUnsupported(
                f"{spec.name!r} is not served here as a copy of the checkpoint's "
                "tensor, so a delta cannot change it element by element",
                tensors=[spec.name],
            )
        assert entry is not None
        form = tuple(entry.shape), str(entry.dtype).removeprefix("torch.")
        if form != (spec.shape, spec.dtype) or facts[:2] != (spec.dtype, spec.shape):
            raise Malformed(
                f"the delta announces {spec.name!r} as {list(spec.shape)} "
                f"{spec.dtype}, and {list(form[0])} {form[1]} of it is served"
            )
        return found

    def _write(self, changes: Sequence[Changes]) -> None:
        """Write the changes of one part."""
        self._come.update(each.number for each in changes)
        if self._on_device is not None:
            log = self._on_device.write(changes, self._places, self._dtypes)
            self._shadow.note_changed(log)
            return
        for each in changes:
            self._write_on_host(each)

    def _write_on_host(self, changes: Changes) -> None:
        number, bits = changes.number, changes.bits
        dtype = self._dtypes[number]
        for found in self._places[number].find(changes.places):
            if found.chosen is None:
                at, change = changes.places, bits
            else:
                at, change = changes.places[found.chosen], bits[found.chosen]
            old = elements(self._live[found.param], bits.dtype)[found.offsets]
            new = old + change if changes.are_differences else change
            # Noted before it is written, so that an aborted update is brought up too.
            stretch = Stretch(found.param, 0, len(new), dtype.itemsize)
            offsets = found.offsets.to(torch.int32)
            self._shadow.note_changed(ChangedElements(offsets, (stretch,)))
            elements(self._new[found.param], bits.dtype)[found.offsets] = new
            self._sums[number] += ops.digest_of_changes(at, old, new, dtype.itemsize)
            if not self._allow_nonfinite:
                (bad,) = ops.count_nonfinite([new.view(dtype)])
                self._num_bad[number] += bad

    def _samples(self) -> Samples:
        """Samples of the changed tensors, read from the shadow weights."""
        places: dict[str, tuple[int, int]] = {}
        names: dict[tuple[torch.dtype, int], list[str]] = {}
        rows: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        device = self._shadow.device
        for number, spec in enumerate(self._specs):
            dtype = self._dtypes[number]
            at = sample_places(prod(spec.shape), device)
            row = torch.empty(len(at), dtype=dtype, device=device)
            for found in self._places[number].find(at):
                values = elements(self._new[found.param], dtype)[found.offsets]
                if found.chosen is None:
                    row = values
                else:
                    row[found.chosen] = values
            kind = dtype, len(at)
            names.setdefault(kind, []).append(spec.name)
            rows.setdefault(kind, []).append(row)
        for block, alike in enumerate(names.values()):
            places |= {name: (block, row) for row, name in enumerate(alike)}
        return Samples([torch.stack(each) for each in rows.values()], places)


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
        for log in logs:
            num_bytes += log.copy(live, new)
            between(num_bytes)
    shadow.changed.clear()
