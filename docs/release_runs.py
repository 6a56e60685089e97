"""The table of releases of vLLM: which core tests passed on each.

`make test-releases` writes a JUnit file for each release. `python -m docs.release_runs
JUNIT...` keeps their results in docs/release-runs.json, of which the table is made.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from docs.junit import RESULTS, cases
from docs.tables import table
from vllm.inflight import patch
from vllm.inflight.patch.records.private_names import OVERRIDES, PRIVATES
from vllm.inflight.patch.records.record import Override, Patch, Private
from vllm.inflight.releases.table import (
    REFERENCE,
    SIGNATURES,
    SUPPORTED,
    differing,
    holds,
)

FILE = Path(__file__).with_name("release-runs.json")
HEADER = ("vLLM", "records that fit", "adapted", "for other releases", "core tests")

Runs = dict[str, dict[str, Any]]


def read() -> Runs:
    """Release → result of its last run."""
    runs: Runs = json.loads(FILE.read_text()) if FILE.exists() else {}
    return runs


def counts(junit: Path) -> Counter[str]:
    """Number of tests by result, of one JUnit file."""
    return Counter(case.result for case in cases(junit))


def releases() -> str:
    """What is known of each supported release."""
    runs = read()
    rows = [
        [release, *_records(release), _told(runs, release)] for release in SUPPORTED
    ]
    return table(HEADER, rows)


def _records(release: str) -> list[str]:
    every: list[Patch | Override | Private] = [
        *patch.records(),
        *OVERRIDES,
        *PRIVATES,
    ]
    own = [each for each in every if holds(each.since, each.before, release)]
    adapted = [each for each in own if _is_adapted(each, release)]
    numbers = len(own) - len(adapted), len(adapted), len(every) - len(own)
    return [str(number) for number in numbers]


def _is_adapted(record: Patch | Override | Private, release: str) -> bool:
    """Whether a record is not as it is for the reference release."""
    if not holds(record.since, record.before, REFERENCE):
        return True
    entries = SIGNATURES.get(record.target)
    return differing(entries, record.expects, release) != record.expects


def _told(runs: Runs, release: str) -> str:
    if release == REFERENCE:
        return "all tests, in `make test`"
    if (run := runs.get(release)) is None:
        return "not run"
    found = run["results"]
    results = ", ".join(f"{found[key]} {key}" for key in RESULTS if found[key])
    return f"{results}; {run['date']}"


def main() -> None:
    """Keep the results of JUnit files, which are named after their releases."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("junit", nargs="+", type=Path)
    runs = read()
    for junit in parser.parse_args().junit:
        found = counts(junit)
        runs[junit.stem] = {
            "results": {key: found[key] for key in RESULTS},
            "date": date.today().isoformat(),
        }
    FILE.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
