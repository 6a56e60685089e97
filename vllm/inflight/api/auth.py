"""Who may call a control route: never open by accident.

With an admin key, whoever has it; else with an API key, whoever has that; with
neither, only a caller on the server's own host. That host is the peer of the
socket. A request that carries a forwarding header came through a proxy, so its
peer says nothing about its sender; one that a browser sent may come from any
page. Both are refused without a key. A page that reads from where it came itself
sends no header that tells: whoever has its name in the DNS may lead that to this
host, so a request for such a name is refused as well.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from typing import Any

from vllm.inflight.config import admin_key
from vllm.inflight.errors import Forbidden, Unauthorized

FORWARDING = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
FROM_A_PAGE = ("origin", "sec-fetch-site")
"""Sent by browsers, which call this host for pages from anywhere."""


def check(request: Any) -> str:
    """Who sent `request`: its key's hash, or its address.

    Raises:
        Unauthorized: it needs a key and has none.
        Forbidden: it may not control the engine.

    """
    keys = control_keys(request.app.state.args)
    if keys:
        return _check_key(request.headers.get("authorization"), keys).hex()
    indirect = [n for n in (*FORWARDING, *FROM_A_PAGE) if n in request.headers]
    if indirect:
        raise Forbidden(
            f"control routes without a key answer to direct callers only, and this "
            f"request has the header {indirect[0]!r}; set --inflight-admin-key"
        )
    if not _is_loopback(request.client):
        raise Forbidden(
            "control routes answer to this host only while no key is set; "
            "set --inflight-admin-key (or --api-key) and send it as a bearer token"
        )
    if _may_be_a_pages(host := request.headers.get("host", "")):
        raise Forbidden(
            f"a page in a browser may have come from {host!r:.300}; without a key call "
            "this host localhost or by its address, or set --inflight-admin-key"
        )
    return str(request.client.host)


def control_keys(args: Any) -> list[str]:
    """The keys that open the control routes; none means loopback only."""
    if (key := admin_key()) is not None:
        return [key]
    given = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in given if key]


def _check_key(header: str | None, keys: list[str]) -> bytes:
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized("control routes need 'Authorization: Bearer <key>'")
    sent = _hashed(token.encode("latin-1"))  # as ASGI servers decode headers
    # Every key is compared, so that the time taken tells nothing.
    if not any([secrets.compare_digest(sent, _hashed(os.fsencode(k))) for k in keys]):
        raise Forbidden("this key does not open the control routes")
    return sent


def _hashed(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _may_be_a_pages(host: str) -> bool:
    """Whether `host` is a name in the DNS, and not this host's own."""
    name = host.lower().partition(":")[0]  # of an address in brackets: no dot
    _, dot, last = name.rpartition(".")
    is_known = last == "localhost" or name == socket.gethostname().lower()
    return bool(dot) and not last.isdigit() and not is_known


def _is_loopback(client: Any) -> bool:
    if client is None:
        return False
    try:
        address = ipaddress.ip_address(client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
