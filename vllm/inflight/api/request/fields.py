"""The fields of a request: each is taken once, and what is left over is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from vllm.inflight.api.request.schema import OPENING, Schema
from vllm.inflight.errors import Malformed
from vllm.inflight.release_fields import ReleaseField, settled

Default = TypeVar("Default", bool, None)
Text = TypeVar("Text", str, None)

FLAGS = {"true": True, "1": True, "false": False, "0": False}
"""How a query parameter says a flag."""
WORDS = FLAGS | {
    **dict.fromkeys(("yes", "y", "on", "t"), True),
    **dict.fromkeys(("no", "n", "off", "f"), False),
}
"""How it says one of upstream's, which reads more words."""


class Fields:
    """One request's body; a field that is null counts as left out."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str) -> Any:
        """Its value; None if it is not there."""
        self._known.append(name)
        return self._left.pop(name, None)

    def needed(self, name: str) -> Any:
        """Its value, which has to be there."""
        value = self.take(name)
        if value is None:
            raise Malformed(f"the body needs the field {name!r}")
        return value

    def flag(
        self, name: str, default: Default, words: Mapping[str, bool] = FLAGS
    ) -> bool | Default:
        """`true` or `false`; a query parameter says it as one of `words`."""
        value = self.take(name)
        if isinstance(value, str):
            value = words.get(value.lower(), value)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise Malformed(f"{name} must be true or false, got {value!r}")
        return value

    def word(self, name: str, default: Default) -> bool | Default:
        """A flag of one of upstream's own routes."""
        return self.flag(name, default, WORDS)

    def text(self, name: str, default: Text) -> str | Text:
        """A string."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise Malformed(f"{name} must be a string, got {value!r}")
        return value

    def number(self, name: str, default: float) -> Any:
        """A number."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{name} must be a number, got {value!r}")
        return value

    def one_of(self, name: str, choices: Sequence[str | None]) -> str | None:
        """One of these strings, or left out."""
        value = self.take(name)
        if value not in choices:
            named = ", ".join(repr(choice) for choice in choices if choice)
            raise Malformed(f"{name} {value!r} is not supported; it can be {named}")
        return value

    def settle(self, table: Mapping[str, ReleaseField]) -> None:
        """Take the fields of other releases of vLLM; see release_fields.py."""
        self._left = settled(self._left, table)

    def default(self, name: str, value: object) -> None:
        """Say it for the caller, who has not."""
        self._left.setdefault(name, value)

    def only(self, *names: str) -> dict[str, Any]:
        """Those of `names` that are there; raises if anything else is left."""
        known = dict.fromkeys([*self._known, *names])
        for name in self._left:
            if name not in known:
                named = ", ".join(known) or "none"
                raise Malformed(f"unknown field {name!r}; this route takes {named}")
        return dict(self._left)

    def described(self, schemas: Mapping[str, Schema], *names: str) -> dict[str, Any]:
        """`only` of `schemas` and `names`; what is a flag by its schema is read as one.

        What else they may be is the engine's to say.
        """
        flags = {
            name: value
            for name, schema in schemas.items()
            if schema.get("type") == "boolean"
            and (value := self.flag(name, None)) is not None
        }
        return self.only(*schemas, *names) | flags


def opening(options: dict[str, Any], *others: str) -> dict[str, Any]:
    """`options` of a method that opens an update, if it knows all of them.

    With a slip in its name `base_version` would guard nothing, and nobody would see it.

    Raises:
        Malformed: one is none of those of `/start_weight_update`, nor of `others`.

    """
    for name in options:
        if name not in OPENING and name not in others:
            named = ", ".join([*OPENING, *others])
            raise Malformed(f"unknown option {name!r}; this method takes {named}")
    return options
