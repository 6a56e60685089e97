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

from collections.abc import Callable, Iterable, Mapping
from math import prod

import torch

from vllm.inflight import ops
from vllm.inflight.delta.decode import Changes, decode
from vllm.inflight.delta.parts import ArrivingParts, Pair
from vllm.inflight.errors import Cause, DeltaUnsupported, Malformed
from vllm.inflight.update import TensorSpec
from vllm.inflight.worker.delta.destinations import Destinations
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
        self._found: dict[str, Destinations] = {}
        """The places of each tensor that the delta changes."""
        self._digests: dict[str, ops.Digest] = {}
        self._num_bad: dict[str, int] = {}
        """Elements of a tensor that become NaN or Inf."""

    def begin(self) -> None:
        """Bring the shadow weights up to what is served.

        Raises:
            DeltaUnsupported: a tensor of the delta is not served as a copy.

        """
        for spec in self._specs:
            self._find(spec)
        bring_up(self._shadow, self._live, self._new, self._between)

    def take(self, pairs: Iterable[Pair]) -> None:
        """Apply the parts of one chunk.

        Raises:
            Malformed: a part is invalid, or the parts are not in order.

        """
        for name, tensor in pairs:
            for part in self._parts.add(name, tensor):
                part.check(self._order.sizes, self._order.widths)
                for changes in decode(part):
                    self._order.note(changes)
                    self._apply(changes)
                num_bytes = part.num_bytes
                self._received(num_bytes, len(self._digests))
            del tensor  # a transport reuses memory that no tensor refers to

    def problems(self) -> list[Problem]:
        """What is wrong with the tensors as they are now.

        Raises:
            Malformed: a part has not arrived.

        """
        self._parts.require_all()
        found: list[Problem] = []
        for spec in self._specs:
            digest = self._digests.get(spec.name)
            if digest is None:
                why = "the manifest announces a change of it, and none came"
                found.append((spec.name, Cause.MISSING, why))
            elif digest.hex() != spec.digest:
                why = (
                    f"with these changes its digest is {digest.hex()}, announced was "
                    f"{spec.digest}: the changes were made for other weights than are "
                    "served, or some of them were lost"
                )
                found.append((spec.name, Cause.DIGEST, why))
            elif (bad := self._num_bad.get(spec.name, 0)) and not self._allow_nonfinite:
                why = f"{bad} of its changed elements become NaN or Inf"
                found.append((spec.name, Cause.NOT_FINITE, why))
        return found

    def content(self) -> Content:
        """The content of the changed tensors."""
        facts: dict[str, Facts] = {}
        for spec in self._specs:
            digest = self._digests[spec.name]
            facts[spec.name] = spec.dtype, spec.shape, (digest.a, digest.b)
        return Content(facts, self._samples())

    @property
    def params(self) -> set[str]:
        """The parameters that the delta changes."""
        return {param for each in self._found.values() for param in each.params}

    def _find(self, spec: TensorSpec) -> None:
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
        self._found[spec.name] = found

    def _apply(self, changes: Changes) -> None:
        spec = self._specs[changes.number]
        name = spec.name
        dtype = getattr(torch, spec.dtype)
        digest = self._digests.get(name)
        if digest is None:
            digest = ops.Digest(*self._served.facts[name][2])
        device = self._shadow.device
        places, bits = changes.places.to(device), changes.bits.to(device)
        for found in self._found[name].find(places):
            if found.chosen is None:
                at, change = places, bits
            else:
                at, change = places[found.chosen], bits[found.chosen]
            old = _elements(self._live[found.param], bits.dtype)[found.offsets]
            new = old + change if changes.are_differences else change
            # Noted before it is written, so that an aborted update is brought up too.
            self._shadow.note_changed(found.param, found.offsets)
            _elements(self._new[found.param], bits.dtype)[found.offsets] = new
            digest += ops.digest_of_changes(at, old, new, new.element_size())
            if not self._allow_nonfinite:
                (bad,) = ops.count_nonfinite([new.view(dtype)])
                self._num_bad[name] = self._num_bad.get(name, 0) + bad
        self._digests[name] = digest

    def _samples(self) -> Samples:
        """Samples of the changed tensors, read from the shadow weights."""
        places: dict[str, tuple[int, int]] = {}
        names: dict[tuple[torch.dtype, int], list[str]] = {}
        rows: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        for spec in self._specs:
            dtype, device = getattr(torch, spec.dtype), self._shadow.device
            at = sample_places(prod(spec.shape), device)
            row = torch.empty(len(at), dtype=dtype, device=device)
            for found in self._found[spec.name].find(at):
                values = _elements(self._new[found.param], dtype)[found.offsets]
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
    for name in shadow.stale:
        shadow.changed.pop(name, None)
    with torch.no_grad():
        copy_unsent(shadow, set(), between)
        num_bytes = 0
        for name in list(shadow.changed):
            dtype = ops.INTEGERS[live[name].element_size()]
            source, target = (_elements(p, dtype) for p in (live[name], new[name]))
            for offsets in shadow.changed[name]:
                target[offsets] = source[offsets]
                num_bytes += offsets.numel() * live[name].element_size()
            del shadow.changed[name]
            between(num_bytes)


def _elements(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a parameter, element by element, with this dtype of its width."""
    flat = param.data.as_strided((_reach(param),), (1,), param.storage_offset())
    return flat.view(dtype)


def _reach(param: torch.Tensor) -> int:
    """Elements from the first to the last of a parameter, with gaps."""
    steps = zip(param.shape, param.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps) if param.numel() else 0
