"""What ran of frameworks: the results of the tests that the page on drop-in use names.

`make test-frameworks` writes a JUnit file, named after the release of vLLM. `python -m
docs.framework_runs JUNIT...` keeps its results in docs/framework-runs.json. What ran on
GPUs is in docs/gpu-runs.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from docs import gpu_runs
from docs.junit import cases
from docs.tables import code, first_line
from tests.support.frameworks.evidence import GPU, Evidence
from tests.support.frameworks.overview import ALL_EVIDENCE

FILE = Path(__file__).with_name("framework-runs.json")

DIGEST = "digest"
"""What a test records (`record_property`) that has compared the digest of an update
with that of an update from a file."""

Runs = dict[str, dict[str, dict[str, Any]]]
"""Release of vLLM → test file, below tests/ → `date`, and `tests` by name: the result
and what the test has recorded."""


class NotRunError(Exception):
    """No kept run has passed the tests that are named as evidence."""


def read() -> Runs:
    """The kept runs."""
    runs: Runs = json.loads(FILE.read_text()) if FILE.exists() else {}
    return runs


def record(junit: Path, runs: Runs) -> Runs:
    """`runs` with the results of one JUnit file; each test file replaces itself."""
    named = {each.test for each in ALL_EVIDENCE}
    found: dict[str, dict[str, Any]] = {}
    for case in cases(junit):
        file = case.file.removeprefix("tests/")
        if file in named:
            facts = {"result": case.result} | case.properties
            found.setdefault(file, {})[case.name] = facts
    today = date.today().isoformat()
    dated = {file: {"date": today, "tests": each} for file, each in found.items()}
    return runs | {junit.stem: runs.get(junit.stem, {}) | dated}


@dataclass(frozen=True)
class Ran:
    """What the kept runs say of one or more tests.

    Attributes:
        num_passed: tests that passed on each of the releases.
        releases: of vLLM.
        day: of the last run.
        machine: where it ran.
        has_digest: whether one of them has compared digests.
        is_file: whether only the number of tests of the whole file is known.

    """

    num_passed: int
    releases: tuple[str, ...]
    day: str
    machine: str
    has_digest: bool = False
    is_file: bool = False

    def __str__(self) -> str:
        tests = f"{self.num_passed} test{'s' * (self.num_passed != 1)}"
        tests += f"{' of the file' * self.is_file} passed"
        on = f"{self.machine}, vLLM {', '.join(self.releases)}"
        return f"{tests} ({on}, {self.day})"


def ran(group: Iterable[Evidence], runs: Runs | None = None) -> Ran:
    """What the kept runs say of evidence that has one kind of machine.

    Raises:
        NotRunError: a test that is named has not passed.

    """
    group = list(group)
    if group[0].where == GPU:
        return _ran_on_gpus(group, gpu_runs.read())
    runs = read() if runs is None else runs
    by_release = {
        release: [_passed(each, files) for each in group]
        for release, files in runs.items()
    }
    whole = {release: each for release, each in by_release.items() if all(each)}
    if not whole:
        raise NotRunError(
            "no run in docs/framework-runs.json has passed "
            + ", ".join(f"{each.test} {each.case}".strip() for each in group)
            + ": run `make test-frameworks`, and keep its results"
        )
    tests = [
        {name: facts for found in each for name, facts in found.items()}
        for each in whole.values()
    ]
    return Ran(
        num_passed=min(map(len, tests)),
        releases=tuple(sorted(whole)),
        day=max(runs[r][each.test]["date"] for r in whole for each in group),
        machine=group[0].where,
        has_digest=any(DIGEST in facts for each in tests for facts in each.values()),
    )


def _passed(evidence: Evidence, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The tests of one release that are evidence; empty unless all have passed."""
    every = files.get(evidence.test, {}).get("tests", {})
    found = {name: facts for name, facts in every.items() if evidence.case in name}
    is_whole = all(facts["result"] == "passed" for facts in found.values())
    return found if is_whole else {}


def _ran_on_gpus(group: list[Evidence], runs: gpu_runs.Runs) -> Ran:
    """Evidence by name or, if not all of it is known by name, runs of whole files."""
    kept = {each.test: runs.get(f"tests/{each.test}", {}) for each in group}
    named = [_named(each, kept[each.test]) for each in group]
    before = [each.get("before", {}) for each in kept.values()]
    tests = {name: result for found in named for name, result in found.items()}
    has_failed = any(result != "passed" for result, _ in tests.values())
    if all(named) and not has_failed:
        return _on(len(tests), [run for _, run in tests.values()])
    is_whole = all(each.get("passed") and not each.get("failed") for each in before)
    if is_whole and not has_failed:
        where = [gpu_runs.run_of(each) for each in before]
        return replace(_on(sum(e["passed"] for e in before), where), is_file=True)
    wanted = ", ".join(f"{each.test} {each.case}".strip() for each in group)
    raise NotRunError(f"no run in docs/gpu-runs.json has passed {wanted}")


def _named(evidence: Evidence, kept: dict[str, Any]) -> gpu_runs.Tests:
    """The tests that are evidence, and ran by name."""
    return {
        name: (result, run)
        for name, (result, run) in gpu_runs.by_name(kept).items()
        if evidence.case in name and result != "skipped"
    }


def _on(num_passed: int, where: list[gpu_runs.Run]) -> Ran:
    return Ran(
        num_passed,
        releases=tuple(sorted({each.vllm for each in where})),
        day=max(each.date for each in where),
        machine=" and ".join(sorted({each.card for each in where})),
    )


def told(evidence: Iterable[Evidence]) -> str:
    """What ran, and how many tests passed, where and when."""
    groups = _groups(evidence, lambda each: (each.of, each.where))
    return "; ".join(f"{group[0].of}: {ran(group)}" for group in groups)


def each_file(evidence: Iterable[Evidence]) -> Iterator[list[str]]:
    """For each file of tests: what ran, how many tests passed, and the file."""
    for group in _groups(evidence, lambda each: (str(each), each.where, each.test)):
        yield [str(group[0]), str(ran(group)), code(group[0].test)]


def has_digest(evidence: Iterable[Evidence]) -> bool:
    """Whether a test has compared the digest with that of an update from a file."""
    groups = _groups(evidence, lambda each: each.where)
    return any(ran(group).has_digest for group in groups)


def _groups(
    evidence: Iterable[Evidence], key: Callable[[Evidence], Hashable]
) -> list[list[Evidence]]:
    groups: dict[Hashable, list[Evidence]] = {}
    for each in evidence:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def main() -> None:
    """Keep the results of JUnit files, which are named after their releases."""
    parser = argparse.ArgumentParser(description=first_line(main.__doc__))
    parser.add_argument("junit", nargs="+", type=Path)
    runs = read()
    for junit in parser.parse_args().junit:
        runs = record(junit, runs)
    FILE.write_text(_text(runs))


def _text(runs: Runs) -> str:
    """JSON with a line for each test."""
    lines: list[str] = []
    for release, files in sorted(runs.items()):
        of_files = []
        for file, run in sorted(files.items()):
            tests = (
                f"    {json.dumps(name)}: {json.dumps(facts)}"
                for name, facts in run["tests"].items()
            )
            head = f'  {json.dumps(file)}: {{"date": "{run["date"]}", "tests": {{\n'
            of_files.append(head + ",\n".join(tests) + "\n  }}")
        lines.append(f' "{release}": {{\n' + ",\n".join(of_files) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
