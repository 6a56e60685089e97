"""The table of families: what was seen of each, on which path and in which size."""

from __future__ import annotations

from typing import Any

from docs.tables import code, table
from tests.support.models.families import FAMILIES
from tests.support.models.families_seen import DELTA, HOST, read
from tests.support.models.seeing import SEEING

CPU = "cpu"
HEADER = (
    *("architecture", "what is particular", "CPU build", "in place", "GPU"),
    "delta staging, and deltas",
)

Runs = dict[str, dict[str, Any]]


def families() -> str:
    """What was seen of every family that was run."""
    seen, known = read(), FAMILIES | SEEING
    rows = [
        [
            code(known[name].architecture) + (", with experts" * (name in TWICE)),
            known[name].particular,
            _told(runs, CPU),
            _in_place(runs),
            _on_gpus(runs),
            _with_deltas(runs),
        ]
        for name in known
        if (runs := seen.get(name))
    ]
    return table(HEADER, rows)


TWICE = ("nemotron_h_moe",)
"""Families with the architecture of another one."""


def _told(runs: Runs, place: str) -> str:
    found = {facts["result"] for run, facts in runs.items() if _place(run) == place}
    return ", ".join(sorted(found)) or "not run"


def _in_place(runs: Runs) -> str:
    """Of the receiving path of a GPU, played on the host."""
    of_host = [facts for run, facts in runs.items() if _place(run) == HOST]
    return "; ".join(map(_share, of_host)) or "not run"


def _on_gpus(runs: Runs) -> str:
    cells = []
    for run, facts in sorted(runs.items()):
        if _place(run) not in (CPU, HOST, DELTA):
            told = run if facts["result"] == "equal" else f"{run}: {facts['result']}"
            cells.append(f"{told} ({_share(facts)})" if facts["in_place"] else told)
    return ", ".join(cells) or "not run"


def _with_deltas(runs: Runs) -> str:
    """With one set of weights and a log: whole versions, deltas and rollbacks."""
    cells = []
    for facts in (found for run, found in runs.items() if _place(run) == DELTA):
        told = facts["result"]
        if reason := facts.get("reason"):
            told += f": {reason}"
        if number := facts.get("converted"):
            told += f"; {number} tensors by whole versions alone"
        cells.append(told)
    return "; ".join(cells) or "not run"


def _share(facts: dict[str, Any]) -> str:
    wide = "" if facts["hidden"] == SMALL else f", hidden {facts['hidden']}"
    return f"{facts['in_place']} of {facts['tensors']}{wide}"


SMALL = 128
"""The hidden size of most of the tests' models."""


def _place(run: str) -> str:
    return run.rpartition(" ")[0]
