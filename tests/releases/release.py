"""A release of vLLM as the audit sees it: its files, and ours for that release."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tests.releases.syntax import Definition, Function, Module, Tree
from tests.releases.wheel import ROOT
from vllm.inflight import patch, upstream
from vllm.inflight.releases.table import ADAPTERS, PLACES, differing, holds, number_of

OURS = "vllm.inflight"
UPSTREAM = f"{OURS}.upstream"

MADE = re.compile(r"(?m)(?:\bdef |\bclass |\bself\.|^ {4}(?=\w+: ))(\w+)(?=[(:\n]| =)")
"""`def name(`, `class name:`, `self.name =` and the field `name: …` of a class."""


class Release:
    """The files of a release, and the files of this package beside them.

    Args:
        name: the release, such as `0.33.0`.
        folder: a folder with the directory `vllm` of the release.
        ours: the folder with the directory `vllm/inflight`.
        names: name of `upstream.py` → its place in the reference release.

    """

    def __init__(
        self,
        name: str,
        folder: Path,
        ours: Path = ROOT,
        names: Mapping[str, str] = upstream.NAMES,
    ) -> None:
        self.name = name
        self.folder = folder
        self.ours = ours
        self._usual_names = names
        places = ((f"{UPSTREAM}:{n}", place) for n, place in self.names.items())
        self.tree = Tree(ours, folder, stand_ins=dict(places))

    @cached_property
    def names(self) -> dict[str, str]:
        """Name of `upstream.py` → its place in this release."""
        return {
            name: differing(PLACES.get(name), place, self.name)
            for name, place in self._usual_names.items()
        }

    @cached_property
    def words(self) -> set[str]:
        """All names in the files of the release, and all other words there."""
        return set().union(*(re.findall(r"\w+", text) for text in self._texts()))

    @cached_property
    def made(self) -> set[str]:
        """The functions, classes, fields and attributes that the files define."""
        return {word for text in self._texts() for word in MADE.findall(text)}

    def _texts(self) -> Iterator[str]:
        for file in (self.folder / "vllm").rglob("*.py"):
            if not file.is_relative_to(self.folder / "vllm" / "inflight"):
                yield file.read_text(errors="replace")

    def modules(self) -> Iterator[Module]:
        """The modules of this package."""
        return self.tree.modules(OURS)

    def classes(self) -> Iterator[Definition]:
        """The classes of this package that this release uses."""
        for kind in self.tree.classes(OURS):
            if not self.is_left_out(kind.module, line_of(kind)):
                yield kind

    def is_left_out(self, module: str, line: int) -> bool:
        """Whether a line of ours is for other releases than this one."""
        return any(line in lines for lines in self._left_out[module])

    @cached_property
    def _left_out(self) -> dict[str, list[range]]:
        """Module of ours → the lines that this release does not run.

        These are the adapters of other releases and the patches for other releases. If
        all adapters of a module are of other releases, so is the module.
        """
        left: dict[str, list[range]] = defaultdict(list)
        used = {chosen(entries, self.name) for entries in ADAPTERS.values()}
        places = {place for entries in ADAPTERS.values() for place in entries.values()}
        used_modules = {place.partition(":")[0] for place in used}
        for place in places - used:
            module = place.partition(":")[0]
            if module not in used_modules:
                left[module].append(range(10**6))
            elif (kind := self.tree.find(place)) is not None:
                left[kind.module].append(_lines(kind.node))
        for module, lines in self._of_other_patches():
            left[module].append(lines)
        return left

    def _of_other_patches(self) -> Iterator[tuple[str, range]]:
        makers: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
        for record in patch.records():
            for each in functions_of(record.around):
                name = each.__module__, each.__qualname__
                makers[is_meant(record, self)].add(name)
        for module, path in makers[False] - makers[True]:
            made = self.tree.find(f"{module}:{path}") if "<" not in path else None
            if made is not None and made.node is not None:
                yield module, _lines(made.node)


def functions_of(around: Any) -> Iterator[Any]:
    """The function of a record, and the functions that are its arguments."""
    given = around.keywords if isinstance(around, partial) else {}
    function = around.func if isinstance(around, partial) else around
    yield function
    for name, parameter in inspect.signature(function).parameters.items():
        argument = given.get(name, parameter.default)
        if inspect.isfunction(argument):
            yield argument


def line_of(kind: Definition) -> int:
    """The first line of a class."""
    line: int = getattr(kind.node, "lineno", 0)
    return line


def is_meant(record: Any, release: Release) -> bool:
    """Whether a record with `since` and `before` is for a release."""
    return holds(record.since, record.before, release.name)


def chosen(entries: dict[str, str], release: str) -> str:
    """The entry of `ADAPTERS` that a release uses."""
    oldest_first = sorted(entries, key=number_of)
    passed = [since for since in oldest_first if holds(since, None, release)]
    return entries[passed[-1] if passed else oldest_first[0]]


def _lines(node: ast.AST | None) -> range:
    """The lines of a function or class, from its first decorator on."""
    assert isinstance(node, Function | ast.ClassDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return range(first, (node.end_lineno or node.lineno) + 1)
