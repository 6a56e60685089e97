"""Words of messages: what is like an unknown word, and sizes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_CHARS = 256
"""Of an unknown word that is compared; any caller may have chosen it."""


def nearest(word: object, known: Iterable[str]) -> str:
    """The known words that are most like an unknown one.

    Returns:
        Words in brackets, after a space; empty if none is like it.

    """
    near = difflib.get_close_matches(str(word)[:MAX_CHARS], list(known), 2)
    return f" (nearest: {', '.join(near)})" if near else ""


def size(num_bytes: int) -> str:
    """Bytes in GiB, or in MiB if that would be nearly zero."""
    if 0 < num_bytes < 2**30 / 100:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
