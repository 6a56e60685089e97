"""The inspection of what arrives: each tensor against the manifest and the model.

What is wrong is kept and not raised, so that one refusal names all of it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain, zip_longest
from math import prod
from typing import NamedTuple

import torch

from vllm.inflight import ops
from vllm.inflight.errors import Cause, WeightsMismatch
from vllm.inflight.tensor_names import (
    PLAIN,
    Known,
    Neighbours,
    matcher,
    paired,
    renaming,
)
from vllm.inflight.update import DRAFT, Manifest, TensorSpec
from vllm.inflight.worker.verify.content import Facts
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.parameter_map import ParameterMap
from vllm.inflight.worker.verify.start_checkpoint import Shape, StartCheckpoint
from vllm.inflight.yielding import with_breaks

Form = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""

MAX_TOLD = 8
"""Names of one cause that are spelled out in the message; `tensors` has them all."""
MAX_HINTS = 4
"""Unknown names that the nearest of the model are told of."""


class Problem(NamedTuple):
    """What is wrong with one tensor."""

    cause: Cause
    why: str
    """A clause that follows the tensor's name."""


def refusal(
    unknown: Mapping[str, Form],
    wrong: Mapping[str, Problem],
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


MAX_SAID = 500
"""Characters that are quoted of a loader's error: some list every parameter."""

MOST_ASKED = 8
"""Unknown tensors after which a loader is not asked any more: each time it goes through
all that there is."""

MOST_COMPARED = 64
"""Unknown names that are compared letter by letter with those that are missing."""

MOST_PAIRED = 10_000
"""Unknown names, or missing ones, for which a pair is looked for. Of more, what the
search has made would take tens of milliseconds to be thrown away at once."""

REPEATED = ("weight_shape",)
"""What a checkpoint has of each part of a fused layer, and one is enough."""

NUMBERS = {
    str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not (dtype.is_complex or str(dtype).startswith(("torch.q", "torch.bits")))
}
"""Dtypes whose content can be looked at."""

Ask = Callable[[Sequence[TensorSpec]], Iterable[tuple[set[str], Exception | None]]]
"""Of each tensor: the parameters that a loader would fill, and what it raises."""

IS_TIED = Problem(
    Cause.TIED,
    "this engine uses its embedding as the head too, and the head that came differs "
    "from the embedding",
)
"""What is wrong with a head that is not the embedding it is tied to."""

NO_SUCH = (KeyError, AttributeError, ValueError)
"""What loaders raise that do not know a name."""


class TensorChecks:
    """The tensors of one update on one rank, under the model's names.

    Args:
        manifest: what was announced.
        known: the names that the model's parameters have in a checkpoint.
        spares: what may come and is of no use.
        origin: the tensors of the checkpoint that the engine started from.
        asks_loader: whether the model's loader alone can tell what a name is.
        allow_nonfinite: whether NaN and Inf are served.

    """

    def __init__(
        self,
        manifest: Manifest,
        known: Known,
        spares: IgnoredTensors,
        origin: StartCheckpoint,
        *,
        asks_loader: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._manifest = manifest
        self._known = known
        self._spares = spares
        self._origin = origin
        self._asks_loader = asks_loader
        self._allow_nonfinite = allow_nonfinite
        self._is_declared = matcher(manifest.subset)
        self._entries: dict[str, Form] = {}
        """Shape and dtype of all that came."""
        self._digests: dict[str, ops.Digest] = {}
        """Of what was admitted."""
        self._wrong: dict[str, Problem] = {}
        """The first that was found of each tensor, or parameter."""
        self._unused: dict[str, None] = {}
        self.is_refused = False
        """Whether the model's loader has refused a tensor that it was handed."""
        self._unknown: dict[str, Form] = {}

    @property
    def num_seen(self) -> int:
        """How many tensors were admitted."""
        return len(self._digests)

    @property
    def objects(self) -> bool:
        """Whether anything is wrong, or announced and not there."""
        return self.has_refused or bool(self._announced())

    @property
    def has_refused(self) -> bool:
        """Whether anything that came is wrong."""
        return bool(self._wrong or self._unknown or self._unused)

    def may_come(self, name: str) -> bool:
        """Whether the update may have such a tensor: a subset declares its own."""
        return not self._manifest.subset or self._is_declared(name)

    def is_spare(self, name: str) -> bool:
        """Whether it may come, and this engine has no use for it."""
        is_part = bool(self._manifest.subset)
        return name in self._spares or (not is_part and self._spares.has_left_out(name))

    def is_strange(self, name: str) -> bool:
        """Whether the model has no such name, though most of its others are known."""
        return name not in self._known and not self._asks_loader

    def is_hopeless(self, name: str) -> bool:
        """Whether a loader is not asked for such a name: it knew none like it."""
        return len(self._unknown) >= MOST_ASKED and self.is_doubtful(name)

    def is_doubtful(self, name: str) -> bool:
        """Whether only the model's loader can tell if there is such a name."""
        return name not in self._known and name not in self._origin

    def is_renamed(self, name: str, params: Container[str]) -> bool:
        """Whether what such a tensor fills has another name in a checkpoint.

        A loader that maps names takes a fused parameter by the engine's name of it, one
        of `params`, and its parts by theirs. Two names that the engine's own checkpoint
        has may fill one parameter, as they did at the start.
        """
        if self._origin:
            return name not in self._origin
        return self.is_strange(name) or (name not in self._known and name in params)

    def admits(self, name: str, tensor: torch.Tensor) -> bool:
        """Check all but the content of a tensor; whether it may go on to the loader."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if name in self._digests:
            self.note_wrong(name, Cause.DUPLICATE, "it was sent twice")
            return False
        self._entries[name] = (shape, dtype)
        spec = self._manifest.tensors.get(name)
        if self._manifest.tensors and spec is None and self.may_come(name):
            self.note_wrong(name, Cause.UNANNOUNCED, "the manifest does not name it")
            return False
        if spec is not None and (spec.shape, spec.dtype) != (shape, dtype):
            why = (
                f"announced as {list(spec.shape)} {spec.dtype}, "
                f"arrived as {list(shape)} {dtype}"
            )
            self.note_wrong(name, Cause.UNANNOUNCED, why)
            return False
        # Not even the content of some can be looked at (digests.py), whatever they are
        # called.
        is_none = tensor.is_complex() or tensor.is_quantized
        complaint = self._objection(name, shape, dtype, is_number=not is_none)
        if complaint is not None:
            self.note_wrong(name, *complaint)
            return False
        self._digests[name] = ops.Digest.ZERO
        return True

    def _objection(
        self, name: str, shape: Shape, dtype: str, *, is_number: bool = True
    ) -> Problem | None:
        """What is wrong with such a tensor whatever it holds; None if nothing is."""
        if not self.may_come(name):
            return Problem(Cause.SUBSET, "no pattern of the subset declares it")
        if not is_number:
            return Problem(Cause.DTYPE, f"it is {dtype}, which no model has")
        misfit = self._misfit(name, shape, dtype)
        # Asked of what does not fit alone: to map a name takes microseconds.
        return None if misfit is None or self.is_spare(name) else misfit

    def judge(
        self,
        name: str,
        digest: ops.Digest,
        num_nonfinite: int,
        served_as: str | None = None,
    ) -> bool:
        """Whether the content of a tensor is what was announced, and can be served.

        Args:
            name: of the tensor.
            digest: of what came.
            num_nonfinite: elements that are NaN or Inf where they are served.
            served_as: the dtype there, if it is another one.

        """
        self._digests[name] = digest
        spec = self._manifest.tensors.get(name)
        if spec is not None and spec.digest not in (None, digest.hex()):
            why = f"its digest is {digest.hex()}, announced was {spec.digest}"
            self.note_wrong(name, Cause.DIGEST, why)
            return False
        if num_nonfinite and not self._allow_nonfinite:
            shape, _ = self._entries[name]
            are = "is" if num_nonfinite == 1 else "are"
            why = f"{num_nonfinite} of its {prod(shape)} elements {are} NaN or Inf"
            if served_as is not None:
                why += f" in {served_as}, in which they are served"
            self.note_wrong(name, Cause.NOT_FINITE, why)
            return False
        return True

    def note_unknown(self, name: str) -> None:
        """The model has no place for a tensor that came."""
        self._unknown[name] = self._entries[name]

    def note_wrong(self, name: str, cause: Cause, why: str) -> None:
        """A tensor, or a parameter, cannot be served as it came.

        What is found of it later follows from that.
        """
        if name not in self._unknown:
            self._wrong.setdefault(name, Problem(cause, why))

    def note_unused(self, name: str) -> None:
        """A loader has taken a tensor, and nothing of the model is filled by it."""
        self._unused[name] = None

    def note_cut(self, name: str, num_unread: int) -> None:
        """A loader has used a part of a tensor, and no other rank has the rest."""
        shape, _ = self._entries[name]
        why = (
            f"its shape is {list(shape)}, and the model has no place for {num_unread} "
            f"of its {prod(shape)} elements"
        )
        self.note_wrong(name, Cause.SHAPE, why)

    def note_refused(self, name: str, error: Exception) -> None:
        """The model's loader has refused a tensor."""
        self.is_refused |= not self.is_strange(name)
        if name not in self._known and isinstance(error, NO_SUCH):
            self.note_unknown(name)
            return
        shape, dtype = self._entries[name]
        said = (str(error) or type(error).__name__)[:MAX_SAID]
        why = (
            f"the model's loader does not take it with shape {list(shape)} and dtype "
            f"{dtype}: {said}"
        )
        self.note_wrong(name, Cause.REFUSED, why)

    def compare_heads(self) -> None:
        """A tied head has no place of its own: what comes of it is the embedding."""
        if not self._spares.has_tied_head:
            return
        facts = self.facts()
        for name in filter(self._spares.is_tied, facts):
            form = facts[name][:2]
            others = [n for n in facts if n != name and facts[n][:2] == form]
            if any(facts[n] == facts[name] for n in others):
                continue
            if not self._wrong.keys().isdisjoint(others):
                continue  # the embedding is wrong, and not that the head is another
            self.note_wrong(name, *IS_TIED)

    def require_subset(self) -> None:
        """Raise `WeightsMismatch` if nothing came of a subset, or it names what is not.

        Known by now, and not before: a loader may rename, and takes names that the
        model does not have.
        """
        if not (subset := self._manifest.subset):
            return
        require_matches(subset, self._names(self._entries))
        if all(name in self._spares for name in self._digests):
            raise WeightsMismatch(
                f"nothing was sent of the subset {', '.join(subset[:8])}",
                named={Cause.SUBSET: subset},
            )

    def refusal(
        self,
        missing: Iterable[str],
        places: ParameterMap,
        filled_by: Callable[[str], Collection[str]],
        *,
        is_end: bool,
    ) -> WeightsMismatch:
        """The error that names all that is wrong, each thing once.

        A parameter is not called missing where what should have filled it came and
        cannot be accepted.

        Args:
            missing: parameters that are not full.
            places: what fills them.
            filled_by: the parameters that a tensor would have filled.
            is_end: whether what was announced should have come by now.

        """
        absent: dict[str, None] = {}
        missing = list(missing)
        explained: set[str] = set()
        if missing:
            fills = [filled_by(name) for name in self._wrong]
            explained = {param for params in fills for param in params}
            if self._origin and not all(fills):
                # Nobody knows what they fill; nor what fills some parameters.
                explained |= {
                    param
                    for param in missing
                    if not any(n in self._origin for n in places.names_of(param))
                }
        came = self._digests.keys() | self._wrong.keys()
        for param in missing:
            names = places.names_of(param)
            gone = [n for n in names if n not in came]
            if not gone and param not in explained:
                gone = list(names)  # they came, and did not fill it
            is_whole = len(gone) == len(names)
            if is_whole and param in explained:
                continue  # by a tensor of another name, which is told
            absent |= dict.fromkeys(gone)
        if is_end:
            absent |= dict.fromkeys(self._announced())
        return self._refusal(
            self._unknown, self._wrong, self._unused, absent, self._entries
        )

    def foreseen(
        self,
        announced: Mapping[str, TensorSpec],
        places: ParameterMap,
        ask: Ask,
        *,
        are_all: bool,
    ) -> WeightsMismatch | None:
        """What is certainly wrong with tensors that are announced; None if nothing is.

        Nothing of an announcement is kept here.

        Args:
            announced: the tensors, under the model's names.
            places: what fills its parameters.
            ask: the parameters that the model's loader would fill with each of some
                tensors, and what it raises.
            are_all: whether no other tensors will come.

        """
        wrong: dict[str, Problem] = {}
        unknown: dict[str, Form] = {}
        doubtful: list[str] = []
        for name in with_breaks(announced):
            spec = announced[name]
            is_number = spec.dtype in NUMBERS
            complaint = self._objection(
                name, spec.shape, spec.dtype, is_number=is_number
            )
            if complaint is not None:
                wrong[name] = complaint
            elif self.is_doubtful(name) and not self.is_spare(name):
                doubtful.append(name)
        taken: set[str] = set()
        """What those fill that only the loader knows."""
        are_known = True
        questions = [announced[name] for name in doubtful[:MOST_ASKED]]
        for spec, (filled, error) in zip(questions, ask(questions), strict=True):
            taken |= filled
            if isinstance(error, NO_SUCH) and not filled:
                unknown[spec.name] = (spec.shape, spec.dtype)
            elif not filled:
                are_known = False  # it may wait for another one
        if len(unknown) == MOST_ASKED:  # it knows none of their kind
            for name in with_breaks(doubtful[MOST_ASKED:]):
                unknown[name] = (announced[name].shape, announced[name].dtype)
        elif len(doubtful) > MOST_ASKED:
            are_known = False
        absent: dict[str, None] = {}
        if are_all and are_known and not self._manifest.subset:
            absent = dict.fromkeys(self._lacking(announced, places, taken))
        if are_all and announced and self._manifest.subset:
            why = "no tensor matches this pattern of the subset"
            for pattern in idle_patterns(self._manifest.subset, self._names(announced)):
                wrong[pattern] = Problem(Cause.SUBSET, why)
        if not (wrong or unknown or absent):
            return None
        return self._refusal(unknown, wrong, {}, absent, announced)

    def _lacking(
        self, announced: Collection[str], places: ParameterMap, taken: Collection[str]
    ) -> Iterator[str]:
        """The tensors without which parameters that are due stay unfilled.

        Only those that the engine's own checkpoint had, or whose model has no names but
        its own: else nobody knows what fills what.
        """
        is_drafted = any(name.startswith(DRAFT) for name in with_breaks(announced))
        for param in with_breaks(places.params):
            is_due = is_drafted if param.startswith(DRAFT) else not self._manifest.draft
            if not is_due or param in taken or param.endswith(REPEATED):
                continue
            for name in places.names_of(param):
                is_sure = name in self._origin if self._origin else name in self._known
                if is_sure and name not in announced:
                    yield name

    def _refusal(
        self,
        unknown: Mapping[str, Form],
        wrong: Mapping[str, Problem],
        unused: Collection[str],
        absent: dict[str, None],
        came: Collection[str],
    ) -> WeightsMismatch:
        """One refusal, in which nothing is missing that has come under another name."""
        if came and (subset := self._manifest.subset):
            causes = (wrong[name].cause for name in came if name in wrong)
            num_undeclared = sum(cause is Cause.SUBSET for cause in causes)
            idle = idle_patterns(subset, self._names(()))
            if idle and num_undeclared == len(came):
                return WeightsMismatch(
                    f"no tensor matches {listed(idle)} of the subset, neither of the "
                    f"model nor of the {len(came)} that were sent",
                    named={Cause.SUBSET: idle},
                )
        kept = [name for name in with_breaks(came) if name not in unknown]
        known = self._origin.known or self._known
        # What a loader passes over may be a name that it does not know.
        strays = {
            name: self._entries[name] for name in filter(self.is_doubtful, unused)
        }
        meant = _meant({**unknown, **strays}, known, absent)
        for name in meant.values():
            absent.pop(name, None)
        unknown = dict(unknown) | {n: strays[n] for n in strays if n in meant}
        unused = [name for name in unused if name not in meant]
        return refusal(
            unknown, wrong, unused, absent, known, kept, num_asked=MOST_ASKED
        )

    def _names(self, came: Iterable[str]) -> set[str]:
        """All names that a pattern may match: of the model, and of what comes."""
        return {*self._known, *self._origin.known, *came}

    def hollow(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of those that came, tensors of their shapes and dtypes with no content."""
        for name in names:
            shape, dtype = self._entries[name]
            yield name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def facts(self) -> dict[str, Facts]:
        """What was admitted, with its content."""
        return {
            name: (dtype, shape, (digest.a, digest.b))
            for name, (shape, dtype) in self._entries.items()
            if (digest := self._digests.get(name)) is not None
        }

    def _misfit(self, name: str, shape: Shape, dtype: str) -> Problem | None:
        """Why the model has no use for such a tensor; None if it may have."""
        known = self._known.get(name) or self._origin.known.get(name)
        expected = (known and known[1]) or dtype
        if dtype != expected and not {dtype, expected} <= PLAIN:
            why = f"it is {dtype}, the model's is {expected}"
            return Problem(Cause.DTYPE, why)
        whole = self._origin.shape(name)
        if whole is None or shape == whole or _is_alike(shape, whole):
            return None
        why = (
            f"its shape is {list(shape)}; in the checkpoint that the engine was "
            f"started from it is {list(whole)}"
        )
        return Problem(Cause.SHAPE, why)

    def _announced(self) -> list[str]:
        """What was announced, did not come, and is not wrong by another count."""
        missing = self._manifest.tensors.keys() - self._digests.keys()
        return sorted(missing - self._wrong.keys())


def _is_alike(shape: Shape, whole: Shape) -> bool:
    """Whether they differ in nothing but ones at the end: a scale is [] or [1, 1]."""
    longest = zip_longest(shape, whole, fillvalue=1)
    return all(came == expected for came, expected in longest)


def _meant(
    unknown: Mapping[str, Form], known: Known, absent: Collection[str]
) -> dict[str, str]:
    """The unknown names under which those that are missing have come."""
    if not (absent and unknown):
        return {}
    meant: dict[str, str] = {}
    if (found := renaming(unknown, known)) is not None:
        change, names = found
        renamed = ((name, change(name)) for name in with_breaks(names))
        meant = {name: new for name, new in renamed if new and new in absent}
    taken = set(meant.values())
    left = [name for name in with_breaks(unknown) if name not in meant]
    gone = [name for name in with_breaks(absent) if name not in taken]
    if not (left and gone) or max(len(left), len(gone)) > MOST_PAIRED:
        return meant
    lacking: Known = {name: known.get(name, (None, None)) for name in gone}
    pairing = paired(((name, *unknown[name]) for name in left), lacking)
    meant |= pairing.name_map
    # One with another ending is told by its letters.
    taken.update(pairing.name_map.values())
    neighbours = Neighbours({n: of for n, of in lacking.items() if n not in taken})
    for name in pairing.unmatched[:MOST_COMPARED]:
        shape, dtype = unknown[name]
        for near in neighbours.nearest(name, shape, dtype, most=1):
            whole = lacking[near][0]
            if (whole is None or tuple(whole) == shape) and near not in taken:
                meant[name] = near
                taken.add(near)
    return meant
