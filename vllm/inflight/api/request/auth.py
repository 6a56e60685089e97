"""Who may call a control route.

A server with an admin key accepts callers with that key. A server with an API key alone
accepts callers with the API key. A server without keys accepts only direct callers on
its own host.

A direct caller connects from the loopback address, speaks HTTP/1.1, sends only headers
that clients make themselves, and calls the server by a name of this host. Each of these
four rules is a list of allowed values. A list of forbidden headers would never be
complete: proxies, meshes and CDNs add new ones every year. The same lists reject pages
in a browser on this host (CSRF, DNS rebinding), for GET as for POST.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable
from typing import Protocol

from fastapi import Request
from starlette.datastructures import Address

from vllm.inflight.config import API_KEY_ENV, admin_key, check_key
from vllm.inflight.errors import Forbidden, Unauthorized

REMEDY = (
    "set --inflight-admin-key (or --api-key) on the server and send that key as "
    "'Authorization: Bearer <key>'"
)

LOOPBACK = frozenset({ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")})
"""Peer addresses of a direct caller. Linux chooses 127.0.0.1 for a caller of any
loopback address. The sidecar of a service mesh connects from another one: Istio's from
127.0.0.6.
"""

HTTP_VERSION = "1.1"
"""The version that clients speak. By default nginx speaks 1.0 to a server."""

HEADERS = frozenset(
    {
        # HTTP libraries and tools: curl, httpx, requests, aiohttp, urllib3, Go, Java …
        "host",
        "user-agent",
        "accept",
        "accept-charset",
        "accept-encoding",
        "accept-language",
        "authorization",
        "cache-control",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "http2-settings",
        "keep-alive",
        "pragma",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "sec-fetch-mode",  # node's fetch sends it, and no other header of this kind
        # OpenAI's clients
        "idempotency-key",
        "openai-organization",
        "openai-project",
        # Tracing adds these in the client's own process.
        "baggage",
        "sentry-trace",
        "traceparent",
        "tracestate",
    }
)
"""Headers that a client makes by itself, in lower case.

The list leaves out headers of browsers (`cookie`, `referer`, `origin`,
`sec-fetch-site`), and headers that proxies and meshes also add (`x-request-id`,
`x-b3-*`).
"""

HEADERS_OF_OPENAI = "x-stainless-"
"""Prefix of the headers in which OpenAI's clients name their platform."""

BROWSER = "mozilla/"
"""Prefix of the `User-Agent` of every browser; a page cannot change it."""

NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
"""Names of the loopback address in `/etc/hosts`; DNS cannot redirect them."""


class Arguments(Protocol):
    """The parsed flags of a server, as far as they name keys."""

    api_key: list[str] | None


def authorize(request: Request) -> str:
    """The caller of `request`: the hash of its key, or its address.

    Raises:
        Unauthorized: it needs a key and has none.
        Forbidden: it may not control the engine.

    """
    keys = control_keys(request.app.state.args)
    if keys:
        return _check_key(request.headers.get("authorization"), keys).hex()
    if (why := _indirect(request)) is not None:
        raise Forbidden(
            "without a key the control routes answer direct callers on this host only, "
            f"and {why}; {REMEDY}"
        )
    assert request.client is not None
    return str(request.client.host)


def authorize_rollout(request: Request) -> None:
    """Check the key of a request for tokens: that of `--api-key`, if there is one.

    Upstream checks it on paths below `/v1` and a few others alone.

    Raises:
        Unauthorized: it needs a key and has none.
        Forbidden: its key is another one.

    """
    if keys := _api_keys(request.app.state.args):
        _check_key(request.headers.get("authorization"), keys)


def control_keys(args: Arguments) -> list[str]:
    """The keys that open the control routes; none means direct callers only."""
    if (key := admin_key()) is not None:
        return [key]
    return _api_keys(args)


def _api_keys(args: Arguments) -> list[str]:
    """The keys that open vLLM's own routes."""
    configured = getattr(args, "api_key", None) or [os.environ.get(API_KEY_ENV)]
    return [key for key in configured if key]


def check_api_keys(keys: Iterable[str | None] | None) -> None:
    """Reject keys of `--api-key` that no client can send.

    vLLM drops empty keys. Without any key left it asks for none.

    Raises:
        ConfigError: a key is blank, or has blanks around it.

    """
    for key in keys or ():
        check_key("--api-key", key or "")  # vLLM's parser turns an empty key into None


def _check_key(header: str | None, keys: list[str]) -> bytes:
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("this route needs 'Authorization: Bearer <key>'")
    sent = _hashed(token.encode("latin-1"))  # as ASGI servers decode headers
    # Every key is compared, so that the time taken tells nothing.
    if not any([secrets.compare_digest(sent, _hashed(os.fsencode(k))) for k in keys]):
        raise Forbidden("this key does not open this route")
    return sent


def _hashed(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _indirect(request: Request) -> str | None:
    """Why `request` may not come from a direct caller on this host; None if it does."""
    headers = request.headers
    for name in headers:
        if name not in HEADERS and not name.startswith(HEADERS_OF_OPENAI):
            return (
                f"this request has the header {name!r:.100}, which a proxy or a "
                "browser may have added: leave it out"
            )
    if not _is_loopback(request.client):
        return "this request does not come from 127.0.0.1 or ::1"
    if (spoken := request.scope.get("http_version", HTTP_VERSION)) != HTTP_VERSION:
        return f"this request is one of HTTP/{spoken}, which proxies speak: use 1.1"
    if any(
        agent.lower().startswith(BROWSER) for agent in headers.getlist("user-agent")
    ):
        return "this request was sent by a browser, according to its 'user-agent'"
    for host in headers.getlist("host"):
        if not _is_this_host(host):
            return (
                f"this request calls the server {host!r:.300}, a name that may lead "
                "here from elsewhere: call it 127.0.0.1 or localhost"
            )
    return None


def _is_loopback(client: Address | None) -> bool:
    """Whether the peer is one of `LOOPBACK`. On a Unix socket there is no peer."""
    if client is None:
        return False
    try:
        address = ipaddress.ip_address(client.host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address) in LOOPBACK


def _is_this_host(host: str) -> bool:
    """Whether the value of a `Host` header names this host, and can name no other."""
    name = host.lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    else:
        name = name.partition(":")[0]
    if name in ("", *NAMES, socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(".localhost")
    # 0.0.0.0 is what some trainers' clients call this host by default.
    return address.is_loopback or address.is_unspecified
