"""The file of what was seen: docs/upstream-faults.json, from which a table is made."""

import json
import os
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.robustness.faults import llm_rows, route_rows, server_rows, unplayed_rows
from tests.robustness.faults.row import Row

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs" / "upstream-faults.json"
ROOMS = (llm_rows, server_rows, route_rows, unplayed_rows)
ROWS: dict[str, type[Row]] = {
    row.__name__: row
    for row in sorted(
        (row for room in ROOMS for row in room.ROWS),
        key=lambda row: int(row.__name__[1:]),
    )
}
"""Every row by its name, in order."""
ARMS = {
    "upstream": "test_unpatched_vllm_shows_the_fault",
    "here": "test_the_same_calls_do_not_show_the_fault_here",
}
"""Who was played, and the test that did."""


def record(row: type[Row], arm: str, saw: str) -> None:
    """Keep what was seen, where RECORD_FAULTS=1 asks for it."""
    if os.environ.get("RECORD_FAULTS") != "1":
        return
    kept = read()
    rows = {}
    for name, each in ROWS.items():
        before = kept.get(name, {})
        arms = {key: before[key] for key in ARMS if key in before}
        rows[name] = arms | facts(each)
    rows[row.__name__][arm] = {
        "saw": saw,
        "date": date.today().isoformat(),
        "machine": machine(),
        "vllm": version("vllm").partition("+")[0],
    }
    FILE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def machine() -> str:
    """The GPU of the engines, or the cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))} cores, CPU build"


def facts(row: type[Row]) -> dict[str, Any]:
    """What is known of a row before anything has been played."""
    told: dict[str, Any] = {"fault": row.fault(), "tests": list(row.tests)}
    if row.not_shown:
        told["upstream"] = {"saw": f"not shown here: {row.not_shown}"}
    if row.instead:
        told["here"] = {"saw": row.instead}
    return told


def read() -> dict[str, Any]:
    """The file as it is."""
    rows: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return rows
