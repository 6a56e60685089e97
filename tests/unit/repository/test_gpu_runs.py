"""The table of tests on GPUs: results by test, of runs that may have been cut off."""

import json
import os
import re
import subprocess
import sys
from datetime import datetime

import pytest

from docs import gpu_runs, gpu_tests
from docs.gpu_runs import Run, by_name, record, results, told
from docs.junit import Case

ENGINE, WIRE = "tests/gpu/test_engine.py", "tests/gpu/test_wire.py"
JUNIT = """<testsuites><testsuite timestamp="2026-11-28T23:59:01.5+00:00">
<testcase classname="tests.gpu.test_engine" name="a"/>
<testcase classname="tests.gpu.test_engine.TestGraphs" name="b[x]"><failure/></testcase>
<testcase classname="tests.gpu.test_wire" name="c"><skipped/></testcase>
</testsuite></testsuites>"""


def line(name, outcome="passed"):
    facts = {"id": f"{ENGINE}::{name}", "outcome": outcome, "told": "", "seconds": 1}
    return json.dumps(facts) + "\n"


@pytest.fixture
def files(tmp_path):
    """Of one run: a job that came to its end, and one that was cut off in a line."""
    junit, cut = tmp_path / "engine-1.xml", tmp_path / "engine-2.jsonl"
    junit.write_text(JUNIT)
    cut.write_text(line("b[y, [1]::z]") + line("d")[:40])
    os.utime(cut, (datetime(2026, 11, 29, 12).timestamp(),) * 2)
    return [junit, cut]


def run(*cases, day="2026-11-29", runs=None, names=("a", "b[x]", "c")):
    """What is kept of the tests `names` after a run: its results by test."""
    run = [Case(ENGINE, name, result, day) for name, result in cases]
    return record(run, "H200", "0.32.0", {ENGINE: list(names)}, runs or {})


def last(runs):
    """Test → result and day."""
    found = by_name(runs.get(ENGINE, {}))
    return {name: (result, run.date[-2:]) for name, (result, run) in found.items()}


def test_a_job_that_was_cut_off_has_the_results_of_the_tests_that_ended(files):
    junit, cut = ([*results(file)] for file in files)
    assert junit == [
        Case(ENGINE, "a", "passed", "2026-11-28"),
        Case(ENGINE, "b[x]", "failed", "2026-11-28"),
        Case(WIRE, "c", "skipped", "2026-11-28"),
    ]
    assert cut == [Case(ENGINE, "b[y, [1]::z]", "passed", "2026-11-29")]
    assert [each.day for each in results(files[1], "2026-11-30")] == ["2026-11-30"]


def test_results_of_several_runs_are_put_together_by_test():
    first = run(("a", "passed"), ("b[x]", "passed"), day="2026-11-27")
    assert last(run(("b[x]", "passed"), ("c", "passed"), runs=first)) == {
        "a": ("passed", "27"),
        "b[x]": ("passed", "29"),
        "c": ("passed", "29"),
    }


@pytest.mark.parametrize(
    ("earlier", "later", "counts"),
    [
        (("passed", "27"), ("failed", "29"), "later"),
        (("failed", "27"), ("passed", "29"), "later"),
        (("failed", "29"), ("passed", "29"), "later"),
        (("passed", "29"), ("failed", "27"), "earlier"),
        (("passed", "27"), ("skipped", "29"), "earlier"),
        (("failed", "27"), ("skipped", "29"), "earlier"),
        (("skipped", "29"), ("passed", "27"), "later"),
    ],
)
def test_the_last_result_of_a_test_counts_unless_it_was_skipped(earlier, later, counts):
    runs = run(("c", "passed"))  # or the file were one that has only skipped
    for result, day in (earlier, later):
        runs = run(("a", result), day=f"2026-11-{day}", runs=runs)
    assert last(runs)["a"] == {"earlier": earlier, "later": later}[counts]


def test_of_one_run_a_failure_counts_also_if_the_test_passed_beside_it():
    """As with a fixture that fails when the test is over."""
    assert last(run(("a", "failed"), ("a", "passed")))["a"][0] == "failed"


def test_a_file_that_only_skipped_has_no_run():
    assert run(("a", "skipped")) == {}


def test_tests_and_files_that_are_gone_are_left_out():
    runs = run(("a", "passed"), ("gone", "passed"))
    assert last(runs) == {"a": ("passed", "29")}
    assert last(run(("c", "passed"), runs=runs, names=("b", "c"))) == {
        "c": ("passed", "29")
    }
    assert record([], "H200", "0.32.0", {}, runs) == {}


BEFORE = {"passed": 1, "failed": 1, "skipped": 3}
BEFORE |= {"card": "H100", "vllm": "0.32.0", "date": "2026-11-28"}


@pytest.mark.parametrize(
    ("names", "day", "stays"),
    [
        ("a", "2026-11-29", True),
        ("ac", "2026-11-28", False),
        ("ac", "2026-11-27", True),
    ],
)
def test_a_run_known_by_numbers_stays_until_as_many_tests_ran_by_name(
    names, day, stays
):
    runs = {ENGINE: {"num_tests": 2, "before": BEFORE}}
    runs = run(*((name, "passed") for name in names), day=day, runs=runs)
    assert ("before" in runs[ENGINE]) == stays
    assert runs[ENGINE]["num_tests"] == 3 and len(last(runs)) == len(names)


def test_tests_are_kept_by_function_and_come_back_with_their_names():
    names = ["a", "b[x]", "b[y, [1]::z]", "c[]"]
    runs = run(*((name, "passed") for name in names), names=names)
    (kept,) = runs[ENGINE]["runs"]
    assert kept["passed"] == {"a": [], "b": ["x", "y, [1]::z"], "c": [""]}
    assert by_name(runs[ENGINE]) == {
        name: ("passed", Run("2026-11-29", "0.32.0", "H200")) for name in names
    }


def test_the_table_tells_how_many_tests_ran_where_and_what_is_left():
    whole = run(("a", "passed"), ("b[x]", "passed"), ("c", "failed"))
    assert told(whole[ENGINE]) == "2 passed, 1 failed on H200, vLLM 0.32.0, 2026-11-29"
    cut = run(("a", "passed"), ("c", "skipped"), day="2026-11-27")
    first = "1 passed, 1 skipped on H200, vLLM 0.32.0, 2026-11-27"
    assert told(cut[ENGINE]) == f"1 of 3 ran: {first}"
    two = told(run(("b[x]", "passed"), runs=cut)[ENGINE])
    assert two == f"2 of 3 ran: 1 passed on H200, vLLM 0.32.0, 2026-11-29; {first}"
    cut[ENGINE]["before"] = BEFORE
    before = "1 passed, 1 failed, 3 skipped on H100, vLLM 0.32.0, 2026-11-28"
    assert told(cut[ENGINE]) == f"1 of 3 ran: {first}; before: {before}"
    del cut[ENGINE]["runs"]
    assert told(cut[ENGINE]) == f"2 of 3 ran: {before}"
    assert told(None) == "not recorded"


def test_the_command_keeps_a_run(files, tmp_path, monkeypatch, capsys):
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(gpu_runs, "FILE", kept)
    names = {ENGINE: ["a", "b[x]", "b[y, [1]::z]"], WIRE: ["c"]}
    monkeypatch.setattr(gpu_runs, "collected", lambda: names)
    files[1].write_text(files[1].read_text() + "\n" + line("gone"))
    files = map(str, files)
    gpu_runs.main([*files, "--card=H200", "--vllm=0.32.0", "--date=2026-11-30"])
    found = by_name(json.loads(kept.read_text())[ENGINE])
    assert found["b[y, [1]::z]"] == ("passed", Run("2026-11-30", "0.32.0", "H200"))
    assert [result for result, _ in found.values()].count("failed") == 1
    assert max(map(len, kept.read_text().splitlines())) < 88
    said = capsys.readouterr().out
    assert f"no such test: {ENGINE}::gone" in said and f"{ENGINE}: 3 of" in said


def test_what_is_kept_can_be_read_by_a_person():
    assert gpu_runs._text(gpu_runs.read()) + "\n" == gpu_runs.FILE.read_text()
    parameters = [f"parameter {number}" for number in range(9)]
    value = {"runs": [{"passed": {"a": parameters}, "date": "2026-11-29"}], "n": 1}
    assert gpu_runs._text(value).splitlines() == [
        "{",
        ' "runs": [',
        "  {",
        '   "passed": {',
        f'    "a": {json.dumps(parameters)}',
        "   },",
        '   "date": "2026-11-29"',
        "  }",
        " ],",
        ' "n": 1',
        "}",
    ]


@pytest.mark.seconds
def test_the_tests_of_a_file_are_those_that_it_has_on_a_gpu(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_fake.py").write_text(
        "import pytest, torch\npytestmark = pytest.mark.gpu\n"
        "BUILDS = ['GPU'] if torch.cuda.is_available() else ['CPU', 'host']\n"
        "@pytest.mark.parametrize('build', BUILDS)\ndef test_one(build): pass\n"
    )
    command = (
        "import sys; from pathlib import Path; from docs.gpu_runs import collected;"
        "print(dict(collected(Path(sys.argv[1]))))"
    )

    def collect(folder=tmp_path):
        return subprocess.run(
            [sys.executable, "-c", command, str(folder)],
            cwd=gpu_runs.ROOT,
            capture_output=True,
            text=True,
        )

    assert collect().stdout.strip() == "{'test_fake.py': ['test_one[GPU]']}"
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name")
    assert "No module named 'nothing_of_that_name'" in collect().stderr
    (tmp_path / "test_broken.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_two(request, other): pass\n"
    )
    assert "test_two lacks the fixtures other" in collect().stderr
    # Without a GPU, each test is skipped before it asks for its fixtures.
    every = collect(gpu_runs.ROOT / "tests" / "gpu")
    assert every.stdout and not every.returncode, every.stderr


def test_the_table_names_every_gpu_test_and_only_existing_cpu_tests():
    text = gpu_tests.gpu_tests()
    for file in (gpu_runs.ROOT / "tests/gpu").glob("test_*.py"):
        assert f"`{file.name}`" in text
    for name, on_cpu in gpu_tests.ON_CPU.items():
        assert (gpu_runs.ROOT / "tests" / "gpu" / f"{name}.py").exists(), name
        assert (gpu_runs.ROOT / "tests" / on_cpu).exists(), on_cpu


def test_the_page_names_the_cause_of_every_failure_in_the_table():
    failed = {
        file.removeprefix("tests/gpu/")
        for file, kept in gpu_runs.read().items()
        for each in (*kept.get("runs", ()), kept.get("before", {}))
        if each.get("failed")
    }
    page = (gpu_runs.ROOT / "docs/gpu-tests.md").read_text()
    explained = page.partition("## Failures in the table")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(test_\w+\.py)`", explained, re.M)) == failed
