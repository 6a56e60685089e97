"""The screen: the progress, in one line per phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

BARS = "▁▂▃▄▅▆▇█"
PRINT_EVERY_S = 10.0
"""Where there is no terminal to redraw, a line in so many seconds."""


class Screen:
    """Shows phases; remembers how long each took."""

    def __init__(self) -> None:
        self.console = Console()
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[cyan]{task.fields[facts]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self.seconds["total"] = time.monotonic() - self._began

    @contextmanager
    def phase(self, name: str, description: str, total: int = 1) -> Iterator[Phase]:
        """A phase of `total` steps, timed under `name`."""
        began = time.monotonic()
        row = self._progress.add_task(description, total=total, facts="")
        phase = Phase(self, row, description, total)
        yield phase
        phase.end()
        self.seconds[name] = time.monotonic() - began

    def update(self, row: TaskID, completed: int, facts: str) -> None:
        """Redraw a row."""
        self._progress.update(row, completed=completed, facts=facts)


@dataclass
class Phase:
    """One line of the screen."""

    screen: Screen
    row: TaskID
    description: str
    total: int
    facts: str = ""
    printed: float = 0.0

    def show(self, completed: int, facts: str) -> None:
        """Show the progress."""
        self.facts = facts
        self.screen.update(self.row, completed, facts)
        if time.monotonic() - self.printed > PRINT_EVERY_S and completed < self.total:
            self.printed = time.monotonic()
            self._print(f"{completed}/{self.total}")

    def end(self) -> None:
        """Mark the phase as finished; its last text stays."""
        self.screen.update(self.row, self.total, self.facts)
        self._print("done")

    def _print(self, progress: str) -> None:
        if not self.screen.console.is_terminal:
            line = f"{self.description}: {progress}  {self.facts}".rstrip()
            self.screen.console.print(line, highlight=False, soft_wrap=True)


def sparkline(values: list[float], width: int = 20) -> str:
    """Shares of 1 as a row of bars, the newest last."""
    last = len(BARS) - 1
    return "".join(BARS[round(last * min(1.0, v))] for v in values[-width:])
