"""How many GPUs the tests of a file of tests/gpu can use."""

import ast
import re
from pathlib import Path

NEEDED = re.compile(r"(?:(?:\bdevice_count\(\)|\bNUM_GPUS) < |\bneeds\()(\d)")
"""Tests are skipped on fewer: all tests of the file, where its `pytestmark` says so."""
CAN_USE = {"frameworks": 3, "pauses_quantised": 2, "pauses_uses": 2} | {
    f"pauses_{subject}": 2
    for subject in ("adapter", "delta_staging", "dense", "drafted", "experts")
}
"""File → GPUs, where its text does not say so. In a test of pauses, the trainer that
sends over NCCL has the second one."""


def usable(file: Path) -> tuple[int, int]:
    """The fewest and the most GPUs that a test of `file` can use."""
    text = file.read_text()
    marks = "".join(
        ast.get_source_segment(text, each) or ""
        for each in ast.parse(text).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark"
    )
    fewest = max(map(int, NEEDED.findall(marks)), default=1)
    named = CAN_USE.get(file.stem.removeprefix("test_"), 1)
    return fewest, max(fewest, named, *map(int, NEEDED.findall(text)))
