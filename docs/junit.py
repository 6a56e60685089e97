"""What a JUnit file of pytest says of each test."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        file: below the root of the repository; empty if the file was not read.
        name: of the test, with its parameters in brackets.
        result: one of `RESULTS`.
        day: when its run began, as 2026-11-29.
        properties: what the test has recorded with `record_property`.

    """

    file: str
    name: str
    result: str
    day: str
    properties: dict[str, str] = field(default_factory=dict)


def cases(junit: Path) -> Iterator[Case]:
    """Every test of one JUnit file."""
    for suite in ET.parse(junit).iter("testsuite"):
        for case in suite.iter("testcase"):
            kinds = {child.tag for child in case}
            result = "failed" if kinds & {"failure", "error"} else "passed"
            yield Case(
                file=_file(case.attrib.get("classname", "")),
                name=case.attrib.get("name", ""),
                result="skipped" if "skipped" in kinds else result,
                day=suite.attrib.get("timestamp", "")[:10],
                properties={
                    each.attrib["name"]: each.attrib["value"]
                    for each in case.iter("property")
                },
            )


def _file(classname: str) -> str:
    """The file of "tests.gpu.test_engine" or "tests.gpu.test_engine.TestClass"."""
    parts = classname.split(".")
    for number, part in enumerate(parts, 1):
        if part.startswith("test_"):
            return "/".join(parts[:number]) + ".py"
    return ""
