"""What the page on frameworks says has run is in the kept runs."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs import framework_runs
from docs.framework_runs import NotRunError, each_file, ran, read, record, told
from tests.support.frameworks.evidence import (
    BOTH_ENDS,
    BY_HAND,
    CPU,
    GPU,
    ON_GPUS,
    OPENRLHF,
    PACKAGES,
    Evidence,
)
from tests.support.frameworks.overview import ALL_EVIDENCE

TESTS = Path(__file__).parents[2]
EACH = "test_the_extension_of_the_package_updates_beside_decoding"
JUNIT = f"""<testsuites><testsuite>
<testcase classname="tests.e2e.test_framework_packages" name="{EACH}[verl]">
<properties><property name="digest" value="equal"/></properties></testcase>
<testcase classname="tests.e2e.test_framework_packages" name="{EACH}[swift]">
<failure/></testcase>
<testcase classname="tests.e2e.test_update" name="test_that_nothing_names"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize("each", ALL_EVIDENCE, ids=lambda e: f"{e.test} {e.case}")
def test_what_is_named_as_evidence_has_passed_in_a_kept_run(each: Evidence) -> None:
    assert ran([each]).num_passed > 0


def test_a_kept_test_still_has_its_name() -> None:
    for files in read().values():
        for file, run in files.items():
            text = (TESTS / file).read_text()
            defined = {
                each.name
                for each in ast.walk(ast.parse(text))
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert {name.partition("[")[0] for name in run["tests"]} <= defined


@pytest.fixture
def runs(tmp_path: Path) -> framework_runs.Runs:
    junit = tmp_path / "0.29.0.xml"
    junit.write_text(JUNIT)
    return record(junit, {"0.29.0": {"e2e/test_slime.py": {"date": "", "tests": {}}}})


def of(name: str) -> Evidence:
    return Evidence(BY_HAND, CPU, PACKAGES, case=f"[{name}]")


def test_a_run_keeps_what_the_page_names_and_the_files_that_did_not_run(
    runs: framework_runs.Runs,
) -> None:
    assert set(runs["0.29.0"]) == {PACKAGES, "e2e/test_slime.py"}
    tests: dict[str, Any] = runs["0.29.0"][PACKAGES]["tests"]
    assert tests == {
        f"{EACH}[verl]": {"result": "passed", "digest": "equal"},
        f"{EACH}[swift]": {"result": "failed"},
    }
    assert json.loads(framework_runs._text(runs)) == runs


def test_a_release_counts_where_all_that_is_named_has_passed(
    runs: framework_runs.Runs,
) -> None:
    found = ran([of("verl")], runs)
    assert (found.num_passed, found.releases) == (1, ("0.29.0",))
    assert found.has_digest
    for group in ([of("swift")], [of("verl"), of("swift")], [of("skyrl")]):
        with pytest.raises(NotRunError, match="make test-frameworks"):
            ran(group, runs)


ON_GPU = {
    "runs": [
        {
            **{"card": "one H200", "vllm": "0.32.0", "date": "2026-11-29"},
            "passed": {"test_a": ["verl", "prime_rl"], "test_b": []},
            "failed": {"test_c": ["prime_rl"]},
            "skipped": {"test_a": ["openrlhf"]},
        }
    ]
}
BEFORE = {"passed": 7, "card": "three H200", "vllm": "0.32.0", "date": "2026-11-28"}


def on_gpus(name: str, **kept: Any) -> str:
    """What is told of a framework, of which a file of GPU tests ran as in `ON_GPU`."""
    evidence = Evidence(BOTH_ENDS, GPU, ON_GPUS, case=f"[{name}]")
    runs = {f"tests/{ON_GPUS}": ON_GPU | kept}
    return str(framework_runs._ran_on_gpus([evidence], runs))


def test_a_framework_has_the_runs_on_gpus_of_its_own_tests() -> None:
    told = "1 test passed (one H200, vLLM 0.32.0, 2026-11-29)"
    assert on_gpus("verl") == on_gpus("verl", before=BEFORE | {"failed": 1}) == told


def test_a_test_that_never_ran_by_name_on_gpus_has_the_run_of_its_whole_file() -> None:
    told = "7 tests of the file passed (three H200, vLLM 0.32.0, 2026-11-28)"
    assert on_gpus("openrlhf", before=BEFORE) == told


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("prime_rl", {"before": BEFORE}),
        ("openrlhf", {}),
        ("openrlhf", {"before": BEFORE | {"failed": 1}}),
    ],
)
def test_what_failed_or_never_ran_on_gpus_is_no_evidence(
    name: str, kept: dict[str, Any]
) -> None:
    with pytest.raises(NotRunError, match=re.escape(f"[{name}]")):
        on_gpus(name, **kept)


def test_what_ran_is_told_once_for_each_machine_and_once_for_each_file() -> None:
    openrlhf = [e for e in ALL_EVIDENCE if e.version == OPENRLHF]
    text = told(openrlhf)
    assert text.count("own extension: ") == 2  # one of them on GPUs
    assert text.count("own transport and extension: ") == 2
    files = [file for _, _, file in each_file(openrlhf)]
    assert files.count("`e2e/test_framework_trainers.py`") == 2
