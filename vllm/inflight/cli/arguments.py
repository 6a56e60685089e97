"""Arguments that several subcommands have, and how their values are read."""

from __future__ import annotations

import argparse

from vllm.inflight.config import ADMIN_KEY_ENV, API_KEY_ENV

LONGEST_S = 86400


def server_url(text: str) -> str:
    """The URL of a server, whose scheme is http:// where `text` has none."""
    return text if "://" in text else f"http://{text}"


def seconds(text: str) -> float:
    """A time that is waited for."""
    value = float(text)
    if not 0 <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"from 0 to {LONGEST_S} seconds, got {text}")
    return value


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add the key of a server's control routes, as `key`."""
    parser.add_argument(
        "--key",
        "--api-key",
        dest="key",
        help="key of the server's control routes; better given in the environment, as "
        f"{ADMIN_KEY_ENV} or {API_KEY_ENV}",
    )
