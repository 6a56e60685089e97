"""The routes of a plugin, which take the place of upstream's routes.

FastAPI uses the first route that matches, and a plugin adds its routes last. From 0.32
on, upstream itself moves them to the place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


def in_place(
    routes: Sequence[BaseRoute], earlier: Sequence[BaseRoute]
) -> list[BaseRoute]:
    """The routes of an application, with the added ones in place of `earlier` ones.

    An added route takes the place of the first one that has its path and a method of
    it, so no mount in between hides it. Those that it hides are left out.
    """
    known = {id(route) for route in earlier}
    placed: list[BaseRoute] = []
    for route in routes:
        place = len(placed)
        if id(route) not in known and isinstance(route, APIRoute):
            alike = (n for n, each in enumerate(placed) if _shared(each, route))
            place = next(alike, place)
            placed = [each for each in placed if not _is_hidden(each, route)]
        placed.insert(place, route)
    return placed


def _shared(route: BaseRoute, other: APIRoute) -> set[str]:
    """The methods that two routes of one path have in common."""
    if not isinstance(route, APIRoute) or route.path != other.path:
        return set()
    return route.methods & other.methods


def _is_hidden(route: BaseRoute, other: APIRoute) -> bool:
    """Whether `other` in front of it leaves a route no request."""
    shared = _shared(route, other)
    return bool(shared) and isinstance(route, APIRoute) and route.methods == shared
