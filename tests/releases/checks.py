"""The checks of the audit: what of a release fits what our code uses of it.

Each check compares a release with our records, or with the reference release. A
difference that is neither in a table of `releases/table.py` nor settled would break us.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from typing import Any

from tests.releases.records import REACHING, Field, RestsOn
from tests.releases.release import OURS, UPSTREAM, Release, is_meant, line_of
from tests.releases.syntax import OUTSIDE, VALUE, Definition, Function, Module, assigned
from vllm.inflight.attached import ATTRIBUTE
from vllm.inflight.patch.records.record import Attribute, Override, Patch, Private
from vllm.inflight.releases.table import SIGNATURES, differing, holds

FITS = "fits"
DIFFERS = "differs"
"""It is not as in the reference release, and our tables say so."""
ABSENT = "not there"
"""The record is for other releases."""
BREAKS = "breaks"

OF_EVERY_CLASS = {"__init__", "__post_init__", "__repr__", "__eq__", "__hash__"}
"""A class has these without its base class."""

READ_ALIKE = {"property", "cached_property"}
"""Either may override the other."""


@dataclass(frozen=True, order=True)
class Finding:
    """What a check says of one thing."""

    check: str
    subject: str
    state: str
    told: str = ""


def _found(check: str, subject: str, problem: str | None) -> Finding:
    """What breaks us, or that it fits."""
    return Finding(check, subject, FITS if problem is None else BREAKS, problem or "")


# --------------------------------------------------------------------------- records
def patches(release: Release, records: Iterable[Patch]) -> Iterator[Finding]:
    """Targets of patches have the expected parameters; added names are free."""
    for record in records:
        yield _of_record("patches", release, record)
        if is_meant(record, release) and record.expects is not None:
            yield from _of_replacement(release, record)


def names_of_records(
    release: Release, records: Iterable[Override | Private]
) -> Iterator[Finding]:
    """Methods that we override and private names have the expected parameters."""
    for record in records:
        yield _of_record("private names", release, record)


def _of_record(
    check: str, release: Release, record: Patch | Override | Private
) -> Finding:
    target = record.target
    if not is_meant(record, release):
        return Finding(check, target, ABSENT)
    found = release.tree.find(target)
    if isinstance(record, Private) and record.expects is None:
        is_gone = found is None and not _sets(release, target)
        return _found(check, target, "is gone" if is_gone else None)
    expected = differing(SIGNATURES.get(target), record.expects, release.name)
    state = FITS if expected == record.expects else DIFFERS
    if expected is None:
        if found is not None:
            return Finding(check, target, BREAKS, "exists; we mean to add it")
        module, _, path = target.partition(":")
        owner = path.rpartition(".")[0]
        if owner and release.tree.find(f"{module}:{owner}") is None:
            return Finding(check, target, BREAKS, f"{owner} is gone")
        return Finding(check, target, state)
    if found is None or found.signature is None:
        told = "is gone" if found is None else f"is a {found.kind}"
        return Finding(check, target, BREAKS, told)
    got = tuple(found.signature.parameters)
    if got != expected:
        told = f"has parameters {_listed(got)}, expected {_listed(expected)}"
        return Finding(check, target, BREAKS, told)
    return Finding(check, target, state)


def _listed(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _sets(release: Release, target: str) -> bool:
    """Whether a module sets an attribute of this name on any object."""
    module, _, path = target.partition(":")
    there = release.tree.module(module)
    name = path.rpartition(".")[2]
    return there is not None and any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Store)
        for node in there.nodes
    )


def _of_replacement(release: Release, record: Patch) -> Iterator[Finding]:
    """The function that replaces the target takes what callers of the target give."""
    found = release.tree.find(record.target)
    if found is None or found.signature is None:
        return
    ours = inspect.signature(record.around(_any_function))
    problem = misfit(ours, found.signature, skip=0 if "." not in found.path else 1)
    told = None if problem is None else f"our replacement {problem}"
    yield _found("replacements", record.target, told)


def _any_function(*args: Any, **kwargs: Any) -> Any:
    """Stands for the original while a replacement is made; nothing calls it."""
    raise AssertionError(args, kwargs)


def misfit(ours: Signature, theirs: Signature, skip: int = 0) -> str | None:
    """Why ours does not take every call that theirs takes; None if it does.

    Args:
        ours: parameters of our function.
        theirs: parameters of the function that it stands for.
        skip: number of first parameters that have no name for callers, as `self`.

    """
    mine = list(ours.parameters.values())
    kinds = {each.kind for each in mine}
    positional = [
        each
        for each in mine
        if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    named = {each.name for each in mine if each.kind is not Parameter.POSITIONAL_ONLY}
    takes_rest = Parameter.VAR_POSITIONAL in kinds
    takes_named = Parameter.VAR_KEYWORD in kinds
    given = set()
    for index, each in enumerate(theirs.parameters.values()):
        if each.kind is Parameter.VAR_POSITIONAL:
            if not takes_rest:
                return f"does not take *{each.name}"
        elif each.kind is Parameter.VAR_KEYWORD:
            if not takes_named:
                return f"does not take **{each.name}"
        elif each.kind is Parameter.KEYWORD_ONLY:
            if each.name not in named and not takes_named:
                return f"does not take {each.name!r}"
            given.add(each.name)
        else:
            mate = positional[index] if index < len(positional) else None
            if mate is None and not takes_rest:
                return f"does not take {each.name!r} by position"
            is_named = index >= skip and each.kind is not Parameter.POSITIONAL_ONLY
            if is_named and mate is not None and mate.name != each.name:
                return f"has {mate.name!r} where upstream has {each.name!r}"
            if is_named and mate is None and not takes_named and each.name not in named:
                return f"does not take {each.name!r} by name"
            is_needed = each.default is Parameter.empty
            if mate is not None:
                given.add(mate.name)
                if mate.default is Parameter.empty and not is_needed:
                    return f"needs {each.name!r}, which callers may leave out"
    for each in mine:
        is_one = each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if is_one and each.default is Parameter.empty and each.name not in given:
            return f"needs {each.name!r}, which upstream does not give"
    return None


# ------------------------------------------------------------------------- attributes
def attributes(release: Release, records: Iterable[Attribute]) -> Iterator[Finding]:
    """Objects of upstream have room for our attributes, and no such names."""
    for record in records:
        subject = f"{record.target}.{record.name}"
        if not is_meant(record, release):
            yield Finding("attributes", subject, ABSENT)
            continue
        yield _found("attributes", subject, _problem_with_attribute(release, record))
    is_used = ATTRIBUTE in release.words
    problem = "is a name that upstream uses" if is_used else None
    yield _found("attributes", ATTRIBUTE, problem)


def _problem_with_attribute(release: Release, record: Attribute) -> str | None:
    kind = release.tree.find(record.target)
    if kind is None:
        return "its class is gone"
    if kind.kind == OUTSIDE:
        return None
    if not has_room(release, kind):
        return "its class has no room for attributes"
    for each in release.tree.line(kind):
        if each.node is not None and _has_word(_text(each.node), record.name):
            return f"{each.path} of upstream uses that name"
    return None


@cache
def _text(node: ast.AST) -> str:
    """The code of a class, which several attributes are looked for in."""
    return ast.unparse(node)


def has_room(release: Release, kind: Definition) -> bool:
    """Whether objects of a class have a `__dict__`."""
    line = release.tree.line(kind)
    if any((each.module, each.path) == ("msgspec", "Struct") for each in line):
        return any("dict=True" in _head(each) for each in line)
    ours = [each for each in line if each.kind != OUTSIDE]
    return any(
        "__slots__" not in release.tree.own_members(each)
        and "slots=True" not in _head(each)
        for each in ours
    )


def _head(kind: Definition) -> str:
    """The decorators and the bases of a class, as text."""
    if not isinstance(kind.node, ast.ClassDef):
        return ""
    parts = [*kind.node.decorator_list, *kind.node.bases, *kind.node.keywords]
    return " ".join(ast.unparse(part) for part in parts)


def _has_word(text: str, word: str) -> bool:
    return word in text and re.search(rf"\b{word}\b", text) is not None


# ------------------------------------------------------------------------ our classes
def derived_classes(release: Release, reference: Release) -> Iterator[Finding]:
    """Classes of ours override what their base class of upstream has."""
    kinds = list(release.classes())
    bases = {
        base.target for kind in kinds for base in release.tree.line(kind)[1:]
    }  # of ours, too
    for kind in kinds:
        then = reference.tree.find(kind.target)
        if then is None:
            continue
        before = _theirs(reference, then)
        if not before:
            continue
        is_leaf = kind.target not in bases
        now = _theirs(release, kind)
        yield from _compared(
            "derived classes", (release, kind, now), (reference, then, before), is_leaf
        )


def _theirs(release: Release, kind: Definition) -> list[Definition]:
    """The classes of upstream that a class of ours is derived of."""
    line = release.tree.line(kind)[1:]
    return [
        each
        for each in line
        if each.kind == "class" and not each.module.startswith(OURS)
    ]


def mixins(
    release: Release, reference: Release, records: Mapping[str, Iterable[str]]
) -> Iterator[Finding]:
    """Mixins of ours override what the classes behind them have."""
    for ours, targets in records.items():
        for target in targets:
            yield from _new_abstract(release, reference, target)
        now = [release.tree.find(target) for target in targets]
        then = [reference.tree.find(target) for target in targets]
        kind, same = release.tree.find(ours), reference.tree.find(ours)
        if kind is None or same is None or None in (*now, *then):
            yield Finding("mixins", ours, BREAKS, "is gone, or a class behind it")
            continue
        sides = [
            (side, own, [each for base in found for each in side.tree.line(base)])
            for side, own, found in (
                (release, kind, [each for each in now if each is not None]),
                (reference, same, [each for each in then if each is not None]),
            )
        ]
        yield from _compared("mixins", sides[0], sides[1], is_leaf=False)


def _new_abstract(
    release: Release, reference: Release, target: str
) -> Iterator[Finding]:
    """Methods that every class behind a mixin has to have since a release."""
    now, then = release.tree.find(target), reference.tree.find(target)
    if now is None or then is None:
        return
    before = reference.tree.members(then)
    for base in release.tree.line(now)[1:]:
        for name, member in release.tree.own_members(base).items():
            if member.is_abstract and name not in before:
                told = f"is new and abstract, and {target} is derived of it"
                yield Finding("mixins", member.target, BREAKS, told)


Side = tuple[Release, Definition, list[Definition]]


def _compared(
    check: str, side: Side, measure: Side, is_leaf: bool
) -> Iterator[Finding]:
    """Compare a class of ours with its classes of upstream, in two releases."""
    (release, kind, _), (reference, then, _) = side, measure
    now, before = _all_members(side), _all_members(measure)
    lost = {base.path for base in reference.tree.bases(then)}
    lost -= {base.path for base in release.tree.bases(kind)}
    for path in sorted(lost):
        yield Finding(check, kind.target, BREAKS, f"its base class {path} is gone")
    is_adapter = reference.is_left_out(then.module, line_of(then))
    for name, own in release.tree.own_members(kind).items():
        mine = reference.tree.own_members(then).get(name, own)
        problem = _problem(own, now.get(name))
        if name not in now and (name in OF_EVERY_CLASS or is_adapter):
            problem = None
        if not is_adapter:
            if problem == _problem(mine, before.get(name)):
                problem = None  # it is so in the reference release, too
            if problem is None and name in now and name not in before:
                problem = "is new in upstream, and ours hides it"
        if name in now or name in before:
            yield _found(check, f"{kind.target}.{name}", problem)
    if is_leaf:
        missing = _not_made(release, kind) - _not_made(reference, then)
        for name in sorted(missing):
            told = "is abstract in upstream, and we have no such method"
            yield Finding(check, f"{kind.target}.{name}", BREAKS, told)
    problem = _order_of_fields(side)
    if problem is not None and problem != _order_of_fields(measure):
        yield Finding(check, kind.target, BREAKS, problem)


def _all_members(side: Side) -> dict[str, Definition]:
    release, _, classes = side
    found: dict[str, Definition] = {}
    for each in reversed(classes):
        found |= release.tree.own_members(each)
    return found


def _problem(own: Definition, theirs: Definition | None) -> str | None:
    """What keeps a member of ours from overriding one of upstream."""
    if theirs is None:
        return "overrides nothing: upstream has no such name any more"
    if own.kind != theirs.kind and not {own.kind, theirs.kind} <= READ_ALIKE:
        return f"is a {own.kind}; in upstream it is a {theirs.kind}"
    if own.signature is None or theirs.signature is None:
        return None
    skip = 0 if own.kind == "staticmethod" else 1
    return misfit(own.signature, theirs.signature, skip)


def _not_made(release: Release, kind: Definition) -> set[str]:
    """The abstract names that a class has no method for."""
    members = release.tree.members(kind)
    return {name for name, member in members.items() if member.is_abstract}


def _order_of_fields(side: Side) -> str | None:
    """A field of ours without a default after one of upstream with a default."""
    _, kind, classes = side
    if "dataclass" not in kind.decorators or "kw_only=True" in _head(kind):
        return None
    given = [name for each in classes for name, has in _fields(each) if has]
    needed = [name for name, has in _fields(kind) if not has]
    if given and needed:
        return f"field {needed[0]} needs a default, since {given[0]} has one"
    return None


def _fields(kind: Definition) -> Iterator[tuple[str, bool]]:
    """(name, has a default) of the fields of a dataclass, but of keywords alone."""
    if "dataclass" not in kind.decorators or "kw_only=True" in _head(kind):
        return
    assert isinstance(kind.node, ast.ClassDef)
    for node in kind.node.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value = "" if node.value is None else ast.unparse(node.value)
        if "ClassVar" in ast.unparse(node.annotation) or "kw_only=True" in value:
            continue
        yield node.target.id, bool(value)


def protocols(
    release: Release, reference: Release, records: Mapping[str, str]
) -> Iterator[Finding]:
    """Classes of ours have every method of upstream's interface that they serve."""
    for ours, target in records.items():
        now, then = release.tree.find(target), reference.tree.find(target)
        kind = release.tree.find(ours)
        if now is None or then is None or kind is None:
            yield Finding("protocols", ours, BREAKS, f"{target} is gone")
            continue
        mine = release.tree.members(kind)
        before = reference.tree.own_members(then)
        for name, theirs in release.tree.own_members(now).items():
            subject = f"{ours}.{name}"
            if name not in mine:
                if name not in before:
                    yield Finding("protocols", subject, BREAKS, f"{target} has it now")
                continue
            problem = _problem(mine[name], theirs)
            if name in before and problem == _problem(mine[name], before[name]):
                problem = None
            yield _found("protocols", subject, problem)
        for name in before.keys() - release.tree.own_members(now).keys():
            told = f"{target} has no such method any more"
            yield Finding("protocols", f"{ours}.{name}", BREAKS, told)


# ------------------------------------------------------------------------------ names
def names(release: Release, usual: Mapping[str, str]) -> Iterator[Finding]:
    """Every name of `upstream.py` is in its place."""
    for name, place in release.names.items():
        state = FITS if place == usual[name] else DIFFERS
        if release.tree.find(place) is None:
            yield Finding("names", name, BREAKS, f"{place} is gone")
        else:
            yield Finding("names", name, state)


def imports(release: Release) -> Iterator[Finding]:
    """Every import from vLLM in our files finds its name."""
    for module in release.modules():
        for line, target in _imports_of_upstream(module):
            if release.is_left_out(module.name, line):
                continue
            path = target.partition(":")[2]
            if module.name == UPSTREAM and path in release.names:
                continue  # the check of names says it
            problem = None if _is_importable(release, target) else "is gone"
            yield _found("imports", f"{module.name}: {target}", problem)


def _imports_of_upstream(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            base = module.base(node)
            if _is_upstream(base):
                for alias in node.names:
                    if _is_upstream(f"{base}.{alias.name}"):
                        yield node.lineno, f"{base}:{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_upstream(alias.name):
                    yield node.lineno, f"{alias.name}:"


def _is_upstream(module: str) -> bool:
    first, _, rest = module.partition(".")
    return first == "vllm" and rest.partition(".")[0] != "inflight"


def _is_importable(release: Release, target: str) -> bool:
    module, _, name = target.partition(":")
    if not name:
        return release.tree.module(module) is not None
    return release.tree.find(target) is not None


def words(
    release: Release, reference: Release, records: Iterable[Patch]
) -> Iterator[Finding]:
    """Attributes that our code reads by name are still names in upstream's files."""
    added = {
        each.target.rpartition(".")[2]
        for each in records
        if each.expects is None and is_meant(each, release)
    }
    used: dict[str, str] = {}
    for module in release.modules():
        for line, name in _attributes_in(module):
            if not release.is_left_out(module.name, line):
                used.setdefault(name, module.name)
    ours = made_by_ours(release) | added | release.names.keys()
    for name, module_name in sorted(used.items()):
        if name in reference.made and name not in ours:
            problem = None
            if name not in release.words:
                problem = f"is in no file of upstream; {module_name} uses it"
            yield _found("words", name, problem)


def _attributes_in(module: Module) -> Iterator[tuple[int, str]]:
    """The attributes that a file reads, those of `getattr` too."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            for given in node.args[1:2]:
                if isinstance(given, ast.Constant):
                    yield node.lineno, str(given.value)


@cache
def made_by_ours(release: Release) -> set[str]:
    """The names that the files of this package define or assign."""
    return {name for module in release.modules() for name in _made_in(module)}


def _made_in(module: Module) -> Iterator[str]:
    """The names that a file defines or assigns."""
    for node in module.nodes:
        if isinstance(node, Function):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (name for name, _ in assigned(node))


# -------------------------------------------------------------------- HTTP and routes
def fields(release: Release, records: Iterable[Field]) -> Iterator[Finding]:
    """Models of HTTP declare the fields that we know of, and no other of ours."""
    for record in records:
        subject = f"{record.model}.{record.name}"
        if not is_meant(record, release):
            yield Finding("fields", subject, ABSENT)
            continue
        model = release.tree.find(record.model)
        if model is None:
            yield Finding("fields", subject, BREAKS, "its model is gone")
            continue
        since = record.declared_since
        expected = since is not None and holds(since, None, release.name)
        is_declared = record.name in release.tree.members(model)
        problem = None
        if is_declared != expected:
            problem = "upstream does not declare it"
            if is_declared:
                problem = "upstream declares it, and we add it"
        yield _found("fields", subject, problem)


def routes(
    release: Release, reference: Release, ours: Iterable[tuple[str, str]]
) -> Iterator[Finding]:
    """Upstream has no new route with a path of ours, or with a name like ours."""
    before = set(routes_of(reference))
    paths = {path for _, path in ours}
    for method, path in sorted(set(routes_of(release))):
        is_ours = path in paths
        if not is_ours and not re.search(REACHING, path):
            continue
        problem = None
        if (method, path) not in before:
            what = "has a path of ours" if is_ours else "may go past our routes"
            problem = f"is new, and {what}"
        yield _found("routes", f"{method} {path}", problem)


METHODS = {"get", "post", "put", "delete", "patch", "head", "websocket"}


def routes_of(release: Release) -> Iterator[tuple[str, str]]:
    """(method, path) of every route in the files of upstream's front end."""
    for module in release.tree.modules("vllm.entrypoints"):
        if "router" not in module.text and "app." not in module.text:
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield from _routes_of(node, node.func.attr)


def _routes_of(node: ast.Call, made_by: str) -> Iterator[tuple[str, str]]:
    path = node.args[0] if node.args else None
    if not isinstance(path, ast.Constant) or not str(path.value).startswith("/"):
        return
    if made_by in METHODS:
        yield made_by.upper(), str(path.value)
    elif made_by in ("add_api_route", "api_route"):
        given = [each.value for each in node.keywords if each.arg == "methods"]
        for method in ast.literal_eval(given[0]) if given else ["GET"]:
            yield method, str(path.value)


# ---------------------------------------------------------------- around our patches
def ways_around(
    release: Release, reference: Release, records: Iterable[Patch]
) -> Iterator[Finding]:
    """Classes that we patch have no new method that may do what our patches control."""
    targets = {each.target for each in records if is_meant(each, release)}
    owners = {target.rpartition(".")[0] for target in targets}
    seen: set[str] = set()
    for owner in sorted(each for each in owners if ":" in each):
        if owner.startswith("vllm.lora."):
            continue  # every method there is about adapters
        now, then = release.tree.find(owner), reference.tree.find(owner)
        if now is None or then is None:
            continue  # the check of patches says it
        before = reference.tree.members(then)
        for name, member in release.tree.members(now).items():
            is_call = member.signature is not None and re.search(REACHING, name)
            if is_call and member.target not in seen:
                seen.add(member.target)
                is_ours = {member.target, f"{owner}.{name}"} & targets
                is_new = name not in before and not is_ours
                problem = "is new, and may go past our patches" if is_new else None
                yield _found("ways around", member.target, problem)


def code(
    release: Release, reference: Release, records: Iterable[RestsOn]
) -> Iterator[Finding]:
    """Functions that we rely on have the code that we have read."""
    for record in records:
        now = release.tree.find(record.target)
        then = reference.tree.find(record.target)
        if then is None and now is None:
            yield Finding("code", record.target, BREAKS, "is in neither release")
        elif now is None:
            yield Finding("code", record.target, BREAKS, f"is gone; {record.why}")
        elif then is None or now.code != then.code:
            yield Finding("code", record.target, BREAKS, f"has changed; {record.why}")
        else:
            yield Finding("code", record.target, FITS)


def families(
    release: Release, reference: Release, records: Mapping[str, tuple[str, str]]
) -> Iterator[Finding]:
    """Upstream has no new class of a kind that our code distinguishes."""
    for base, (package, why) in records.items():
        before = {each.path for each in _subclasses(reference, base, package)}
        for each in _subclasses(release, base, package):
            problem = None if each.path in before else f"is new; {why}"
            yield _found("families", each.target, problem)


def _subclasses(release: Release, base: str, package: str) -> list[Definition]:
    tree = release.tree
    return [each for each in tree.classes(package) if tree.is_derived(each, base)]


def changed_bodies(
    release: Release, reference: Release, records: Iterable[Patch | Override | Private]
) -> list[str]:
    """Targets whose code is not as in the reference release: they have to be read."""
    changed = []
    for record in records:
        now = release.tree.find(record.target)
        then = reference.tree.find(record.target)
        if now is None or then is None or now.kind == VALUE:
            continue
        if now.code != then.code:
            changed.append(record.target)
    return sorted(set(changed))
