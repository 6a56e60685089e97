"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable
from typing import Any


def until(
    holds: Callable[[], Any], what: str = "it never came true", seconds: float = 30
) -> None:
    """Wait until `holds`; fails as `what` if it does not within `seconds`."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.01)
