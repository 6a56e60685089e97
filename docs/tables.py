"""Tables of Markdown, and what stands in their cells."""

from __future__ import annotations

import inspect
from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a `|` inside a cell is escaped."""
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def first_line(text: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def code(text: object) -> str:
    """`text` in code quotes."""
    return f"`{text}`"
