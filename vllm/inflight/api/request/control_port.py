"""The control port: a separate port for the control routes (`--inflight-port`).

It is served in the process and event loop of vLLM's own port, for the same engine. So a
firewall or a proxy can separate control calls from requests for tokens.
"""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace

import uvicorn
from fastapi import FastAPI

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig, with_environment
from vllm.inflight.errors import ConfigError

logger = upstream.init_logger(__name__)


def config_of(args: Namespace) -> InflightConfig:
    """The configuration from the flags of a server, before there is an engine."""
    extra = with_environment(getattr(args, "additional_config", None)) or {}
    return InflightConfig.parse(extra.get("inflight"))


def is_first(engine: upstream.EngineClient) -> bool:
    """Whether this is the first of the API servers of its engine."""
    return getattr(engine.engine_core, "client_index", 0) == 0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on a port; raises `ConfigError` if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--inflight-port {port} cannot be opened on {host}: {error}"
        ) from None


def serve(app: FastAPI, listener: socket.socket, args: Namespace) -> asyncio.Task[None]:
    """Serve the control port until the event loop ends, with vLLM's TLS files."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,  # vLLM's own server sets uvicorn's loggers up
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
    )
    host, port = listener.getsockname()[:2]
    logger.info("control routes answer on %s port %d only", host, port)
    server = upstream.NoSignalServer(config)

    async def until_the_end() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            for each in getattr(server, "servers", ()):
                each.close()
            listener.close()

    return asyncio.get_running_loop().create_task(until_the_end())
