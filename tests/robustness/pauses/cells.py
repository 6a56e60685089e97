"""The table: how requests are treated × what changes the weights × whose requests.

Every pair of two facts occurs in some cell, on a CPU and on GPUs. A combination that
cannot be is listed with its reason.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

MODES = ("in_place", "retract", "abort", "wait")
PAUSE, COMMIT = "pause", "commit"
WHEN = (PAUSE, COMMIT)
"""The mode is that of a pause, in which the change is made, or of the change itself."""

NONE, FILES, COLLECTIVE, LENT, UPSTREAMS, ROLLBACK = CHANGES = (
    *("none", "files", "collective", "lent", "upstreams", "rollback"),
)
"""No update; an update from files, from a trainer in a group, from a trainer that lends
its memory, through a transport that is not ours; a rollback."""

SHORT, LONG, STRUCTURED, SEVERAL, PROMPT = (
    *("short", "long", "structured", "several", "prompt"),
)
ADAPTER, DRAFTED, EXPERTS, QUANTISED = "adapter", "drafted", "experts", "quantised"
SHARED_OUT = "shared_out"
"""Experts that two data-parallel engines share out; its cells are listed by tests/gpu,
and not by this table."""
LOGGED = "logged"
"""A dense model with delta staging; its cells are those of `logged`."""
WORKLOADS = (
    *(SHORT, LONG, STRUCTURED, SEVERAL, PROMPT),
    *(ADAPTER, DRAFTED, EXPERTS, QUANTISED),
)
DENSE = "dense"

BACKENDS = {
    "cpu": {COLLECTIVE: "inflight_gloo", UPSTREAMS: "other"},
    "cuda": {COLLECTIVE: "inflight_nccl", LENT: "inflight_ipc", UPSTREAMS: "nccl"},
}
"""The configured transport of an engine that such a change needs. `other` is a
transport of the tests, which loads as upstream's own do."""
WANTS_OWN_GPU = ("inflight_nccl", "nccl")


@dataclass(frozen=True, slots=True)
class Cell:
    """One scene."""

    mode: str
    when: str
    flush: bool
    change: str
    ranks: int
    workload: str

    def __str__(self) -> str:
        flush = "flush" if self.flush else "keep"
        facts = (self.workload, self.mode, self.when, self.change, flush)
        return "-".join((*facts, f"tp{self.ranks}"))

    @property
    def model(self) -> str:
        """The model whose engine runs it."""
        special = (ADAPTER, DRAFTED, EXPERTS, QUANTISED, SHARED_OUT, LOGGED)
        return self.workload if self.workload in special else DENSE

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        """Every two facts that meet in it."""
        return set(combinations(enumerate(astuple(self)), 2))


def impossible(cell: Cell, device: str) -> str | None:
    """Why there is no such cell; None if there is."""
    if cell.change == NONE and cell.when == COMMIT:
        return "nothing is committed"
    if cell.change == LENT and device == "cpu":
        return "lending memory is for GPUs"
    if cell.flush and cell.mode == "in_place":
        return "KV cannot be both kept and dropped: the call is rejected"
    if cell.flush and cell.when == COMMIT and cell.change == ROLLBACK:
        return "a rollback does not flush"
    if cell.ranks == 2 and backend_of(cell, device) in WANTS_OWN_GPU:
        return "the trainer would need a third GPU"
    return None


def all_cells(device: str) -> list[Cell]:
    """Every cell that can be on that device."""
    facts = product(MODES, WHEN, (False, True), CHANGES, (1, 2), WORKLOADS)
    cells = (Cell(*each) for each in facts)
    return [cell for cell in cells if impossible(cell, device) is None]


def backend_of(cell: Cell, device: str) -> str:
    """The transport that the cell's engine is configured with."""
    usual = BACKENDS[device][COLLECTIVE if device == "cpu" else LENT]
    return BACKENDS[device].get(cell.change, usual)


@cache
def cover(device: str) -> tuple[Cell, ...]:
    """So many cells that every pair of facts occurs that there is."""
    cells = {cell: cell.pairs for cell in all_cells(device)}
    left = set().union(*cells.values())
    chosen: list[Cell] = []
    uses: Counter[tuple[int, Any]] = Counter()
    engines: set[tuple[str, int, str]] = set()

    def engine(cell: Cell) -> tuple[str, int, str]:
        return cell.model, cell.ranks, backend_of(cell, device)

    def gain(cell: Cell) -> tuple[int, bool, int]:
        """Of cells with as many new pairs, one of an engine that runs anyway.

        Of those, one whose facts were chosen least.
        """
        used = sum(uses[fact] for fact in enumerate(astuple(cell)))
        return len(cells[cell] & left), engine(cell) in engines, -used

    while left:
        best = max(cells, key=gain)
        chosen.append(best)
        engines.add(engine(best))
        uses.update(enumerate(astuple(best)))
        left -= cells[best]
    return tuple(chosen)


def logged(device: str) -> list[Cell]:
    """The cells of an engine that has one set of weights, and a log of what changes."""
    sent = COLLECTIVE if device == "cpu" else LENT
    facts = product(MODES, WHEN, (FILES, sent, ROLLBACK))
    every = (Cell(mode, when, False, change, 1, LOGGED) for mode, when, change in facts)
    return [cell for cell in every if impossible(cell, device) is None]


def of(device: str, models: Iterable[str], ranks: int) -> list[Cell]:
    """The chosen cells of some models, in such an order that engines are shared."""
    mine = (c for c in cover(device) if c.model in models and c.ranks == ranks)
    return sorted(mine, key=lambda c: (c.model, backend_of(c, device), str(c)))
