"""The matrix: a point of an update × what goes wrong there × where, and what follows.

A cell that cannot be is listed with its reason, so that nothing is left out in silence.
"""

from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

STREAM = ("first byte", "mid-stream", "last byte")
STAGING = ("begin", *STREAM, "verify", "vote")
POINTS = (
    *STAGING,
    *("before the flip", "inside the flip", "after the flip"),
    "reply",
)
DELTA = ("decode", "prove")
"""Where only a delta passes; an engine with delta staging is tested there."""
RAISED = ("exception", "out of memory")
CODE = (*RAISED, "stall", "clock jump")
DATA = ("NaN", "other bytes", "other name", "left out", "cut off", "sent twice")
"""Done to one tensor of the stream."""
KILLS = ("rank 0", "rank 1", "engine core", "API server")
"""Who gets a SIGKILL while rank 0 of two is at the point."""

TRAINERS = ("shared memory", "gloo")
"""By which a trainer sends that gets a SIGKILL while the engine is at a point."""
WHILE_FINISHING = ("verify", "inside the flip")
"""Where an engine has been told to commit, and needs its trainer no more."""
LEAVES = ("begin", *STREAM, "before finish", *WHILE_FINISHING)

CORES = ("core of one rank", "core of 2")
ENGINES = ("engine 0 of 2", "engine 1 of 2")
"""Data-parallel ones, of one rank each."""
CHEAP = ("one rank", "core of one rank")
TWO_RANKS = ("rank 0 of 2", "rank 1 of 2", "core of 2")
PLACES = (*CHEAP, *TWO_RANKS, *ENGINES)


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault, at one point, in one place."""

    point: str
    fault: str
    place: str

    def __str__(self) -> str:
        return "-".join((self.point, self.fault, self.place)).replace(" ", "_")

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """What meets in it: point and fault, point and place, fault and place."""
        return set(combinations((self.point, self.fault, self.place), 2))

    @property
    def outcome(self) -> str:
        """`committed`, `told` (that, and the caller gets an error), or a code."""
        if self.fault in DATA:
            return "weights_mismatch"
        if self.fault == "clock jump":
            return "committed"
        if self.fault == "stall":
            is_staged = self.point not in (*STAGING, *DELTA)
            return "committed" if is_staged else "deadline_exceeded"
        return "told" if self.point == "reply" else "engine_fault"


def impossible(cell: Cell) -> str | None:
    """Why there is no such cell; None if there is."""
    at, fault, in_core = cell.point, cell.fault, cell.place in CORES
    if fault in DATA and at not in STREAM:
        return "no tensor passes there"
    if in_core and (at in STREAM or at in ("verify", "inside the flip")):
        return "that happens on ranks, while the core looks on"
    if not in_core and at == "reply":
        return "a rank's reply follows its flip: it is the point after the flip"
    if not in_core and at == "after the flip" and fault in RAISED:
        return "nothing runs there that could raise; a rank that dies there is killed"
    if in_core and at == "vote" and fault == "stall":
        return "votes are compared in memory; nothing is waited for"
    return None


def all_cells() -> list[Cell]:
    """Every cell that can be, of faults that leave all processes alive."""
    cells = (Cell(*facts) for facts in product(POINTS, CODE + DATA, PLACES))
    return [cell for cell in cells if impossible(cell) is None]


def kills() -> list[Cell]:
    """Every victim at every point of rank 0 of two."""
    return [Cell(p, "SIGKILL", victim) for p in POINTS[:-1] for victim in KILLS]


def killed_trainers() -> list[Cell]:
    """Every way of sending, at every point where its trainer can be killed."""
    return [Cell(p, "SIGKILL trainer", way) for way in TRAINERS for p in LEAVES]


@cache
def quick() -> frozenset[Cell]:
    """What every run of the tests runs, without the kills.

    So many cells of one engine that every pair of point, fault and place occurs that
    there is. The slow tests run all of them. Two data-parallel engines take too long to
    start for every run.
    """
    places = CHEAP + TWO_RANKS
    cells = {cell: cell.pairs for cell in all_cells() if cell.place in places}
    left = set().union(*cells.values())
    chosen: set[Cell] = set()

    def gain(cell: Cell) -> tuple[int, bool, bool]:
        """Of cells with as many new pairs, those that take less time come first."""
        return len(cells[cell] & left), cell.fault != "stall", cell.place in CHEAP

    while left:
        best = max(cells, key=gain)
        chosen.add(best)
        left -= cells[best]
    return frozenset(chosen)


def params(*places: str) -> list[Any]:
    """The cells of the places of one engine, as parameters of a test."""
    import pytest

    always = quick()
    return [
        pytest.param(c, id=str(c), marks=() if c in always else pytest.mark.slow)
        for c in all_cells()
        if c.place in places
    ]
