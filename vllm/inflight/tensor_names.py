"""Name matching: which of the model's tensors an unknown name may mean.

Pure functions over plain data. A checkpoint has `q_proj`, and the engine fuses it into
`qkv_proj`; `checkpoint_names` lists the checkpoint's names of such a parameter. A
trainer may send `module.norm.weight` for the model's `norm.weight`: `nearest` finds
similar names, `renaming` the change that many names share, and `paired` a name for
every tensor.
"""

from __future__ import annotations

import fnmatch
import heapq
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

from vllm.inflight.yielding import with_breaks

Known = Mapping[str, tuple[Sequence[int] | None, str | None]]
"""Name → (shape, dtype); None where one is not known."""

Numbers = tuple[str, ...]
"""The numbers in a name, in order."""

PLAIN = {"bfloat16", "float16", "float32", "float64"}
"""Floating-point dtypes; a tensor of one can be loaded into a parameter of another."""

ALIKE = 0.6
"""Least ratio of difflib at which two names are similar."""
NEXT_BEST = 0.3
"""Most difference of a reported name to the best one, in the sum of two ratios: of the
letters, and of the dotted parts."""
SAMPLE = 16
"""Most kinds of unknown names that are compared to find their common change."""

MOST_KEPT = 4
"""Most names that a `name_map` in a message lists as exceptions."""

_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer in its stack, or of an expert."""
_EMBEDDING = re.compile(r"embed|wte")
"""What the names of embeddings have in common."""


def is_torn(sent: Collection[str], unsent: Collection[str]) -> bool:
    """Whether a part of a model was sent in part, or no layer at all.

    A part is a stack of layers with all that lies beside it, as an embedding does. An
    embedding that lies further up belongs to the nearest stack. What a trainer leaves
    alone, such as a vision tower, is a part of its own. A kind of parameter that no
    layer of a stack was sent of is left out on purpose: whoever missed the beginning
    lacks some layers. Names are those of parameters.
    """
    stacks, lacking = (
        {root for name in names if (root := _root(name)) is not None}
        for names in (sent, unsent)
    )
    if lacking and not stacks:
        return True
    roots = stacks | lacking
    kinds = {_LAYER.sub("#", name) for name in sent}
    num_unsent = Counter(_LAYER.sub("#", name) for name in unsent)
    begun = {_part(name, roots) for name in sent} - {None}
    for name in unsent:
        kind = _LAYER.sub("#", name)
        # One layer may have kinds of its own.
        is_left_out = kind not in kinds and num_unsent[kind] > 1
        if _part(name, roots) in begun and not (is_left_out and _root(name) in stacks):
            return True
    return False


def _root(name: str) -> str | None:
    """What holds the stack of a layer: `model` of `model.layers.0.norm.weight`.

    `projector.0.weight` is no layer: nothing but parameters is in it.
    """
    found = _LAYER.search(name)
    if found is None:
        return None
    stack, within = name[: found.start() - 1], name[found.end() + 1 :]
    return stack.rpartition(".")[0] if "." in stack or "." in within else None


def _part(name: str, roots: Collection[str]) -> str | None:
    """The smallest part that a parameter lies in, or that an embedding lies beside.

    None if there is no such part, or if an embedding is as near to another one.
    """
    parents = name.split(".")[:-1]
    prefixes = (".".join(parents[:num]) for num in range(len(parents), -1, -1))
    part = next((prefix for prefix in prefixes if prefix in roots), None)
    if part is not None or not _EMBEDDING.search(name):
        return part

    def rating(root: str) -> tuple[int, int]:
        within = root.split(".")
        return _shared(parents, within), -len(within)

    best = max(map(rating, roots), default=(0, 0))
    nearest = [root for root in roots if rating(root) == best]
    return nearest[0] if best[0] and len(nearest) == 1 else None


def checkpoint_names(param: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoint tensors that are loaded into `param`.

    Args:
        param: a parameter's name in the engine, like `…self_attn.qkv_proj.weight`.
        fused: the model's `packed_modules_mapping`, like
            `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`.

    """
    parts = param.split(".")
    for position, part in enumerate(parts):
        if part in fused:
            head, tail = parts[:position], parts[position + 1 :]
            return [".".join([*head, shard, *tail]) for shard in fused[part]]
    return [param]


def matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    """A function: does a name match one of `patterns`? Shell style: `*`, `?`, `[…]`."""
    plain = {pattern for pattern in patterns if not set(pattern) & set("*?[")}
    others = [fnmatch.translate(p) for p in patterns if p not in plain]
    one_of = re.compile("|".join(others) or r"(?!)")
    return lambda name: name in plain or one_of.match(name) is not None


def shared_suffix(a: str, b: str) -> int:
    """The number of dotted parts that two names share at their ends."""
    return _shared(a.split(".")[::-1], b.split(".")[::-1])


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# --------------------------------------------------------------- one unknown name
class Neighbours:
    """Finds the names of a model that are similar to an unknown name.

    Names that differ only in their numbers are of one kind, and compared once. A model
    with 100,000 names has some hundred kinds.

    Args:
        known: the names of the model, in its order.

    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._kinds: dict[str, dict[Numbers, str]] = {}
        """Kind (a name without its numbers) → the numbers → the name."""
        for name in with_breaks(known):
            kind = self._kinds.setdefault(_NUMBER.sub("#", name), {})
            kind[tuple(_NUMBER.findall(name))] = name

    def nearest(
        self,
        name: str,
        shape: Sequence[int] | None,
        dtype: str | None,
        *,
        most: int = 3,
    ) -> list[str]:
        """The `most` names that are most similar to `name`, the best first.

        The order is by the similarity of letters and dotted parts (difflib). Among
        equals it is by equal numbers in the names, then equal shapes, then dtypes.
        """
        numbers = tuple(_NUMBER.findall(name))

        def facts(candidate: tuple[Numbers, str]) -> tuple[int, bool, bool]:
            of_its, other = candidate
            other_shape, other_dtype = self._known[other]
            return (
                sum(a == b for a, b in zip(numbers, of_its, strict=False)),
                None not in (shape, other_shape)
                and list(shape or ()) == list(other_shape or ()),
                dtype is not None and dtype == other_dtype,
            )

        found: list[tuple[float, tuple[int, bool, bool], str]] = []
        for kind, ratio, similarity in self._similar(_NUMBER.sub("#", name)):
            names = self._kinds[kind]
            if (same := names.get(numbers)) is not None:
                best = [(numbers, same)]
            else:
                best = heapq.nlargest(most, with_breaks(names.items()), key=facts)
            for candidate in best:
                told = facts(candidate)
                # If a candidate is in the same layer, those of other layers are out.
                is_equal = told[0] == facts(best[0])[0]
                if is_equal and _is_like(name, candidate[1], ratio, has_shape=told[1]):
                    found.append((similarity, told, candidate[1]))
        found.sort(key=lambda each: each[:2], reverse=True)
        return [other for *_, other in found[:most]]

    def _similar(self, kind: str) -> list[tuple[str, float, float]]:
        """The kinds of names that are about as similar as the best one.

        Each comes with the ratio of its letters, and the sum of the ratios of letters
        and dotted parts.
        """
        letters, parts = SequenceMatcher(b=kind), SequenceMatcher(b=kind.split("."))
        rated = []
        for other in with_breaks(self._kinds):
            letters.set_seq1(other)
            parts.set_seq1(other.split("."))
            ratio = letters.ratio()
            rated.append((other, ratio, round(ratio + parts.ratio(), 2)))
        best = max((similarity for *_, similarity in rated), default=0.0)
        return [each for each in rated if each[2] >= best - NEXT_BEST]


def _is_like(name: str, other: str, ratio: float, *, has_shape: bool) -> bool:
    """Whether two names are similar enough to be reported."""
    shared = shared_suffix(name, other)
    return ratio >= ALIKE or shared > 1 or (shared > 0 and has_shape)


def nearest(
    name: str,
    shape: Sequence[int] | None,
    dtype: str | None,
    known: Known,
    *,
    most: int = 3,
) -> list[str]:
    """The `most` known names most similar to `name`; see `Neighbours.nearest`."""
    return Neighbours(known).nearest(name, shape, dtype, most=most)


def describe_unknown(
    names: Iterable[tuple[str, Sequence[int] | None, str | None]], known: Known
) -> str:
    """One sentence per unknown name, each with the nearest names of the model."""
    neighbours = Neighbours(known)
    lines = []
    for name, shape, dtype in names:
        near = neighbours.nearest(name, shape, dtype)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        lines.append(f"{name}{hint}")
    return "; ".join(lines)


# ------------------------------------------------------ what many have in common
@dataclass(frozen=True, slots=True)
class Renaming:
    """A change of names that turns unknown names into known ones.

    Attributes:
        old: the dotted parts that are replaced; empty if parts are only added.
        new: the dotted parts in their place; empty if parts are only removed.
        where: `prefix`, `suffix`, or `middle`.

    """

    old: str
    new: str
    where: str

    def __call__(self, name: str) -> str | None:
        """The changed `name`; None if `old` is not in it."""
        old, new = self._affixes
        if self.where == "prefix":
            return new + name.removeprefix(old) if name.startswith(old) else None
        if self.where == "suffix":
            return name.removesuffix(old) + new if name.endswith(old) else None
        return name.replace(old, new) if old in name else None

    def line(self, kept: Iterable[str] = ()) -> str | None:
        """The argument `name_map=…` for this change; None if it would be too long.

        Args:
            kept: sent names that the model has; the change must not touch them.

        """
        old, new = map(repr, self._affixes)
        if self.where == "middle":
            change = f"name.replace({old}, {new})"
        elif self.where == "prefix":
            change = f"name.removeprefix({old})" if self.old else "name"
            change = f"{new} + {change}" if self.new else change
        else:
            change = f"name.removesuffix({old})" if self.old else "name"
            change = f"{change} + {new}" if self.new else change
        if self.old and self.new and self.where != "middle":
            has = "startswith" if self.where == "prefix" else "endswith"
            change += f" if name.{has}({old}) else name"
        spoilt = [name for name in kept if self(name) not in (None, name)]
        if len(spoilt) > MOST_KEPT:
            return None
        if spoilt:
            change = f"name if name in {tuple(sorted(spoilt))!r} else {change}"
        return f"name_map=lambda name: {change}"

    def __str__(self) -> str:
        """The change in words, such as `without the prefix 'module.'`."""
        old, new = map(repr, self._affixes)
        kind = {"prefix": "prefix", "suffix": "ending", "middle": "part"}[self.where]
        if not self.new:
            return f"without the {kind} {old}"
        if not self.old:
            return f"with the {kind} {new}"
        return f"with {new} instead of the {kind} {old}"

    @property
    def _affixes(self) -> tuple[str, str]:
        """`old` and `new` with the dots beside them."""
        if self.where == "middle":
            return f".{self.old}.", f".{self.new}." if self.new else "."
        dotted = ((part, bool(part)) for part in (self.old, self.new))
        if self.where == "prefix":
            old, new = (f"{part}." if has else "" for part, has in dotted)
        else:
            old, new = (f".{part}" if has else "" for part, has in dotted)
        return old, new


def renaming(
    unknown: Collection[str], known: Collection[str]
) -> tuple[Renaming, list[str]] | None:
    """The change that turns the most unknown names into known ones.

    Returns:
        The change and the names that it turns into known ones; None if no change does
        so with two names or more. Names that would become equal do not count.

    """
    taken = known if isinstance(known, set | dict) else set(known)
    # Numbers are left out, so few kinds of names have to be compared.
    kinds = list(dict.fromkeys(_NUMBER.sub("#", name) for name in with_breaks(known)))
    strange = list(
        dict.fromkeys(_NUMBER.sub("#", name) for name in with_breaks(unknown))
    )
    step = max(1, len(strange) // SAMPLE)
    guesses: Counter[Renaming] = Counter()
    for kind in strange[::step][:SAMPLE]:
        guesses.update(_changes(kind, kinds))
    best: tuple[Renaming, list[str]] | None = None
    for change, _ in guesses.most_common(SAMPLE):
        renamed = {name: change(name) for name in with_breaks(unknown)}
        counts = Counter(with_breaks(renamed.values()))
        made = [
            name
            for name, new in with_breaks(renamed.items())
            if new in taken and counts[new] == 1
        ]
        if len(made) > max(1, len(best[1]) if best else 0):
            best = change, made
        if best is not None and len(best[1]) == len(unknown):
            break
    return best


def _changes(name: str, known: Iterable[str]) -> set[Renaming]:
    """The changes from `name` to the known names that share the most parts with it."""
    parts = name.split(".")
    rated: list[tuple[int, int, list[str]]] = []
    for other in with_breaks(known):
        others = other.split(".")
        before = _shared(parts, others)
        behind = _shared(parts[::-1], others[::-1])
        behind = min(behind, min(len(parts), len(others)) - before)
        rated.append((before, behind, others))
    most = max((before + behind for before, behind, _ in rated), default=0)
    changes: set[Renaming] = set()
    for before, behind, others in rated:
        if not most or before + behind < most:
            continue
        old, new = parts[before : len(parts) - behind], others[before:]
        new = new[: len(new) - behind]
        where = "middle" if before and behind else "suffix" if before else "prefix"
        if where == "middle" and not old:  # its place in the middle is unknown
            old, new, where = parts[:before], others[:before] + new, "prefix"
        if "#" not in old + new:
            changes.add(Renaming(".".join(old), ".".join(new), where))
    return changes


# ------------------------------------------------------------ a name for every one
@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs of sent names and the model's names.

    Attributes:
        name_map: sent name → the model's name, where they differ.
        ambiguous: sent name → candidates, if there are several, or if several sent
            names have the same candidate.
        unmatched: sent names without a candidate.

    """

    name_map: dict[str, str]
    ambiguous: dict[str, list[str]]
    unmatched: list[str]


def paired(sent: Iterable[tuple[str, Sequence[int], str]], known: Known) -> Pairing:
    """Find the unique nearest name of a model for every sent tensor.

    A sent name that the model has stays, and is no candidate for other tensors. For
    every other tensor, the candidates have the same shape and a compatible dtype. The
    one that shares the longest ending of whole dotted parts wins. If several do, those
    with an equal dtype are left.

    Args:
        sent: name, shape and dtype (like `bfloat16`) of every tensor.
        known: the model's names; None as shape or dtype fits every tensor.

    """
    # The garbage collector soon stops tracking tuples of plain values.
    specs = {name: (tuple(shape), dtype) for name, shape, dtype in with_breaks(sent)}
    strange = {n: tuple(n.split(".")) for n in with_breaks(specs) if n not in known}
    free = {n: tuple(n.split(".")) for n in with_breaks(known) if n not in specs}
    name_map: dict[str, str] = {}
    ambiguous: dict[str, list[str]] = {}
    for length in range(max(map(len, strange.values()), default=0), 0, -1):
        by_ending: dict[tuple[str, ...], list[str]] = {}
        for name, parts in with_breaks(free.items()):
            if len(parts) >= length:
                by_ending.setdefault(parts[-length:], []).append(name)
        claims: dict[str, list[str]] = {}
        for name, parts in with_breaks(strange.items()):
            ending = by_ending.get(parts[-length:], ())
            fitting = [other for other in ending if _fits(specs[name], known[other])]
            same = [other for other in fitting if known[other][1] == specs[name][1]]
            if len(parts) >= length and fitting:
                claims[name] = same or fitting
        wanted = Counter(
            other for claim in with_breaks(claims.values()) for other in claim
        )
        for name, claim in with_breaks(claims.items()):
            del strange[name]
            if len(claim) == 1 and wanted[claim[0]] == 1:
                name_map[name] = claim[0]
            else:
                ambiguous[name] = claim
        for other in wanted:
            del free[other]
    return Pairing(name_map, ambiguous, list(strange))


def _fits(
    spec: tuple[tuple[int, ...], str], known: tuple[Sequence[int] | None, str | None]
) -> bool:
    """Whether shape and dtype of a tensor fit the model's."""
    shape, dtype = known
    if shape is not None and tuple(shape) != spec[0]:
        return False
    return dtype in (None, spec[1]) or {dtype, spec[1]} <= PLAIN
