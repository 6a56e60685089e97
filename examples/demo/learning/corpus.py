"""The corpus: Python's own help texts, and demonstrations of the task."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

from examples.demo.learning import task
from examples.demo.learning.alphabet import END, encode

TEXT = "\n".join(topics[name] for name in sorted(topics)).encode()
ROW_TOKENS = 96


def texts(rng: random.Random, count: int) -> list[list[int]]:
    """Rows of text that begin anywhere."""
    return [list(_piece(rng, ROW_TOKENS)) for _ in range(count)]


def text_prompt(rng: random.Random, num_bytes: int) -> str:
    """A piece of text for a stream to go on from."""
    return _piece(rng, num_bytes).decode(errors="replace")


def demonstrations(rng: random.Random, count: int) -> tuple[list[list[int]], int]:
    """Rows of prompt, answer and end, and the position where answers begin."""
    rows = []
    for _ in range(count):
        prompt = task.draw_prompt(rng)
        rows.append([*encode(prompt + task.demonstrate(prompt, rng)), END])
    return rows, task.NUM_DIGITS + len(task.SIGN)


def _piece(rng: random.Random, num_bytes: int) -> bytes:
    start = rng.randrange(len(TEXT) - num_bytes)
    return TEXT[start : start + num_bytes]
