"""Engines that the tests of a module share: in any order, a test finds its own alive.

One engine at a time fits a process. So a test that starts its own ends the one that a
fixture of the module holds, and the next test that shares it has to have it anew.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import pytest

ENDED: WeakSet[Any] = WeakSet()
"""The engines that have been ended so that another one could start."""
START = "start"
"""The fixture that starts engines; see tests/e2e/conftest.py."""

Definitions = Mapping[str, Sequence[Any]]
"""Of the fixtures of a test; of several with one name the last one counts."""


def renew(item: pytest.Item) -> None:
    """Have fixtures made anew whose engine has ended, before a test gets them."""
    for name in fixtures_of(item):
        for definition in fixtures_of(item)[name]:
            if definition.cached_result and holds_ended(definition.cached_result[0]):
                definition.finish(item._request)  # and whatever was made of it


def holds_ended(value: Any) -> bool:
    """Whether a fixture is an engine that has ended, or a tuple with one."""
    parts = value if isinstance(value, tuple) else (value,)
    return any(any(part is each for each in ENDED) for part in parts)


def require_one(items: Iterable[pytest.Item]) -> None:
    """Raise `UsageError` if two fixtures of a test start an engine, in no fixed order.

    One of them has to ask for the other one. Otherwise it depends on the tests before
    which of the two engines is alive in the test.
    """
    for item in items:
        found = fixtures_of(item)
        starting = [name for name in found if START in asked_for(found, name)]
        for name in starting:
            needed = set(needs(found, name))
            apart = set(starting) - needed - {name}
            if apart := {one for one in apart if name not in needs(found, one)}:
                raise pytest.UsageError(
                    f"{item.nodeid}: its fixtures {name} and "
                    f"{', '.join(sorted(apart))} start an engine each, and neither "
                    "asks for the other one: let one of them do so. Else it depends on "
                    "the tests before which engine is alive"
                )


def needs(found: Definitions, name: str) -> Iterator[str]:
    """The fixtures that a fixture asks for, and those that they ask for."""
    for asked in asked_for(found, name):
        yield asked
        yield from needs(found, asked) if asked != name else ()


def asked_for(found: Definitions, name: str) -> Sequence[str]:
    """The fixtures that a fixture asks for itself."""
    names: Sequence[str] = found[name][-1].argnames if found.get(name) else ()
    return names


def fixtures_of(item: pytest.Item) -> Definitions:
    """The definitions of the fixtures that a test uses."""
    info = getattr(item, "_fixtureinfo", None)
    return {} if info is None else info.name2fixturedefs
