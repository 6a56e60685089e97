"""The table of tests on GPUs: results of JUnit files, by test file."""

import pytest

from docs import gpu_runs

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_engine" name="a"/>
<testcase classname="tests.gpu.test_engine.TestGraphs" name="b"><failure/></testcase>
<testcase classname="tests.gpu.test_wire" name="c"><skipped/></testcase>
<testcase classname="" name="tests/gpu/conftest.py"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def junit(tmp_path):
    file = tmp_path / "run.xml"
    file.write_text(JUNIT)
    return file


def test_results_are_counted_by_file(junit):
    assert gpu_runs.results(junit) == {
        "tests/gpu/test_engine.py": {"passed": 1, "failed": 1},
        "tests/gpu/test_wire.py": {"skipped": 1},
    }


def test_a_file_that_only_skipped_keeps_its_earlier_run(junit):
    earlier = {"tests/gpu/test_wire.py": {"passed": 4, "card": "H100"}}
    runs = gpu_runs.record([junit], "H200", "0.32.0", dict(earlier))
    assert runs["tests/gpu/test_wire.py"] == {"passed": 4, "card": "H100"}
    assert runs["tests/gpu/test_engine.py"]["card"] == "H200"


def test_the_table_names_every_gpu_test_and_only_existing_cpu_tests():
    text = gpu_runs.gpu_runs()
    for file in (gpu_runs.ROOT / "tests/gpu").glob("test_*.py"):
        assert f"`{file.name}`" in text
    for name, on_cpu in gpu_runs.ON_CPU.items():
        assert (gpu_runs.ROOT / "tests" / "gpu" / f"{name}.py").exists(), name
        assert (gpu_runs.ROOT / "tests" / on_cpu).exists(), on_cpu
