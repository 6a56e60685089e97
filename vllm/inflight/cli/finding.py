"""A finding of `doctor`: one thing that it checked, its state, and the remedy.

Findings are plain data, so that `--json` and a printed report say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What a finding means."""

    GOOD = "good"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` checked."""

    name: str
    found: str
    state: State = State.GOOD
    remedy: str | None = None
    """What to do; None if there is nothing to do."""


NOT_ADOPTED = (
    "What it writes gets a label and no digest. A KnownCall makes its calls known: see "
    "the page on drop-in use."
)
"""What to do about worker calls that are not adopted."""
