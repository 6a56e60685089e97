"""A refusal: every tensor that cannot be accepted, why, and what to do about it."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from vllm.inflight.breaks import with_breaks
from vllm.inflight.errors import Cause, WeightsMismatch
from vllm.inflight.names import Known, Neighbours, renaming

Form = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""

MAX_TOLD = 8
"""Names of one cause that are spelled out in the message; `tensors` has them all."""
MAX_HINTS = 4
"""Unknown names that the nearest of the model are told of."""


class Complaint(NamedTuple):
    """What is wrong with one tensor."""

    cause: Cause
    why: str
    """A clause that follows the tensor's name."""


def refusal(
    unknown: Mapping[str, Form],
    wrong: Mapping[str, Complaint],
    unused: Collection[str],
    absent: Collection[str],
    known: Known,
    kept: Collection[str] = (),
    *,
    num_asked: int,
) -> WeightsMismatch:
    """The error that names all of it.

    Args:
        unknown: tensors that the model has no place for, with shape and dtype.
        wrong: tensors and what is wrong with them.
        unused: tensors that filled no parameter.
        absent: tensors that did not arrive.
        known: what the model has places for, to suggest the nearest.
        kept: those of the tensors that came under names that are known.
        num_asked: unknown names that the model's loader was asked about, at most.

    """
    named: dict[str, list[str]] = {}
    if unknown:
        named[Cause.UNKNOWN] = list(unknown)
    for name, complaint in with_breaks(wrong.items()):
        named.setdefault(complaint.cause, []).append(name)
    if unused:
        named[Cause.UNUSED] = list(unused)
    if absent:
        named[Cause.MISSING] = list(absent)
    parts = [*_unknown(unknown, known, kept)] if unknown else []
    if len(unknown) > num_asked:
        parts.append(f"the model's loader was asked about {num_asked} of these names")
    told = list(wrong.items())[:MAX_TOLD]
    parts += [f"{name}: {complaint.why}" for name, complaint in told]
    if len(wrong) > MAX_TOLD:
        parts.append(f"and {len(wrong) - MAX_TOLD} more like these")
    if unused:
        parts.append(f"no parameter is filled by {listed(unused)}")
    if absent:
        parts.append(f"missing: {listed(absent)}")
    tensors = list(dict.fromkeys(chain.from_iterable(named.values())))
    return WeightsMismatch(f"{counted(tensors)}; {'; '.join(parts)}", named=named)


def counted(tensors: Collection[str]) -> str:
    """How a refusal begins."""
    count = len(tensors)
    return f"{count} tensor{'s' * (count != 1)} of the update cannot be accepted"


def listed(names: Collection[str]) -> str:
    """The first of some names, and how many more there are."""
    first = ", ".join(list(names)[:MAX_TOLD])
    return first + f" and {len(names) - MAX_TOLD} more" * (len(names) > MAX_TOLD)


def _unknown(
    unknown: Mapping[str, Form], known: Known, kept: Collection[str]
) -> Iterable[str]:
    """What is said of unknown names: what they have in common, or the nearest."""
    found = renaming(unknown, known.keys() - set(kept) if kept else known)
    made = set(found[1]) if found else set()
    others = [name for name in with_breaks(unknown) if name not in made]
    neighbours, told = Neighbours(known), []
    for name in others[:MAX_HINTS]:
        near = neighbours.nearest(name, *unknown[name])
        told.append(f"{name} (nearest: {', '.join(near)})" if near else name)
    told += others[MAX_HINTS:MAX_TOLD]
    if found is not None:
        change, names = found
        line = change.line(kept)
        yield (
            f"unknown: {listed(names)}; {change} {len(names)} of the {len(unknown)} "
            "unknown names are names of this model" + (f" ({line})" if line else "")
        )
    if told:
        more = len(others) - len(told)
        yield f"unknown: {', '.join(told)}" + f" and {more} more" * (more > 0)


def idle_patterns(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The patterns that match none of `names`."""
    return [p for p in patterns if p not in names and not fnmatch.filter(names, p)]


def require_matches(patterns: Sequence[str], names: Collection[str]) -> None:
    """Raise `WeightsMismatch` naming the patterns that match none of `names`."""
    if idle := idle_patterns(patterns, names):
        raise WeightsMismatch(
            f"no tensor matches {listed(idle)} of the subset",
            named={Cause.SUBSET: idle},
        )
