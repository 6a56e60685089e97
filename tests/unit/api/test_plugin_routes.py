"""The routes of a plugin take the place of earlier ones of the same path and method."""

from collections.abc import Callable

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Mount

from vllm.inflight.api.server.plugin_routes import in_place


def says(word: str) -> Callable[[], str]:
    return lambda: word


@pytest.fixture
def app() -> FastAPI:
    """Routes of upstream, and after them those of a plugin, as both are added."""
    app = FastAPI()
    app.add_api_route("/pause", says("upstream"), methods=["POST"])
    app.add_api_route("/both", says("upstream"), methods=["GET", "POST"])
    app.add_api_route("/metrics", says("upstream"), methods=["GET"])
    app.routes.append(Mount("/metrics", FastAPI()))
    app.add_api_route("/models", says("upstream"), methods=["GET"])
    earlier = list(app.routes)
    router = APIRouter()
    router.add_api_route("/pause", says("plugin"), methods=["POST"])
    router.add_api_route("/pause", says("plugin"), methods=["GET"])
    router.add_api_route("/both", says("plugin"), methods=["GET"])
    router.add_api_route("/metrics", says("plugin"), methods=["GET"])
    router.add_api_route("/own", says("plugin"), methods=["GET"])
    app.include_router(router)
    app.routes.append(Mount("/static", FastAPI()))
    app.router.routes[:] = in_place(app.routes, earlier)
    return app


@pytest.mark.parametrize(
    "method, path, by",
    [
        ("POST", "/pause", "plugin"),
        ("GET", "/pause", "plugin"),
        ("GET", "/both", "plugin"),
        ("POST", "/both", "upstream"),
        ("GET", "/metrics", "plugin"),
        ("GET", "/models", "upstream"),
        ("GET", "/own", "plugin"),
    ],
)
def test_a_plugin_answers_on_its_paths_with_its_methods(
    app: FastAPI, method: str, path: str, by: str
) -> None:
    assert TestClient(app).request(method, path).json() == by


def test_a_route_that_no_request_reaches_is_left_out(app: FastAPI) -> None:
    paths = [getattr(route, "path", None) for route in app.routes]
    ours = [path for path in paths if path in ("/pause", "/metrics", "/static")]
    assert ours == ["/pause", "/metrics", "/metrics", "/pause", "/static"]
    assert paths.count("/both") == 2
