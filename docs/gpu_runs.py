"""What ran on GPUs: the last result of each test of tests/gpu.

`python -m docs.gpu_runs FILE... --card "one H200" --vllm 0.32.0` keeps the results of a
run in docs/gpu-runs.json. It reads JUnit files, and the .jsonl files of
tests/support/gpu_lanes, which a run that was cut off has, too.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, astuple, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.junit import RESULTS, Case, cases
from tests.support.gpu_lanes.jsonl import lines

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "gpu-runs.json"

Runs = dict[str, dict[str, Any]]
"""Test file → `num_tests`, that it has; `runs`, newest first; and `before`, if there is
a run of which only the numbers of results are known. A run has `card`, `vllm` and
`date`, and results: tests, or the number of them. Tests are kept by function: the
parameters of each, or none."""


@dataclass(frozen=True)
class Run:
    """Where and when tests ran.

    Attributes:
        date: as 2026-11-29.
        vllm: the release, as 0.32.0.
        card: as "one of two H200".

    """

    date: str
    vllm: str
    card: str

    def __str__(self) -> str:
        return f"{self.card}, vLLM {self.vllm}, {self.date}"


Tests = dict[str, tuple[str, Run]]
"""Name of a test → its result, and the run that it is from."""


def read() -> Runs:
    """The kept runs."""
    runs: Runs = json.loads(FILE.read_text()) if FILE.exists() else {}
    return runs


def by_name(kept: dict[str, Any]) -> Tests:
    """The tests that are known by name, of what is kept of a file."""
    return {
        f"{function}[{each}]" if parameters else function: (result, run_of(run))
        for run in kept.get("runs", ())
        for result in RESULTS
        for function, parameters in run.get(result, {}).items()
        for each in parameters or [""]
    }


def run_of(facts: dict[str, Any]) -> Run:
    """Where and when a kept run was."""
    return Run(facts["date"], facts["vllm"], facts["card"])


def _by_run(tests: Tests) -> list[dict[str, Any]]:
    """The opposite of `by_name`."""
    runs: dict[Run, dict[str, Any]] = {}
    for name, (result, run) in sorted(tests.items()):
        function, has_parameters, rest = name.partition("[")
        of_run = runs.setdefault(run, asdict(run))
        parameters = of_run.setdefault(result, {}).setdefault(function, [])
        parameters += [rest.removesuffix("]")] if has_parameters else []
    return [runs[run] for run in sorted(runs, key=astuple, reverse=True)]


def results(file: Path, day: str = "") -> Iterator[Case]:
    """Every result in a JUnit file or in a .jsonl file.

    Args:
        file: which of them it is, its name tells.
        day: of a .jsonl file; by default that of its last change.

    """
    if file.suffix == ".xml":
        yield from cases(file)
        return
    day = day or date.fromtimestamp(file.stat().st_mtime).isoformat()
    for line in lines(file.read_text()):
        path, _, name = line["id"].partition("::")
        yield Case(path, name, line["outcome"], day)


def record(
    run: Iterable[Case],
    card: str,
    vllm: str,
    collected: dict[str, list[str]],
    runs: Runs | None = None,
) -> Runs:
    """`runs` with the results of one run.

    The last result of a test counts, and of those of one day a failure. A test that was
    skipped keeps its earlier result.

    Args:
        run: the results.
        card: where it ran.
        vllm: the release.
        collected: test file → the tests that it has; results of others are left out.
        runs: by default those that are kept.

    """
    runs = read() if runs is None else runs
    found = {file: by_name(runs.get(file, {})) for file in collected}
    for case in sorted(run, key=lambda each: (each.day, each.result == "failed")):
        of_file = found.get(case.file, {})
        if _counts(case, of_file.get(case.name)):
            of_file[case.name] = case.result, Run(case.day, vllm, card)
    of_files = {
        file: _kept(names, found[file], runs.get(file, {}).get("before"))
        for file, names in collected.items()
    }
    return {file: kept for file, kept in of_files.items() if len(kept) > 1}


def _counts(case: Case, earlier: tuple[str, Run] | None) -> bool:
    if earlier is None or earlier[0] == "skipped":
        return True
    return case.result != "skipped" and case.day >= earlier[1].date


def _kept(
    names: list[str], found: Tests, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Of one file. What ran before stays until as many tests have run by name."""
    found = {name: found[name] for name in names if name in found}
    dates = [run.date for result, run in found.values() if result != "skipped"]
    kept: dict[str, Any] = {"num_tests": len(names)}
    if dates:
        kept["runs"] = _by_run(found)
    if before and sum(day >= before["date"] for day in dates) < _num_ran(before):
        kept["before"] = before
    return kept


def _num_ran(run: dict[str, Any]) -> int:
    return sum(_num(run[each]) for each in ("passed", "failed") if each in run)


def _num(tests: int | dict[str, list[str]]) -> int:
    """How many tests a run has with one result."""
    if isinstance(tests, int):
        return tests
    return sum(len(parameters) or 1 for parameters in tests.values())


def told(kept: dict[str, Any] | None) -> str:
    """How many tests of a file ran, with which results, where and when."""
    if kept is None:
        return "not recorded"
    runs, before = kept.get("runs", []), kept.get("before")
    of_runs = [_counted(run) for run in runs]
    if before:
        of_runs.append(f"{'before: ' if runs else ''}{_counted(before)}")
    ran, num_tests = sum(map(_num_ran, runs or [before])), kept["num_tests"]
    whole = f"{ran} of {num_tests} ran: " if ran < num_tests or len(of_runs) > 1 else ""
    return whole + "; ".join(of_runs)


def _counted(run: dict[str, Any]) -> str:
    counts = (f"{_num(run[kind])} {kind}" for kind in RESULTS if kind in run)
    return f"{', '.join(counts)} on {run_of(run)}"


class Collected:
    """A plugin of pytest that notes every test, also those for another vLLM.

    Attributes:
        tests: by file.
        lacking: tests that ask for a fixture that their file does not have. Files of
            tests/gpu import tests of other folders, and have to import their fixtures.

    """

    def __init__(self) -> None:
        self.tests = defaultdict[str, list[str]](list)
        self.lacking: dict[str, list[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        file, _, name = item.nodeid.partition("::")
        self.tests[file].append(name)
        assert isinstance(item, pytest.Function)
        known = {"request", *item._fixtureinfo.name2fixturedefs}
        if callspec := getattr(item, "callspec", None):
            known.update(callspec.params)
        if lacking := sorted(set(item.fixturenames) - known):
            self.lacking[item.nodeid] = lacking


def collected(folder: Path = ROOT / "tests" / "gpu") -> dict[str, list[str]]:
    """Test file → the tests that it has on a GPU; this takes ten seconds.

    Raises:
        RuntimeError: pytest could not read a file, or a test lacks a fixture.

    """
    seen, printed = Collected(), io.StringIO()
    arguments = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    with redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        # Parameters of some tests are others on the CPU.
        patch.setattr(torch.cuda, "is_available", lambda: True)
        status = pytest.main([*arguments, str(folder)], [seen])
    if status:
        raise RuntimeError(f"pytest could not collect {folder}:\n{printed.getvalue()}")
    for name, lacking in seen.lacking.items():
        raise RuntimeError(f"{name} lacks the fixtures {', '.join(lacking)}")
    return seen.tests


def _text(value: Any, indent: str = "") -> str:
    """JSON: in a line what fits there, and the parameters of a test."""
    line = json.dumps(value)
    is_last = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if len(indent + line) < 88 or is_last:
        return line
    within = indent + " "
    items = (
        [f"{json.dumps(key)}: {_text(each, within)}" for key, each in value.items()]
        if isinstance(value, dict)
        else [_text(each, within) for each in value]
    )
    opens, closes = "{}" if isinstance(value, dict) else "[]"
    rows = ",".join(f"\n{within}{item}" for item in items)
    return f"{opens}{rows}\n{indent}{closes}"


def main(argv: list[str] | None = None) -> None:
    """Keep the results of a run."""
    parser = argparse.ArgumentParser("python -m docs.gpu_runs", None, main.__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="JUnit or .jsonl")
    add("--card", required=True, help="as `one of two H200`")
    add("--vllm", required=True, help="release, as 0.32.0")
    add("--date", default="", help="of .jsonl files, if not that of their last change")
    args = parser.parse_args(argv)
    run = [case for file in args.files for case in results(file, args.date)]
    known = collected()
    runs = record(run, args.card, args.vllm, known)
    FILE.write_text(_text(dict(sorted(runs.items()))) + "\n")
    for file, name in sorted({(case.file, case.name) for case in run}):
        if name not in known.get(file, ()):
            print(f"left out, as there is no such test: {file}::{name}")
    for file in sorted({case.file for case in run} & set(known)):
        print(f"{file}: {told(runs.get(file))}")


if __name__ == "__main__":
    main()
