"""The checks of arriving tensors, each against the manifest and the model.

Problems are collected and not raised, so that one error names all of them: every tensor
that cannot be accepted, the cause, and the remedy.
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
from dataclasses import replace
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
"""Names of one cause that the message spells out; `tensors` has all of them."""
MAX_HINTS = 4
"""Unknown names for which the message suggests the nearest known names."""


class Problem(NamedTuple):
    """What is wrong with one tensor."""

    cause: Cause
    why: str
    """A clause that follows the tensor's name in the message."""


def rejection(
    unknown: Mapping[str, Form],
    wrong: Mapping[str, Problem],
    unused: Collection[str],
    absent: Collection[str],
    known: Known,
    kept: Collection[str] = (),
    *,
    num_asked: int,
) -> WeightsMismatch:
    """The error that names every problem of an update.

    Args:
        unknown: tensors that the model has no place for, with shape and dtype.
        wrong: tensors and what is wrong with them.
        unused: tensors that filled no parameter.
        absent: tensors that did not arrive.
        known: the tensors that the model has places for, to suggest the nearest.
        kept: tensors that arrived under known names.
        num_asked: how many unknown names the model's loader was asked about, at most.

    """
    named: dict[str, list[str]] = {}
    if unknown:
        named[Cause.UNKNOWN] = list(unknown)
    for name, problem in with_breaks(wrong.items()):
        named.setdefault(problem.cause, []).append(name)
    if unused:
        named[Cause.UNUSED] = list(unused)
    if absent:
        named[Cause.MISSING] = list(absent)
    parts = [*_unknown(unknown, known, kept)] if unknown else []
    if len(unknown) > num_asked:
        parts.append(f"the model's loader was asked about {num_asked} of these names")
    shown = list(wrong.items())[:MAX_TOLD]
    parts += [f"{name}: {problem.why}" for name, problem in shown]
    if len(wrong) > MAX_TOLD:
        parts.append(f"and {len(wrong) - MAX_TOLD} more like these")
    if unused:
        parts.append(f"no parameter is filled by {listed(unused)}")
    if absent:
        parts.append(f"missing: {listed(absent)}")
    tensors = list(dict.fromkeys(chain.from_iterable(named.values())))
    return WeightsMismatch(f"{counted(tensors)}; {'; '.join(parts)}", named=named)


def counted(tensors: Collection[str]) -> str:
    """The first clause of a rejection: how many tensors are concerned."""
    count = len(tensors)
    return f"{count} tensor{'s' * (count != 1)} of the update cannot be accepted"


def listed(names: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    first = ", ".join(list(names)[:MAX_TOLD])
    return first + f" and {len(names) - MAX_TOLD} more" * (len(names) > MAX_TOLD)


def _unknown(
    unknown: Mapping[str, Form], known: Known, kept: Collection[str]
) -> Iterable[str]:
    """Sentences on unknown names: a renaming they have in common, or nearest names."""
    found = renaming(unknown, known.keys() - set(kept) if kept else known)
    made = set(found[1]) if found else set()
    others = [name for name in with_breaks(unknown) if name not in made]
    neighbours, sentences = Neighbours(known), []
    for name in others[:MAX_HINTS]:
        near = neighbours.nearest(name, *unknown[name])
        sentences.append(f"{name} (nearest: {', '.join(near)})" if near else name)
    sentences += others[MAX_HINTS:MAX_TOLD]
    if found is not None:
        change, names = found
        line = change.line(kept)
        yield (
            f"unknown: {listed(names)}; {change} {len(names)} of the {len(unknown)} "
            "unknown names are names of this model" + (f" ({line})" if line else "")
        )
    if sentences:
        more = len(others) - len(sentences)
        yield f"unknown: {', '.join(sentences)}" + f" and {more} more" * (more > 0)


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
"""Characters quoted from a loader's error; some errors list every parameter."""

MOST_ASKED = 8
"""Unknown tensors that a loader is asked about.

Each question makes it go through all of its parameters.
"""

MOST_COMPARED = 64
"""Unknown names that are compared letter by letter with missing names."""

MOST_PAIRED = 10_000
"""Most unknown or missing names that are paired.

With more of them, freeing the memory of the search would take tens of milliseconds at
once.
"""

REPEATED = ("weight_shape",)
"""Tensors that a checkpoint has for each part of a fused layer; one is enough."""

NUMBERS = {
    str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not (dtype.is_complex or str(dtype).startswith(("torch.q", "torch.bits")))
}
"""Dtypes whose content can be checked."""

Ask = Callable[[Sequence[TensorSpec]], Iterable[tuple[set[str], Exception | None]]]
"""For each tensor: the parameters that a loader would fill, and its exception."""

IS_TIED = Problem(
    Cause.TIED,
    "this engine uses its embedding as the head too, and the head that came differs "
    "from the embedding",
)
"""The problem of a head that differs from the embedding it is tied to."""


def untied(facts: Mapping[str, Facts], ignored: IgnoredTensors) -> list[str]:
    """The tied heads among these tensors that differ from the embedding.

    The embedding may have any name, so a head has to equal some tensor of its form.
    """
    heads = {name: facts[name] for name in filter(ignored.is_tied, facts)}
    if not heads:
        return []
    others = {of for name, of in facts.items() if name not in heads}
    return [name for name, of in heads.items() if of not in others]


NO_SUCH = (KeyError, AttributeError, ValueError)
"""The exceptions that loaders raise for an unknown name."""


class TensorChecks:
    """The checks of one update on one rank, under the model's names.

    Args:
        manifest: the announced tensors.
        known: the checkpoint names of the model's parameters.
        ignored: the tensors that may come and are not used.
        start_checkpoint: the tensors of the checkpoint that the engine started from.
        asks_loader: whether only the model's loader can tell if it takes a name.
        allow_nonfinite: whether NaN and Inf are accepted.

    """

    def __init__(
        self,
        manifest: Manifest,
        known: Known,
        ignored: IgnoredTensors,
        start_checkpoint: StartCheckpoint,
        *,
        asks_loader: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._manifest = manifest
        self._known = known
        self._ignored = ignored
        self._start_checkpoint = start_checkpoint
        self._asks_loader = asks_loader
        self._allow_nonfinite = allow_nonfinite
        self._is_declared = matcher(manifest.subset)
        self._entries: dict[str, Form] = {}
        """Shape and dtype of every tensor that came."""
        self._digests: dict[str, ops.Digest] = {}
        """Digests of the accepted tensors."""
        self._wrong: dict[str, Problem] = {}
        """The first problem of each tensor or parameter."""
        self._unused: dict[str, None] = {}
        self.is_rejected = False
        """Whether the model's loader has rejected a tensor."""
        self._unknown: dict[str, Form] = {}

    @property
    def num_seen(self) -> int:
        """How many tensors were accepted."""
        return len(self._digests)

    @property
    def objects(self) -> bool:
        """Whether a tensor is wrong, or was announced and has not come."""
        return self.has_rejected or bool(self._announced())

    @property
    def has_rejected(self) -> bool:
        """Whether a tensor that came is wrong."""
        return bool(self._wrong or self._unknown or self._unused)

    def expect(self, specs: Mapping[str, TensorSpec]) -> None:
        """Accept these tensors too, as if they had been announced."""
        tensors = {**self._manifest.tensors, **specs}
        self._manifest = replace(self._manifest, tensors=tensors)

    def may_come(self, name: str) -> bool:
        """Whether the update may contain this tensor; a subset declares its tensors."""
        return not self._manifest.subset or self._is_declared(name)

    def is_spare(self, name: str) -> bool:
        """Whether the tensor may come although this engine does not use it."""
        if self._manifest.subset:
            return name in self._ignored
        return self._ignored.is_spare(name)

    def is_unknown_name(self, name: str) -> bool:
        """Whether the model lacks this name, although its names are known."""
        return name not in self._known and not self._asks_loader

    def is_not_asked_about(self, name: str) -> bool:
        """Whether the loader is not asked: it has rejected too many such names."""
        return len(self._unknown) >= MOST_ASKED and self.only_loader_knows(name)

    def only_loader_knows(self, name: str) -> bool:
        """Whether only the model's loader can tell if it takes the name."""
        return name not in self._known and name not in self._start_checkpoint

    def is_renamed(self, name: str, params: Container[str]) -> bool:
        """Whether the parameters that this tensor fills have another checkpoint name.

        A loader that maps names takes a fused parameter by the engine's name (one of
        `params`)
        and its parts by their own names. Two names of the start checkpoint may fill one
        parameter, as they did at the start.
        """
        if self._start_checkpoint:
            return name not in self._start_checkpoint
        return self.is_unknown_name(name) or (
            name not in self._known and name in params
        )

    def accepts(self, name: str, tensor: torch.Tensor) -> bool:
        """Check a tensor except its content; returns whether it may be loaded."""
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
        # The content of these dtypes cannot be checked, under any name.
        is_none = tensor.is_complex() or tensor.is_quantized
        problem = self._objection(name, shape, dtype, is_number=not is_none)
        if problem is not None:
            self.note_wrong(name, *problem)
            return False
        self._digests[name] = ops.Digest.ZERO
        return True

    def _objection(
        self, name: str, shape: Shape, dtype: str, *, is_number: bool = True
    ) -> Problem | None:
        """The problem of such a tensor, whatever its content; None if there is none."""
        if not self.may_come(name):
            return Problem(Cause.SUBSET, "no pattern of the subset declares it")
        if not is_number:
            is_dtype = isinstance(getattr(torch, dtype, None), torch.dtype)
            why = "which no model has" if is_dtype else "no dtype as 'bfloat16' is one"
            return Problem(Cause.DTYPE, f"it is {dtype}, {why}")
        misfit = self._misfit(name, shape, dtype)
        # Asked only for a misfit: mapping a name takes microseconds.
        return None if misfit is None or self.is_spare(name) else misfit

    def judge(
        self,
        name: str,
        digest: ops.Digest,
        num_nonfinite: int,
        served_as: str | None = None,
    ) -> bool:
        """Whether the content of a tensor is the announced one, and can be served.

        A tensor that is read where its trainer has it is judged twice, and has to be
        the same.

        Args:
            name: of the tensor.
            digest: of the content that came.
            num_nonfinite: elements that are NaN or Inf in the dtype they are served in.
            served_as: that dtype, if it is another than the tensor's.

        """
        first = self._digests.get(name, ops.Digest.ZERO)
        self._digests[name] = digest
        spec = self._manifest.tensors.get(name)
        if spec is not None and spec.digest not in (None, digest.hex()):
            why = f"its digest is {digest.hex()}, announced was {spec.digest}"
            self.note_wrong(name, Cause.DIGEST, why)
            return False
        if first not in (ops.Digest.ZERO, digest):
            why = "its trainer has changed it while it was read"
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
        """Note that the model has no place for a tensor."""
        if self.only_loader_knows(name):
            self._unknown[name] = self._entries[name]
        else:  # the start checkpoint has it, so the name is not the problem
            self.note_unused(name)

    def note_wrong(self, name: str, cause: Cause, why: str) -> None:
        """Note that a tensor or a parameter cannot be served.

        Only the first problem is kept; later ones follow from it.
        """
        if name not in self._unknown:
            self._wrong.setdefault(name, Problem(cause, why))

    def note_unused(self, name: str) -> None:
        """Note that the loader took a tensor, and no parameter was filled by it."""
        self._unused[name] = None

    def note_cut(self, name: str, num_unread: int) -> None:
        """Note that the loader used a part of a tensor, and no rank has the rest."""
        shape, _ = self._entries[name]
        why = (
            f"its shape is {list(shape)}, and the model has no place for {num_unread} "
            f"of its {prod(shape)} elements"
        )
        self.note_wrong(name, Cause.SHAPE, why)

    def note_rejected(self, name: str, error: Exception) -> None:
        """Note that the model's loader has rejected a tensor."""
        self.is_rejected |= not self.is_unknown_name(name)
        if self.only_loader_knows(name) and isinstance(error, NO_SUCH):
            self.note_unknown(name)
            return
        shape, dtype = self._entries[name]
        said = (str(error) or type(error).__name__)[:MAX_SAID]
        why = (
            f"the model's loader does not take it with shape {list(shape)} and dtype "
            f"{dtype}: {said}"
        )
        self.note_wrong(name, Cause.REFUSED, why)

    def compare_heads(self, base: Mapping[str, Facts] | None = None) -> None:
        """Note a tied head that differs from the embedding, which is its weight.

        Args:
            base: the tensors that a delta is applied to, which stay as they are unless
                they came.

        """
        if not self._ignored.has_tied_head:
            return
        facts = {**(base or {}), **self.facts()}
        for name in untied(facts, self._ignored):
            form = facts[name][:2]
            others = [n for n in facts if n != name and facts[n][:2] == form]
            if self._wrong.keys().isdisjoint(others):
                self.note_wrong(name, *IS_TIED)
            # Else the problem is the embedding, not the head.

    def require_subset(self) -> None:
        """Raise `WeightsMismatch` if nothing of a subset came, or a pattern matches
        nothing.

        Checked at the end: a loader may rename tensors, and take names that the model
        lacks.
        """
        if not (subset := self._manifest.subset):
            return
        require_matches(subset, self._names(self._entries))
        if all(name in self._ignored for name in self._digests):
            raise WeightsMismatch(
                f"nothing was sent of the subset {', '.join(subset[:8])}",
                named={Cause.SUBSET: subset},
            )

    def rejection(
        self,
        missing: Iterable[str],
        places: ParameterMap,
        filled_by: Callable[[str], Collection[str]],
        *,
        is_end: bool,
    ) -> WeightsMismatch:
        """The error that names every problem, each once.

        A parameter is not called missing if the tensor that should fill it came and was
        rejected.

        Args:
            missing: parameters that are not full.
            places: the tensors that fill each parameter.
            filled_by: the parameters that a tensor would have filled.
            is_end: whether every announced tensor should have come by now.

        """
        absent: dict[str, None] = {}
        missing = list(missing)
        explained: set[str] = set()
        if missing:
            fills = [filled_by(name) for name in self._wrong]
            explained = {param for params in fills for param in params}
            if self._start_checkpoint and not all(fills):
                # It is not known what these tensors fill, nor what fills some
                # parameters.
                explained |= {
                    param
                    for param in missing
                    if not any(
                        n in self._start_checkpoint for n in places.names_of(param)
                    )
                }
        came = self._digests.keys() | self._wrong.keys()
        for param in missing:
            names = places.names_of(param)
            gone = [n for n in names if n not in came]
            if not gone and param not in explained:
                gone = list(names)  # all came, and did not fill it
            is_whole = len(gone) == len(names)
            if is_whole and param in explained:
                continue  # a tensor of another name explains it
            absent |= dict.fromkeys(gone)
        if is_end:
            absent |= dict.fromkeys(self._announced())
        return self._rejection(
            self._unknown, self._wrong, self._unused, absent, self._entries
        )

    def problems_announced(
        self,
        announced: Mapping[str, TensorSpec],
        places: ParameterMap,
        ask: Ask,
        *,
        are_all: bool,
    ) -> WeightsMismatch | None:
        """The certain problems of announced tensors, as an error; None if there are
        none.

        This object keeps nothing of the announcement.

        Args:
            announced: the tensors, under the model's names.
            places: the tensors that fill each parameter.
            ask: for some tensors, the parameters that the model's loader would
                fill, and its
                exception.
            are_all: whether no other tensors will come.

        """
        wrong: dict[str, Problem] = {}
        unknown: dict[str, Form] = {}
        doubtful: list[str] = []
        for name in with_breaks(announced):
            spec = announced[name]
            is_number = spec.dtype in NUMBERS
            problem = self._objection(name, spec.shape, spec.dtype, is_number=is_number)
            if problem is not None:
                wrong[name] = problem
            elif self.only_loader_knows(name) and not self.is_spare(name):
                doubtful.append(name)
        taken: set[str] = set()
        """The parameters filled by tensors that only the loader knows."""
        are_known = True
        questions = [announced[name] for name in doubtful[:MOST_ASKED]]
        for spec, (filled, error) in zip(questions, ask(questions), strict=True):
            taken |= filled
            if isinstance(error, NO_SUCH) and not filled:
                unknown[spec.name] = (spec.shape, spec.dtype)
            elif not filled:
                are_known = False  # the loader may wait for another tensor
        if len(unknown) == MOST_ASKED:  # the loader knows none of these names
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
        return self._rejection(unknown, wrong, {}, absent, announced)

    def _lacking(
        self, announced: Collection[str], places: ParameterMap, taken: Collection[str]
    ) -> Iterator[str]:
        """The tensors without which parameters that are due stay unfilled.

        Only tensors of the start checkpoint, or of a model whose own names are the only
        ones. In other cases it is not known which tensor fills which parameter.
        """
        is_drafted = any(name.startswith(DRAFT) for name in with_breaks(announced))
        for param in with_breaks(places.params):
            is_due = is_drafted if param.startswith(DRAFT) else not self._manifest.draft
            if not is_due or param in taken or param.endswith(REPEATED):
                continue
            for name in places.names_of(param):
                is_sure = (
                    name in self._start_checkpoint
                    if self._start_checkpoint
                    else name in self._known
                )
                if is_sure and name not in announced:
                    yield name

    def _rejection(
        self,
        unknown: Mapping[str, Form],
        wrong: Mapping[str, Problem],
        unused: Collection[str],
        absent: dict[str, None],
        came: Collection[str],
    ) -> WeightsMismatch:
        """One error, which calls no tensor missing that came under another name."""
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
        known = self._start_checkpoint.known or self._known
        # A tensor that a loader skips may have a name that it does not know.
        strays = {
            name: self._entries[name] for name in filter(self.only_loader_knows, unused)
        }
        meant = _meant({**unknown, **strays}, known, absent)
        for name in meant.values():
            absent.pop(name, None)
        unknown = dict(unknown) | {n: strays[n] for n in strays if n in meant}
        unused = [name for name in unused if name not in meant]
        return rejection(
            unknown, wrong, unused, absent, known, kept, num_asked=MOST_ASKED
        )

    def _names(self, came: Iterable[str]) -> set[str]:
        """All names that a pattern may match: the model's, and those that came."""
        return {*self._known, *self._start_checkpoint.known, *came}

    def hollow(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors without content, with the shapes and dtypes of those that came."""
        for name in names:
            shape, dtype = self._entries[name]
            yield name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def facts(self) -> dict[str, Facts]:
        """The accepted tensors, with the digests of their content."""
        return {
            name: (dtype, shape, (digest.a, digest.b))
            for name, (shape, dtype) in self._entries.items()
            if (digest := self._digests.get(name)) is not None
        }

    def _misfit(self, name: str, shape: Shape, dtype: str) -> Problem | None:
        """The problem of the shape or dtype of a tensor; None if there is none."""
        known = self._known.get(name) or self._start_checkpoint.known.get(name)
        expected = (known and known[1]) or dtype
        if dtype != expected and not {dtype, expected} <= PLAIN:
            why = f"it is {dtype}, the model's is {expected}"
            return Problem(Cause.DTYPE, why)
        whole = self._start_checkpoint.shape(name)
        if whole is None or shape == whole or _is_alike(shape, whole):
            return None
        why = (
            f"its shape is {list(shape)}; in the checkpoint that the engine was "
            f"started from it is {list(whole)}"
        )
        return Problem(Cause.SHAPE, why)

    def _announced(self) -> list[str]:
        """Announced tensors that have not come, and have no other problem."""
        missing = self._manifest.tensors.keys() - self._digests.keys()
        return sorted(missing - self._wrong.keys())


def _is_alike(shape: Shape, whole: Shape) -> bool:
    """Whether two shapes differ only in ones at the end: a scale is [] or [1, 1]."""
    longest = zip_longest(shape, whole, fillvalue=1)
    return all(came == expected for came, expected in longest)


def _meant(
    unknown: Mapping[str, Form], known: Known, absent: Collection[str]
) -> dict[str, str]:
    """Unknown name → the missing name that was meant by it."""
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
    # Names with different endings are compared by their letters.
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
