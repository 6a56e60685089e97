"""A connection to a server: its address and its key, judged before anything is sent.

Later they would fail in other ways: what cannot be looked up is no error of httpx, and
what refuses a header names it, and is taken for a server that does not answer.
"""

from __future__ import annotations

from typing import Any

import httpx

from vllm.inflight.errors import ConfigError


def connect(url: str, key: str | None, **options: Any) -> httpx.Client:
    """A client of a server, which has not been called yet.

    Args:
        url: of the server.
        key: of the control routes, if they need one; never told in an error.
        options: more of httpx's.

    Raises:
        ConfigError: nothing can be sent to such an address, or with such a key.

    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"a server's URL begins with http://, got {url!r}")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            "the key has characters that no header can have, or blanks around it"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        client = httpx.Client(base_url=url, headers=headers, **options)
        has_host = bool(client.base_url.host)
        client.base_url.raw_host.decode("ascii").encode("idna")  # as the look-up does
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"{url!r} is no URL of a server: {error}") from None
    if not has_host:
        raise ConfigError(f"{url!r} names no host")
    return client
