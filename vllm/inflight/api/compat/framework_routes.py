"""Framework routes on paths that the control routes use too.

prime-rl, PipelineRL, SkyRL and others build vLLM's application and then add their own
routes, which their trainers call. FastAPI uses the first route that matches, and the
control routes come first. So a control route does not match a request that a
framework's route answers, even if that route was added later. The framework's handler
calls the engine's methods, which are patched.
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
    """A control route that gives way to a framework's route of the same path."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, Any]:
        """Match as Starlette does, unless a framework has this path and method."""
        match, child = super().matches(scope)
        if match is Match.FULL and (app := scope.get("app")) is not None:
            method = scope["method"]
            if (module := owner(app, method, self.path_format)) is not None:
                tell(app, method, self.path_format, module)
                return Match.NONE, {}
        return match, child


def owner(app: FastAPI, method: str, path: str) -> str | None:
    """The module of a framework's route of this path and method; None without one.

    Upstream's routes do not count, because the control routes replace them.
    """
    for route in app.routes:
        if (
            _template(getattr(route, "path_format", "")) == _template(path)
            and _takes(route, method)
            and is_foreign(route)
        ):
            return str(module_of(route))
    return None


def _template(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub("{[^}]*}", "{}", path)


def _takes(route: BaseRoute, method: str) -> bool:
    """Whether a route takes a method; a class as the handler takes each it has."""
    methods = getattr(route, "methods", ())
    if methods is None:
        return hasattr(getattr(route, "endpoint", None), method.lower())
    return method in methods


def is_foreign(route: BaseRoute) -> bool:
    """Whether a route is neither upstream's nor ours."""
    module = module_of(route)
    return module is not None and module.partition(".")[0] != "vllm"


def module_of(route: BaseRoute) -> str | None:
    """The module of a route's handler; None if the route has no handler."""
    return getattr(getattr(route, "endpoint", None), "__module__", None)


def tell(app: FastAPI, method: str, path: str, module: str) -> None:
    """Log once that a framework's route hides a control route."""
    told = HiddenRoutes.of(app).told
    if (method, path) not in told:
        told.add((method, path))
        logger.warning(
            "%s %s is answered by %s, which has added a route of that path. That "
            "route hides the control route of vllm-inflight and its check of the API "
            "key. --inflight-port serves the control routes on a separate port",
            method,
            path,
            module,
        )
