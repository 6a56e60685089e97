"""Routes that a framework adds to vLLM's application, on paths that are ours as well.

prime-rl, PipelineRL, SkyRL and others build vLLM's application and then add routes of
their own to it, and their trainers call these. FastAPI answers with the first route
that matches, and ours are there first. So a route of ours steps back from a request
that a route of somebody else's answers too, whenever that one was added. What its
handler then calls of the engine goes through our methods.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match

from vllm.inflight import upstream
from vllm.inflight.attached import AttachedOnDemand

logger = upstream.init_logger(__name__)


@dataclass(slots=True)
class HiddenRoutes(AttachedOnDemand):
    """The routes of ours in one application that others hide."""

    told: set[tuple[str, str]] = field(default_factory=set)
    """(method, path) of those that were logged."""


class DeferringRoute(APIRoute):
    """A route of ours: it answers what no route of somebody else's answers."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        """As Starlette asks; no match where somebody else has this path and method."""
        match, child = super().matches(scope)
        if match is Match.FULL and (app := scope.get("app")) is not None:
            method = scope["method"]
            if (module := owner(app, method, self.path_format)) is not None:
                tell(app, method, self.path_format, module)
                return Match.NONE, {}
        return match, child


def owner(app: FastAPI, method: str, path: str) -> str | None:
    """The module that has a route of this path and method; None if only we have one.

    Upstream's routes are nobody's in this sense: ours replace them.
    """
    for route in app.routes:
        if (
            _template(getattr(route, "path_format", "")) == _template(path)
            and method in (getattr(route, "methods", None) or ())
            and is_foreign(route)
        ):
            return str(module_of(route))
    return None


def _template(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub("{[^}]*}", "{}", path)


def is_foreign(route: BaseRoute) -> bool:
    """Whether a route is neither upstream's nor ours."""
    module = module_of(route)
    return module is not None and module.partition(".")[0] != "vllm"


def module_of(route: BaseRoute) -> str | None:
    """Where the handler of a route is written; None if it has none."""
    return getattr(getattr(route, "endpoint", None), "__module__", None)


def tell(app: FastAPI, method: str, path: str, module: str) -> None:
    """Log once that a route of ours has stepped back."""
    told = HiddenRoutes.of(app).told
    if (method, path) not in told:
        told.add((method, path))
        logger.warning(
            "%s %s is answered by %s, which has added a route of that path. The "
            "control route of vllm-inflight is hidden by it, with its check of the "
            "key; --inflight-port serves the control routes on a port of their own",
            method,
            path,
            module,
        )
