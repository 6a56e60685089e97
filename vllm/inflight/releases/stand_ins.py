"""What this package uses in releases of vLLM that lack a name.

`releases.PLACES` says which release gets which of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class NoSuchClass:
    """In place of a class of upstream: no object is one of it."""


@dataclass
class WeightVersionSpan:
    """Output tokens `[start, end)` were sampled by `version`; upstream's from 0.32."""

    version: str
    start: int
    end: int


@dataclass
class RequestError:
    """Why a single request failed; upstream's from 0.32.

    Attributes:
        code: a word for programs.
        message: a sentence for people.
        retryable: whether the client may send the request again.

    """

    code: str
    message: str
    retryable: bool = False


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """A context that does nothing: before 0.32, upstream sets no variables of NCCL."""
    yield


class NoWatchDog:
    """In place of the watchdog, which upstream has from 0.33 on."""

    def feed(self) -> None:
        """Do nothing."""


def get_watch_dog() -> NoWatchDog:
    """The watchdog of a process in which nothing watches."""
    return NoWatchDog()
