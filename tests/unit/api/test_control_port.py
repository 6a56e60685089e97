"""The port of the control routes, with a real socket and no engine behind it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from argparse import Namespace
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.certificates import self_signed
from tests.support.ports import free_port
from tests.support.route_stub import Engine, caller
from vllm.inflight.api.request import control_port
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES, InflightEndpoints
from vllm.inflight.errors import ConfigError


def args(number: int, **more: Any) -> Namespace:
    tls = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ciphers")
    plain: dict[str, Any] = {name: None for name in tls} | {"ssl_cert_reqs": 0}
    given = {"additional_config": {"inflight": {"port": number}}, "api_key": None}
    return Namespace(**plain | given | {"disable_uvicorn_access_log": True} | more)


def upstreams() -> str:
    return "upstream's"


upstreams.__module__ = "vllm.entrypoints.rl.online.api_router"


GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/inference/v1/generate", "/generative_scoring", "/invocations"),
)
"""Routes of upstream."""


def attached(given: Namespace) -> tuple[FastAPI, InflightEndpoints]:
    """A server's own application, with upstream's routes: some have our paths."""
    app = FastAPI()
    app.state.args, app.state.engine_client = given, Engine()
    app.add_api_route("/pause", upstreams, methods=["POST"])
    app.add_api_route("/server_info", upstreams, methods=["GET"])
    app.add_api_route("/v1/models", upstreams, methods=["GET"])
    for path in GENERATING:
        app.add_api_route(path, upstreams, methods=["POST"])
    plugin = InflightEndpoints()
    plugin.attach_router(app)
    return app, plugin


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_the_main_port_has_no_control_routes_if_they_have_a_port_of_their_own(route):
    app, _ = attached(args(9000))
    door = caller(app)
    path = route[1].replace("{update_id}", "u")
    assert door.request(route[0], path).status_code == 404


async def asked(
    given: Namespace,
    engine: Engine,
    path: str,
    *,
    method: str = "GET",
    scheme: str = "http",
    trusts: ssl.SSLContext | bool = True,
    **how: Any,
) -> Any:
    """What a server answers at its control port; None if it takes no connection."""
    _, plugin = attached(given)
    await plugin.init_state(engine, None, given)
    number = given.additional_config["inflight"]["port"]
    serving = getattr(plugin, "_serving", None)
    try:
        # Its socket is bound already: who comes before it serves is answered later.
        async with httpx.AsyncClient(timeout=60, verify=trusts) as client:
            with suppress(httpx.ConnectError):
                url = f"{scheme}://127.0.0.1:{number}{path}"
                return await client.request(method, url, **how)
    finally:
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    return None


async def test_control_routes_answer_at_the_control_port():
    reply = await asked(args(free_port()), Engine(), "/weight_info")
    assert reply.json()["weight_version"] == "v"


async def test_control_routes_need_the_key_at_the_control_port():
    given = args(free_port(), api_key=["k"])
    assert (await asked(given, Engine(), "/weight_info")).status_code == 401
    headers = {"Authorization": "Bearer k"}
    reply = await asked(given, Engine(), "/weight_info", headers=headers)
    assert reply.status_code == 200


async def test_the_servers_certificate_is_that_of_the_control_port_too(tmp_path):
    certificate, key = self_signed(tmp_path)
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    trusts = ssl.create_default_context(cafile=str(certificate))
    given = args(free_port(), **tls)
    reply = await asked(given, Engine(), "/weight_info", scheme="https", trusts=trusts)
    assert reply.json()["weight_version"] == "v"
    # Who does not know the certificate sees no server, and nothing is told in clear.
    given = args(free_port(), **tls)
    assert await asked(given, Engine(), "/weight_info", scheme="https") is None
    with pytest.raises(httpx.RemoteProtocolError):
        await asked(args(free_port(), **tls), Engine(), "/weight_info")


@pytest.mark.parametrize(("bits", "is_answered"), [("256", True), ("128", False)])
async def test_the_control_port_uses_the_ciphers_of_the_server(
    tmp_path, bits, is_answered
):
    certificate, key = self_signed(tmp_path)
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    trusts = ssl.create_default_context(cafile=str(certificate))
    trusts.maximum_version = ssl.TLSVersion.TLSv1_2  # later ones have their own
    trusts.set_ciphers(f"ECDHE+AES{bits}")
    given = args(free_port(), **tls, ssl_ciphers="ECDHE+AES256")
    reply = await asked(given, Engine(), "/weight_info", scheme="https", trusts=trusts)
    assert (reply is not None) is is_answered


async def test_the_control_port_does_not_list_models():
    reply = await asked(args(free_port()), Engine(), "/v1/models")
    assert reply.status_code == 404


@pytest.mark.parametrize("path", GENERATING)
async def test_generating_routes_answer_at_the_main_port_only(path):
    given = args(free_port())
    app, _ = attached(given)
    assert caller(app).post(path).json() == upstreams()
    reply = await asked(given, Engine(), path, method="POST")
    assert reply.status_code == 404


@pytest.mark.parametrize("route", ROLLOUT_ROUTES, ids=" ".join)
async def test_rollout_routes_answer_at_the_main_port_only(route):
    given = args(free_port(), api_key=["k"])
    app, _ = attached(given)
    status = 503 if route[1] == "/health_generate" else 401
    engine = app.state.engine_client
    engine.check_health = died
    assert caller(app).request(*route).status_code == status
    reply = await asked(given, Engine(), route[1], method=route[0])
    assert reply.status_code == 404


async def died() -> None:
    """As the engine of a server does whose core has ended."""
    raise EngineDeadError


async def test_only_the_first_of_several_api_servers_opens_the_control_port():
    engine = Engine()
    engine.client_index = 1  # type: ignore[attr-defined]
    assert await asked(args(free_port()), engine, "/weight_info") is None
    engine.client_index = 0  # type: ignore[attr-defined]
    assert await asked(args(free_port()), engine, "/weight_info") is not None


def test_a_control_port_that_is_taken_is_a_configuration_error():
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match="--inflight-port"),
    ):
        control_port.bind("127.0.0.1", other.getsockname()[1])
    with pytest.raises(ConfigError, match="no-such-host"):
        control_port.bind("no-such-host.invalid", 1)
