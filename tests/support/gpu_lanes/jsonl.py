"""The lines of JSON that plugin.py writes, one for each test."""

import json
from collections.abc import Iterator
from contextlib import suppress


def lines(text: str | bytes) -> Iterator[dict[str, str]]:
    """Each line but one that was cut off while it was written."""
    for line in text.splitlines():
        with suppress(ValueError):
            yield json.loads(line)
