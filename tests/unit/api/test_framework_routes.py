"""Routes of frameworks on paths that are ours as well."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.endpoints import HTTPEndpoint

from tests.support.route_stub import Engine, caller, served
from vllm.inflight.api.compat import framework_routes
from vllm.inflight.api.server.routes import InflightEndpoints, check_routing
from vllm.inflight.errors import UpstreamChanged

THEIRS = {"status": "theirs"}


def theirs() -> dict[str, str]:
    return THEIRS


def upstreams() -> str:
    return "upstream's"


upstreams.__module__ = "vllm.entrypoints.rl.online.api_router"


def router() -> APIRouter:
    made = APIRouter()
    for path in ("/update_weights", "/pause", "/own"):
        made.add_api_route(path, theirs, methods=["POST"])
    return made


def test_a_route_that_is_added_later_answers_in_our_place() -> None:
    engine = Engine()
    app = served(engine)
    app.include_router(router())
    check_routing(app)
    door = caller(app)
    assert door.post("/update_weights", json={"weight_dir": "/w"}).json() == THEIRS
    assert door.post("/pause?mode=keep&clear_cache=false").json() == THEIRS
    assert engine.asked == []
    assert door.post("/resume").json()["status"] == "resumed"
    assert engine.asked == ["resume"]


def test_a_framework_route_that_is_added_later_answers_too() -> None:
    app = served(Engine())
    door = caller(app)
    assert door.post("/pause").json()["status"] == "paused"
    app.add_api_route("/pause", theirs, methods=["POST"])
    assert door.post("/pause").json() == THEIRS


def test_other_methods_on_a_frameworks_path_stay_our_routes() -> None:
    app = served(Engine())
    app.add_api_route("/flush_cache", theirs, methods=["GET"])
    door = caller(app)
    assert door.get("/flush_cache").json() == THEIRS
    assert door.post("/flush_cache").json()["success"] is True


class Theirs(HTTPEndpoint):
    """A handler that is a class, with one method."""

    async def post(self, _: Request) -> JSONResponse:
        return JSONResponse(THEIRS)


def test_a_class_as_the_handler_answers_the_methods_that_it_has() -> None:
    app = served(Engine())
    app.add_route("/pause", Theirs)
    app.add_route("/weight_info", Theirs)
    door = caller(app)
    assert door.post("/pause").json() == THEIRS
    assert "weight_version" in door.get("/weight_info").json()


def test_a_websocket_of_a_path_of_ours_hides_no_route() -> None:
    app = served(Engine())
    app.add_api_websocket_route("/pause", theirs)
    assert caller(app).post("/pause").json()["status"] == "paused"


def test_a_path_with_an_id_is_the_same_path_whatever_the_id_is_called() -> None:
    app = served(Engine())
    app.add_api_route("/weight_update/{number}", theirs, methods=["GET"])
    assert caller(app).get("/weight_update/7").json() == THEIRS


def test_a_plugin_that_was_there_first_keeps_its_routes() -> None:
    app = FastAPI()
    app.state.args, app.state.engine_client = Namespace(api_key=None), Engine()
    app.include_router(router())
    InflightEndpoints().attach_router(app)
    paths = [getattr(route, "path", None) for route in app.routes]
    # Of two upstream would take the first for replaced.
    assert (paths.count("/update_weights"), paths.count("/resume")) == (1, 1)
    assert caller(app).post("/update_weights").json() == THEIRS


def test_the_main_port_keeps_framework_routes_beside_a_control_port() -> None:
    app = FastAPI()
    config = {"inflight": {"port": 9000}}
    app.state.args = Namespace(additional_config=config, api_key=None)
    app.add_api_route("/pause", theirs, methods=["POST"])
    app.add_api_route("/resume", upstreams, methods=["POST"])
    InflightEndpoints().attach_router(app)
    door = caller(app)
    assert door.post("/pause").json() == THEIRS
    assert door.post("/resume").status_code == 404


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_the_log_names_path_and_module_once(is_asked_first: bool) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore
    app = served(Engine())
    app.include_router(router())
    framework_routes.logger.addHandler(handler)
    try:
        for is_asked in (is_asked_first, not is_asked_first, True):
            if is_asked:
                caller(app).post("/pause")
            else:
                check_routing(app)
    finally:
        framework_routes.logger.removeHandler(handler)
    (line,) = [text for text in told if text.startswith("POST /pause ")]
    assert f"is answered by {__name__}" in line


def test_a_route_of_upstreams_in_front_of_ours_is_still_a_fault() -> None:
    app = FastAPI()
    app.state.args, app.state.engine_client = Namespace(api_key=None), Engine()
    app.add_api_route("/pause", upstreams, methods=["POST"])
    plugin: Any = InflightEndpoints()
    plugin.attach_router(app)
    with pytest.raises(UpstreamChanged, match="POST /pause"):
        check_routing(app)
