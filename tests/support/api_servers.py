"""The API servers of one `vllm serve`, each spoken to by name.

They accept from one socket, so who answers is a matter of chance. Here the others stand
still while a connection is opened, and it is kept.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from tests.support.serving import Server

KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
"""For the environment of the server: it would close connections that idle for 5 s."""


class ApiServer:
    """One API server."""

    connecting = threading.Lock()
    """Two that stopped each other would wait for each other."""

    def __init__(self, url: str, others: list[psutil.Process]) -> None:
        self._url = url
        self._others = others
        self._idle: list[tuple[httpx.Client, int]] = []
        """Clients that nobody uses now, and the port that each comes from."""

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """What this API server replies; may be called from several threads."""
        client, port = self._idle.pop() if self._idle else self._connect()
        reply = client.request(method, path, json=body)
        assert port_of(reply) == port, "the connection was not kept"
        self._idle.append((client, port))
        return reply

    def get(self, path: str) -> Any:
        """The decoded reply to a GET."""
        return self.request("GET", path).json()

    def post(self, path: str, /, **body: Any) -> Any:
        """The decoded reply to a POST, whatever its status."""
        return self.request("POST", path, body).json()

    def close(self) -> None:
        """Close all connections."""
        for client, _ in self._idle:
            client.close()

    def _connect(self) -> tuple[httpx.Client, int]:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        client = httpx.Client(base_url=self._url, timeout=120, limits=limits)
        with self.connecting:
            for other in self._others:
                other.suspend()
            try:
                return client, port_of(client.get("/version"))
            finally:
                for other in self._others:
                    other.resume()


def port_of(reply: httpx.Response) -> int:
    """The port on our side of the connection that a reply came over."""
    port: int = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
    return port


@contextmanager
def api_servers(server: Server) -> Iterator[list[ApiServer]]:
    """All of them, in their order, for the length of a `with`."""
    named = dict(re.findall(r"\((ApiServer_\d+) pid=(\d+)\)", server.log()))
    processes = [psutil.Process(int(named[name])) for name in sorted(named)]
    found = [
        ApiServer(server.url, [p for p in processes if p != own]) for own in processes
    ]
    try:
        yield found
    finally:
        for each in found:
            each.close()
