"""Finds names in the Python files of a package by their syntax, without an import.

A name is found as Python would find it: through `from x import y`, through the classes
that a class is derived of, as a method, a field, or an attribute that a method assigns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import Parameter, Signature
from pathlib import Path

OUTSIDE = "outside"
"""Kind of a definition whose module is in none of the folders."""
VALUE = "value"
"""Kind of a variable, a field, or an attribute that a method assigns."""

KINDS = {
    "property": "property",
    "cached_property": "cached_property",
    "staticmethod": "staticmethod",
    "classmethod": "classmethod",
    "abstractproperty": "property",
}
"""Decorator → what it makes of a function."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where a name gets its value."""

    module: str
    path: str
    """`name` or `Class.name`."""
    kind: str
    """`function`, `class`, a value of `KINDS`, `module`, `VALUE` or `OUTSIDE`."""
    node: ast.AST | None = field(default=None, compare=False, repr=False)

    @property
    def target(self) -> str:
        """`module:path`."""
        return f"{self.module}:{self.path}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @cached_property
    def decorators(self) -> set[str]:
        """The last names of the decorators."""
        return set(_decorators(self.node))

    @property
    def is_abstract(self) -> bool:
        """Whether a derived class has to have a method of its own."""
        return any(name.startswith("abstract") for name in self.decorators)

    @cached_property
    def signature(self) -> Signature | None:
        """The parameters, if this is a function."""
        return signature_of(self.node) if isinstance(self.node, Function) else None

    @cached_property
    def code(self) -> str:
        """The code, without comments and docstrings, to compare it."""
        if self.node is None:
            return ""
        node = ast.parse(ast.unparse(self.node))
        for each in ast.walk(node):
            if isinstance(each, Function | ast.ClassDef) and ast.get_docstring(each):
                each.body = each.body[1:] or [ast.Pass()]
        return ast.dump(node)


@dataclass(eq=False)
class Module:
    """One file: what its names are, at the level of the module."""

    name: str
    is_package: bool
    """Whether the file is an `__init__.py`."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the file."""
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The package that relative imports begin at."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """Name → the last statement that binds it; of imports, the alias."""
        found: dict[str, ast.AST] = {}
        for statement in statements(self.tree.body):
            for name, node in bound(statement):
                found[name] = node
        return found

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Name → (module, name there; "" for the module itself)."""
        return self._imports(statements(self.tree.body))

    @cached_property
    def inner_imports(self) -> dict[str, tuple[str, str]]:
        """The same of all imports, those inside of functions too."""
        return self._imports(self.nodes)

    def _imports(self, nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str]]:
        found = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    name = alias.asname or first
                    found[name] = (alias.name if alias.asname else first, "")
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = (self.base(node), alias.name)
        return found

    def base(self, node: ast.ImportFrom) -> str:
        """The module that an import is from, in full."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _module(name: str, is_package: bool, text: str) -> Module:
    """Releases share the many files that are the same in them."""
    return Module(name, is_package, text)


class Tree:
    """The modules in some folders.

    Args:
        folders: a module is taken from the first of them that has it.
        stand_ins: `module:name` → `module:name` that has its definition. It is for
            modules that find names at run time.

    """

    def __init__(
        self, *folders: Path, stand_ins: Mapping[str, str] | None = None
    ) -> None:
        self.folders = folders
        self._stand_ins = stand_ins or {}
        self._modules: dict[str, Module | None] = {}
        self._lines: dict[str, list[Definition]] = {}

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None if no folder has it."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        for folder in self.folders:
            place = folder.joinpath(*name.split("."))
            for is_package, file in enumerate(
                (place.with_name(f"{place.name}.py"), place / "__init__.py")
            ):
                if file.is_file():
                    text = file.read_text(errors="replace")
                    return _module(name, bool(is_package), text)
        return None

    def modules(self, package: str) -> Iterator[Module]:
        """The modules of a package and of its sub-packages."""
        for folder in self.folders:
            place = folder.joinpath(*package.split("."))
            for file in sorted(place.rglob("*.py")):
                parts = file.relative_to(folder).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if (module := self.module(name)) is not None:
                    yield module

    def find(self, target: str) -> Definition | None:
        """What `module:name` or `module:Class.name` is; None if it is gone."""
        module, _, path = target.partition(":")
        first, *rest = path.split(".")
        found = self.look_up(module, first)
        for name in rest:
            if found is None or found.kind == OUTSIDE:
                return found
            if found.kind == "module":
                found = self.look_up(found.module, name)
            else:
                found = self.members(found).get(name)
        return found

    def look_up(
        self, module: str, name: str, seen: frozenset[str] = frozenset()
    ) -> Definition | None:
        """What a name of a module is."""
        target = f"{module}:{name}"
        if target in seen:
            return None
        seen |= {target}
        if target in self._stand_ins:
            there, _, other = self._stand_ins[target].partition(":")
            return self.look_up(there, other, seen)
        if (there := self.module(module)) is None:
            return self._of_no_module(module, name)
        node = there.names.get(name)
        if isinstance(node, ast.alias):
            module, other = there.imports[name]
            if not other:
                return self._as_module(module)
            if (module, other) == (there.name, name):  # from . import name
                return self._of_package(there, name, seen)
            return self.look_up(module, other, seen)
        if node is None:
            return self._of_package(there, name, seen)
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Name | ast.Attribute):
            # `Name = OtherName` is another name for the same thing.
            alias = self.meant(there, value, seen)
            if alias is not None and alias.kind != OUTSIDE:
                return alias
        return Definition(module, name, _kind(node), node)

    def _as_module(self, name: str) -> Definition:
        return Definition(name, "", "module" if self.module(name) else OUTSIDE)

    def _of_no_module(self, module: str, name: str) -> Definition | None:
        """A name of a library that is not in the folders; None for a module of them."""
        if self.module(f"{module}.{name}") is not None:
            # The package has no `__init__.py`.
            return self._as_module(f"{module}.{name}")
        first = module.partition(".")[0]
        ours = any((folder / first).exists() for folder in self.folders)
        return None if ours else Definition(module, name, OUTSIDE)

    def _of_package(
        self, there: Module, name: str, seen: frozenset[str]
    ) -> Definition | None:
        """A name that no statement binds: a module of the package, or of `*`."""
        inner = f"{there.name}.{name}"
        if there.is_package and self.module(inner) is not None:
            return Definition(inner, "", "module")
        for node in there.tree.body:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found = self.look_up(there.base(node), name, seen)
                if found is not None and found.kind != OUTSIDE:
                    return found
        return None

    def meant(
        self, module: Module, node: ast.AST, seen: frozenset[str] = frozenset()
    ) -> Definition | None:
        """What an expression such as `Name`, `module.Name` or `Name[T]` names."""
        if isinstance(node, ast.Subscript):
            return self.meant(module, node.value, seen)
        if isinstance(node, ast.Name):
            if node.id in module.names:
                return self.look_up(module.name, node.id, seen)
            if node.id not in module.inner_imports:
                return None
            there, name = module.inner_imports[node.id]
            if name:
                return self.look_up(there, name, seen)
            return self._as_module(there)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.meant(module, node.value, seen)
        if owner is None:
            return None
        if owner.kind == OUTSIDE:
            path = f"{owner.path}.{node.attr}".strip(".")
            return Definition(owner.module, path, OUTSIDE)
        if owner.kind == "module":
            return self.look_up(owner.module, node.attr, seen)
        return self.members(owner).get(node.attr)

    def bases(self, kind: Definition) -> list[Definition]:
        """The classes that a class names as its bases, as far as they are known."""
        module = self.module(kind.module)
        if module is None or not isinstance(kind.node, ast.ClassDef):
            return []
        found = (self.meant(module, base) for base in kind.node.bases)
        return [each for each in found if each is not None]

    def line(self, kind: Definition) -> list[Definition]:
        """A class and all that it is derived of, in the order of the look-up."""
        if kind.target not in self._lines:
            classes = [kind]
            for base in self.bases(kind):
                if base.target != kind.target:
                    classes += self.line(base)
            last = {each.target: index for index, each in enumerate(classes)}
            self._lines[kind.target] = [
                each for i, each in enumerate(classes) if last[each.target] == i
            ]
        return self._lines[kind.target]

    @staticmethod
    def own_members(kind: Definition) -> dict[str, Definition]:
        """The names that the body and the methods of a class define."""
        if not isinstance(kind.node, ast.ClassDef):
            return {}
        return {
            name: Definition(kind.module, f"{kind.path}.{name}", of, node)
            for name, (of, node) in _members(kind.node).items()
        }

    def members(self, kind: Definition) -> dict[str, Definition]:
        """The names of a class and of those that it is derived of."""
        found: dict[str, Definition] = {}
        for each in reversed(self.line(kind)):
            found |= self.own_members(each)
        return found

    def is_derived(self, kind: Definition, base: str) -> bool:
        """Whether a class is derived of the class `module:Class`."""
        return any(each.target == base for each in self.line(kind)[1:])

    def classes(self, package: str) -> Iterator[Definition]:
        """The classes of a package, at the level of their modules."""
        for module in self.modules(package):
            if "class " not in module.text:
                continue
            for node in statements(module.tree.body):
                if isinstance(node, ast.ClassDef):
                    yield Definition(module.name, node.name, "class", node)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and of its branches; those of types alone first."""
    for for_types in (True, False):
        for node in body:
            is_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(
                node.test
            )
            if is_types is not for_types:
                continue
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                for part in _branches(node, is_types):
                    yield from statements(part)
            else:
                yield node


def _branches(node: ast.stmt, is_types: bool) -> list[list[ast.stmt]]:
    """The bodies of a statement; the usual one last, since the last one counts."""
    body: list[ast.stmt] = getattr(node, "body", [])
    other: list[ast.stmt] = getattr(node, "orelse", [])
    handlers = [handler.body for handler in getattr(node, "handlers", [])]
    last = [body, other] if is_types or handlers else [other, body]
    return [*handlers, *last, getattr(node, "finalbody", [])]


def bound(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """The names that a statement binds."""
    if isinstance(node, Function):
        decorators = {*_decorators(node)}
        if not decorators & {"overload", "setter", "deleter"}:
            yield node.name, node
    elif isinstance(node, ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, alias
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for each in _parts(target):
                if isinstance(each, ast.Name):
                    yield each.id, node
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node


def signature_of(node: Function) -> Signature:
    """The parameters of a function, with `...` for every default."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    first_default = len(plain) - len(args.defaults)
    made = []
    for index, arg in enumerate(plain):
        kind = (
            Parameter.POSITIONAL_ONLY
            if index < len(args.posonlyargs)
            else Parameter.POSITIONAL_OR_KEYWORD
        )
        default = ... if index >= first_default else Parameter.empty
        made.append(Parameter(arg.arg, kind, default=default))
    if args.vararg is not None:
        made.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, given in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        default = Parameter.empty if given is None else ...
        made.append(Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=default))
    if args.kwarg is not None:
        made.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(made)


def _decorators(node: ast.AST | None) -> Iterator[str]:
    for each in getattr(node, "decorator_list", []):
        called = each.func if isinstance(each, ast.Call) else each
        yield ast.unparse(called).rpartition(".")[2]


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not isinstance(node, Function):
        return VALUE
    kinds = [KINDS[name] for name in _decorators(node) if name in KINDS]
    return kinds[0] if kinds else "function"


def _parts(target: ast.AST) -> Iterator[ast.AST]:
    """The single targets of an assignment."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _parts(each)
    elif isinstance(target, ast.Starred):
        yield from _parts(target.value)
    else:
        yield target


@cache
def _members(kind: ast.ClassDef) -> dict[str, tuple[str, ast.AST]]:
    """Name → (kind, statement) of what a class defines by itself."""
    found: dict[str, tuple[str, ast.AST]] = {}
    for name, node in assigned(kind):
        found[name] = VALUE, node
    for statement in statements(kind.body):
        for name, node in bound(statement):
            found[name] = _kind(node), node
    return found


def assigned(kind: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """The attributes that the methods of a class assign, and its buffers."""
    for method in statements(kind.body):
        if not isinstance(method, Function) or not method.args.args:
            continue
        owner = method.args.args[0].arg
        for node in ast.walk(method):
            targets: list[ast.AST] = []
            if isinstance(node, ast.Assign):
                targets = [part for each in node.targets for part in _parts(each)]
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                targets = [node.target]
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                targets = list(_parts(node.optional_vars))
            elif isinstance(node, ast.Call):
                name = _set_by_call(node)
                if name is not None:
                    yield name, node
            for each in targets:
                if isinstance(each, ast.Attribute) and _is_name(each.value, owner):
                    yield each.attr, node


def _set_by_call(node: ast.Call) -> str | None:
    """`register_buffer("name", …)` and the like."""
    called = ast.unparse(node.func).rpartition(".")[2]
    if called not in ("register_buffer", "register_parameter") or not node.args:
        return None
    name = node.args[0]
    return str(name.value) if isinstance(name, ast.Constant) else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
