"""Ports on which a test has a peer listen."""

import secrets
import socket

RANGE = range(20_000, 32_000)
"""Below the ports that Linux gives to whoever asks for any (32768 to 60999)."""


def free_port() -> int:
    """Return a port that nobody listens on now.

    The system would tell a free port too, but may give it to another process before
    the peer listens. It gives out none of this range, and two tests that draw the same
    number within seconds are unlikely: `secrets` is not seeded, as `random` may be.

    Raises:
        OSError: a hundred ports in turn were taken.

    """
    for _ in range(100):
        port = RANGE[secrets.randbelow(len(RANGE))]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port in {RANGE}")
