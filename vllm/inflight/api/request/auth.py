"""Who may call a control route: never open by accident.

With an admin key, whoever has it; else with an API key, whoever has that; with
neither, only a direct caller on the server's own host.

A direct caller connects from the loopback address, speaks HTTP/1.1, sends only headers
that clients make themselves, and calls the server by a name of this host. All four are
lists of what is allowed. Proxies, meshes and CDNs add headers of their own, and new
ones every year, so a list of those would never be complete. The same lists keep out
pages in a browser on this host, for GET as for POST.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from typing import Any

from vllm.inflight.config import API_KEY_ENV, admin_key, check_key
from vllm.inflight.errors import Forbidden, Unauthorized

REMEDY = (
    "set --inflight-admin-key (or --api-key) on the server and send that key as "
    "'Authorization: Bearer <key>'"
)

LOOPBACK = frozenset({ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")})
"""Peers that a direct caller has. Linux chooses 127.0.0.1 for a caller of any loopback
address; a service mesh's sidecar connects from another one, as Istio's from 127.0.0.6.
"""

HTTP_VERSION = "1.1"
"""Clients of today speak it; nginx speaks 1.0 to a server unless it is told not to."""

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
        "sec-fetch-mode",  # of node's fetch, which sends no other header of this kind
        # Clients of OpenAI's.
        "idempotency-key",
        "openai-organization",
        "openai-project",
        # What tracing adds to a client's requests in the client's own process.
        "baggage",
        "sentry-trace",
        "traceparent",
        "tracestate",
    }
)
"""Headers that a client makes by itself, in lower case.

Left out on purpose: `cookie`, `referer`, `origin` and `sec-fetch-site` come from
browsers, `x-request-id` and `x-b3-*` from proxies and meshes too.
"""

HEADERS_OF_OPENAI = "x-stainless-"
"""OpenAI's clients tell their platform in headers that begin so."""

BROWSER = "mozilla/"
"""How the `User-Agent` of every browser begins; a page cannot change it."""

NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
"""What `/etc/hosts` calls the loopback address; no DNS can lead these elsewhere."""


def authorize(request: Any) -> str:
    """Who sent `request`: its key's hash, or its address.

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
    return str(request.client.host)


def control_keys(args: Any) -> list[str]:
    """The keys that open the control routes; none means direct callers only."""
    if (key := admin_key()) is not None:
        return [key]
    given = getattr(args, "api_key", None) or [os.environ.get(API_KEY_ENV)]
    return [key for key in given if key]


def check_api_keys(keys: Any) -> None:
    """Refuse keys of `--api-key` that were meant and that no client can send.

    vLLM itself drops empty ones, and its own authentication with the last of them.

    Raises:
        ConfigError: one of them is blank, or has blanks around it.

    """
    for key in keys or ():
        check_key("--api-key", key or "")  # vLLM's parser makes None of an empty one


def _check_key(header: str | None, keys: list[str]) -> bytes:
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("control routes need 'Authorization: Bearer <key>'")
    sent = _hashed(token.encode("latin-1"))  # as ASGI servers decode headers
    # Every key is compared, so that the time taken tells nothing.
    if not any([secrets.compare_digest(sent, _hashed(os.fsencode(k))) for k in keys]):
        raise Forbidden("this key does not open the control routes")
    return sent


def _hashed(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _indirect(request: Any) -> str | None:
    """Why `request` may not come from a direct caller on this host; None: it does."""
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


def _is_loopback(client: Any) -> bool:
    """Whether a peer is one of `LOOPBACK`; a Unix socket has none."""
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
