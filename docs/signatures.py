"""The tables of docs/python.md: signatures, and what the docstrings say of them.

A parameter, a field or a return value of which a docstring says nothing stops
`python -m docs.generate`, and so the tests.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from docs.tables import code, first_line, table
from vllm.inflight.patch import api as doors
from vllm.inflight.trainer import (
    ControlClient,
    Outcome,
    Publisher,
    ServerClient,
    per_token_versions,
)

LINE = "<br>"
"""Between what is listed in a cell."""

SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):\n((?:^[ ].*\n?|\n)+)", re.M)
ENTRY = re.compile(r"^ {4}(\**\w+): (.*(?:\n {8}.*)*)", re.M)


def said(function: Any) -> dict[str, str]:
    """The sections of a docstring by their names, indented as they are."""
    return dict(SECTION.findall(inspect.getdoc(function) or ""))


def entries(section: str) -> dict[str, str]:
    """What is listed in a section: name → text in one line."""
    return {name: " ".join(text.split()) for name, text in ENTRY.findall(section)}


def parameters(function: Any) -> Iterator[tuple[str, str, str]]:
    """(name, default or nothing, meaning) of every parameter but `self`."""
    meanings = entries(said(function).get("Args", ""))
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        told = "**" * (parameter.kind is parameter.VAR_KEYWORD) + name
        if told not in meanings:
            raise SystemExit(f"{function.__qualname__} says nothing of {told!r}")
        default = parameter.default
        yield told, "" if default is parameter.empty else repr(default), meanings[told]


def raised(function: Any) -> list[str]:
    """Each error, and when it is raised."""
    listed = entries(said(function).get("Raises", ""))
    return [f"{code(name)}: {when}" for name, when in listed.items()]


def returned(function: Any) -> str:
    """What comes back; stops if the docstring is silent of something."""
    if text := " ".join(said(function).get("Returns", "").split()):
        return text
    if inspect.signature(function).return_annotation not in ("None", None):
        raise SystemExit(f"{function.__qualname__} does not say what it returns")
    return ""


def described(function: Any) -> str:
    """One function: a table of its parameters, what it returns and raises."""
    rows = (
        [code(name), code(default) if default else "needed", meaning]
        for name, default, meaning in parameters(function)
    )
    parts = [table(["parameter", "default", "what it is"], rows)]
    if function.__name__ != "__init__" and (back := returned(function)):
        parts.append(f"Returns: {back}")
    if errors := raised(function):
        parts.append("Raises:\n\n" + "\n".join(f"- {error}" for error in errors))
    return "\n\n".join(parts)


def methods(functions: Iterable[Callable[..., Any]]) -> str:
    """Several functions, a row each."""
    rows = (
        [
            code(_call(function)),
            first_line(function.__doc__),
            LINE.join(
                f"{code(name)}: {what}" for name, _, what in parameters(function)
            ),
            returned(function) or "nothing",
            LINE.join(raised(function)),
        ]
        for function in functions
    )
    header = ["method", "what it does", "parameters", "returns", "raises"]
    return table(header, rows)


def publisher() -> str:
    """`Publisher(…)`."""
    return described(Publisher.__init__)


def publish() -> str:
    """`Publisher.publish(…)`."""
    return described(Publisher.publish)


def outcome() -> str:
    """The fields of an `Outcome`, and its properties."""
    (tree,) = ast.parse(inspect.getsource(Outcome)).body
    assert isinstance(tree, ast.ClassDef)
    told = {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Outcome)}
    for name, value in vars(Outcome).items():
        if isinstance(value, property) and value.fget is not None:
            kinds[name] = str(inspect.signature(value.fget).return_annotation)
            told[name] = first_line(value.__doc__)
    if silent := kinds.keys() - told.keys():
        raise SystemExit(f"Outcome says nothing of {sorted(silent)}")
    rows = ([code(name), code(kind), told[name]] for name, kind in kinds.items())
    return table(["field", "type", "what it is"], rows)


def client() -> str:
    """`ServerClient(…)`."""
    return described(ServerClient.__init__)


def announce() -> str:
    """`ServerClient.announce(…)`."""
    return described(ServerClient.announce)


def client_methods() -> str:
    """What else a `ServerClient` does."""
    public = (f for name, f in vars(ServerClient).items() if not name.startswith("_"))
    return methods(
        f for f in public if inspect.isfunction(f) and f is not ServerClient.announce
    )


def control_client() -> str:
    """`ControlClient(…)`."""
    return described(ControlClient.__init__)


def control_methods() -> str:
    """What a `ControlClient` asks."""
    public = (f for name, f in vars(ControlClient).items() if not name.startswith("_"))
    return methods(f for f in public if inspect.isfunction(f))


def token_versions() -> str:
    """`per_token_versions(…)`."""
    return described(per_token_versions)


def engine_methods() -> str:
    """What `LLM` and `AsyncLLM` gain."""
    return methods(doors.METHODS)


def _call(function: Any) -> str:
    """`name(needed, optional=None, *, keyword='x')`, as it is called."""
    signature = inspect.signature(function)
    shown = [
        p.replace(annotation=p.empty)
        for name, p in signature.parameters.items()
        if name != "self"
    ]
    plain = signature.replace(parameters=shown, return_annotation=signature.empty)
    return f"{function.__name__}{plain}"
