"""What this package uses in releases of vLLM that lack a name.

`releases.PLACES` says which release gets which of these.
"""

from __future__ import annotations


class NoSuchClass:
    """In place of a class of upstream: no object is one of it."""


class NoWatchDog:
    """In place of the watchdog, which upstream has from 0.33 on."""

    def feed(self) -> None:
        """Do nothing."""


def get_watch_dog() -> NoWatchDog:
    """The watchdog of a process in which nothing watches."""
    return NoWatchDog()
