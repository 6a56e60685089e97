"""The fields of a request: handlers take them, and fields that remain are unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from vllm.inflight.api.request.schema import OPENING, Schema
from vllm.inflight.errors import Malformed
from vllm.inflight.releases.fields import ReleaseField, settled
from vllm.inflight.wording import nearest

Default = TypeVar("Default", bool, None)
Text = TypeVar("Text", str, None)

FLAGS = {"true": True, "1": True, "false": False, "0": False}
"""The values of a flag as a query parameter."""
WORDS = FLAGS | {
    **dict.fromkeys(("yes", "y", "on", "t"), True),
    **dict.fromkeys(("no", "n", "off", "f"), False),
}
"""The values of a flag of upstream's routes, which accept more words."""


class Fields:
    """The body of one request, or an object in it; a null field counts as left out."""

    def __init__(self, body: dict[str, Any], owner: str = "this route") -> None:
        self._owner = owner
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str) -> Any:
        """Take a field; None if it is missing."""
        self._known.append(name)
        return self._left.pop(name, None)

    def needed(self, name: str) -> Any:
        """Take a field; raises `Malformed` if it is missing."""
        value = self.take(name)
        if value is None:
            raise Malformed(f"the body needs the field {name!r}")
        return value

    def flag(
        self, name: str, default: Default, words: Mapping[str, bool] = FLAGS
    ) -> bool | Default:
        """Take a boolean; a query parameter may be one of `words`."""
        value = self.take(name)
        if isinstance(value, str):
            value = words.get(value.lower(), value)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise Malformed(f"{name} must be true or false, got {value!r}")
        return value

    def word(self, name: str, default: Default) -> bool | Default:
        """Take a boolean of one of upstream's own routes."""
        return self.flag(name, default, WORDS)

    def text(self, name: str, default: Text) -> str | Text:
        """Take a string."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise Malformed(f"{name} must be a string, got {value!r}")
        return value

    def number(self, name: str, default: float) -> Any:
        """Take a number."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{name} must be a number, got {value!r}")
        return value

    def one_of(self, name: str, choices: Sequence[str | None]) -> str | None:
        """Take one of `choices`; None in `choices` allows a missing field."""
        value = self.take(name)
        if value not in choices:
            named = ", ".join(repr(choice) for choice in choices if choice)
            raise Malformed(f"{name} {value!r} is not supported; it can be {named}")
        return value

    def settle(self, table: Mapping[str, ReleaseField]) -> None:
        """Take the fields of other releases of vLLM; see releases/fields.py."""
        self._left = settled(self._left, table)

    def default(self, name: str, value: object) -> None:
        """Set a field that the caller has left out."""
        self._left.setdefault(name, value)

    def only(self, *names: str) -> dict[str, Any]:
        """Take the fields `names`; raises `Malformed` if others remain."""
        known = dict.fromkeys([*self._known, *names])
        for name in self._left:
            if name not in known:
                named = ", ".join(known) or "none"
                raise Malformed(
                    f"unknown field {name!r}{nearest(name, known)}; {self._owner} "
                    f"takes {named}"
                )
        return dict(self._left)

    def described(self, schemas: Mapping[str, Schema], *names: str) -> dict[str, Any]:
        """Take the fields of `schemas` and `names`; raises if others remain.

        Only booleans are checked here. The engine checks the other values.
        """
        flags = {
            name: value
            for name, schema in schemas.items()
            if schema.get("type") == "boolean"
            and (value := self.flag(name, None)) is not None
        }
        return self.only(*schemas, *names) | flags


def fields_of(
    name: str,
    value: object,
    schemas: Mapping[str, Schema],
    table: Mapping[str, ReleaseField] = MappingProxyType({}),
) -> dict[str, Any]:
    """The fields of the object `name` within a request; `table` as for `settle`.

    Raises:
        Malformed: it is no object, or one of its fields is unknown or malformed.

    """
    if not isinstance(value, dict):
        raise Malformed(f"{name} must be an object, got {value!r:.80}")
    fields = Fields(value, name)
    fields.settle(table)
    return fields.described(schemas)


def one_value(name: str, *given: object) -> Any:
    """The value of a field that a request may give in several places; None without one.

    Raises:
        Malformed: the places give different values.

    """
    values = [value for value in given if value is not None]
    for value in values[1:]:
        if value != values[0]:
            raise Malformed(
                f"{name} is given twice, as {values[0]!r:.80} and as {value!r:.80}"
            )
    return values[0] if values else None


def opening(options: dict[str, Any], *others: str) -> dict[str, Any]:
    """Check the names of the options of a method that opens an update.

    A misspelt `base_version` would otherwise be ignored without an error.

    Raises:
        Malformed: an option is neither one of `/start_weight_update` nor in `others`.

    """
    for name in options:
        if name not in OPENING and name not in others:
            known = [*OPENING, *others]
            raise Malformed(
                f"unknown option {name!r}{nearest(name, known)}; this method takes "
                f"{', '.join(known)}"
            )
    return options
