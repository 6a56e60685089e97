"""A connection to a server, whose address and key are checked before the first call.

Later, a wrong address or key would look like another fault. A host name that cannot be
encoded raises no httpx error. A key that fits no header would be printed by the error,
and the server would seem not to answer.
"""

from __future__ import annotations

from typing import Any

import httpx

from vllm.inflight.errors import ConfigError

OF_THIS_HOST = "127.0.0.1", "localhost", "[::1]", "0.0.0.0"
DIRECT = {f"all://{host}": None for host in OF_THIS_HOST}
"""Hosts that are reached without the proxy of the environment. A proxy on another host
cannot reach them, and answers like a server that is starting."""


def connect(url: str, key: str | None, **options: Any) -> httpx.Client:
    """Make the client of a server, without calling the server.

    Args:
        url: the URL of the server.
        key: the key of the control routes, if they need one; no error contains it.
        options: further options of `httpx.Client`.

    Raises:
        ConfigError: the URL is none, or the key fits no header.

    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"a server's URL begins with http://, got {url!r}")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            "the key has characters that no header can have, or blanks around it"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        client = httpx.Client(base_url=url, headers=headers, mounts=DIRECT, **options)
        has_host = bool(client.base_url.host)
        client.base_url.raw_host.decode("ascii").encode("idna")  # as the look-up does
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"{url!r} is no URL of a server: {error}") from None
    if not has_host:
        raise ConfigError(f"{url!r} names no host")
    return client
