"""The file of what was seen of families: docs/families.json, which makes a table.

One record for each family, place and mode: how large the model was, how its tensors
came, and what became of it. RECORD_FAMILIES=1 has tests write it.
"""

import fcntl
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[3] / "docs" / "families.json"

HOST = "host"
"""A GPU's receiving path, played in the memory of the host; see engine/in_place.py."""

DELTA = "delta cpu"
"""The CPU build without packing, with delta staging."""


def record(family: str, place: str, mode: str, **facts: Any) -> None:
    """Keep what was seen, where that was asked for.

    Args:
        family: by its name in the tests.
        place: `cpu`, `host`, `delta cpu`, or the name of a GPU.
        mode: `eager` or `graphs`.
        **facts: `result`, `hidden`, `tensors` and `in_place` of these. With delta
            staging: `result`, the `reason` of a refusal, and how many tensors are
            `converted`, which deltas cannot change.

    """
    if os.environ.get("RECORD_FAMILIES") != "1":
        return
    with FILE.open() as lock:  # tests may run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        seen = read()
        runs = seen.setdefault(family, {})
        runs[f"{place} {mode}"] = facts | {"date": date.today().isoformat()}
        write(seen)


def read() -> dict[str, dict[str, Any]]:
    """Family → place and mode → what was seen."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def write(seen: dict[str, dict[str, Any]]) -> None:
    """Keep all of it, a run in a line."""
    lines = []
    for family, runs in sorted(seen.items()):
        of_family = ",\n".join(
            f"    {json.dumps(run)}: {json.dumps(facts)}"
            for run, facts in sorted(runs.items())
        )
        lines.append(f"  {json.dumps(family)}: {{\n{of_family}\n  }}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
