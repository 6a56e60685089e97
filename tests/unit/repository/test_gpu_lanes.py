"""Jobs side by side on a host's GPUs, tried out with jobs that need none."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from itertools import groupby

import psutil
import pytest

from docs.gpu_runs import read
from docs.gpu_tests import gpu_tests
from tests.support.excerpt import excerpt
from tests.support.gpu_lanes.__main__ import merge
from tests.support.gpu_lanes.jobs import ROOT, Job, jobs
from tests.support.gpu_lanes.num_gpus import usable
from tests.support.gpu_lanes.runner import Runner

pytestmark = pytest.mark.seconds

TESTS = """
import pytest
pytestmark = pytest.mark.gpu

def test_one(): pass
def test_two(): assert False, "two is wrong"
def test_three(): pass
def test_four(): pass
"""
INI = "[pytest]\nmarkers = gpu\n"


@pytest.fixture
def run(tmp_path):
    """Runs jobs on two GPUs, numbers 4 and 5; returns whether all went well."""
    return lambda *queue, **more: Runner(list(queue), ["4", "5"], 60).run(
        tmp_path, **more
    )


def sleeps(name, *shares, beside="", **more):
    """A job that writes down which GPUs it has, and when it begins and ends.

    It ends once the job `beside` it has begun, if there is one.
    """
    now = "date +%s.%N >> $OUT/seen"
    rest = f"until test -s $OUT/../{beside}/seen; do sleep 0.05; done"
    command = (
        f"echo $CUDA_VISIBLE_DEVICES > $OUT/seen; {now}; "
        f"{rest if beside else 'sleep 0.5'}; {now}"
    )
    return Job(name, shares, 30, command, least=1, **more)


@pytest.fixture
def seen(tmp_path):
    """What a job wrote down: its GPUs, when it began, and when it ended."""

    def read(name):
        gpus, began, ended = (tmp_path / name / "seen").read_text().split()
        return gpus, float(began), float(ended)

    return read


def test_two_jobs_that_need_a_gpu_each_run_side_by_side(run, seen):
    assert run(sleeps("a", 1.0, beside="b"), sleeps("b", 1.0, beside="a"))
    assert {seen("a")[0], seen("b")[0]} == {"4", "5"}


def test_a_job_waits_for_its_share_of_a_gpu(run, seen):
    assert run(sleeps("a", 0.6, 0.6, beside="c"), sleeps("b", 0.6), sleeps("c", 0.3))
    (gpus, _, a_ended), (_, b_began, _) = seen("a"), seen("b")
    assert gpus == "4,5" and b_began > a_ended


def test_benchmarks_run_one_after_the_other(run, seen):
    assert run(sleeps("a", 0.1, quiet=True), sleeps("b", 0.1, quiet=True))
    assert seen("b")[1] > seen("a")[2]


def test_an_alone_job_waits_and_the_jobs_after_it_leave_it_room(run, seen):
    small, later = (sleeps(name, 0.1, on=(1,)) for name in ("small", "later"))
    alone = sleeps("alone", 1.0, on=(1,), alone=True)
    assert run(small, alone, later)
    assert seen("small")[2] < seen("alone")[1]
    assert seen("alone")[2] < seen("later")[1]


@pytest.mark.parametrize("ends_itself", [False, True])
def test_no_process_of_a_job_outlives_it(run, tmp_path, capfd, ends_itself):
    """Not even one in a session of its own, whose parent is gone."""
    command = "(setsid sleep 300 & echo $! > $OUT/child); " + "sleep 300; " * (
        not ends_itself
    )
    is_well = run(Job("hangs", (0.1,), 1, command, least=1), sleeps("b", 0.1))
    assert is_well == ends_itself
    assert ("hangs: cut off" in capfd.readouterr().out) != ends_itself
    assert not psutil.pid_exists(int((tmp_path / "hangs/child").read_text()))


def test_a_job_does_not_begin_with_too_little_time(run, tmp_path, capfd):
    assert not run(Job("late", (0.1,), 900, "true", least=600), sleeps("b", 0.1))
    assert "late: not begun" in capfd.readouterr().out
    assert not (tmp_path / "late").exists()


def test_what_passed_is_left_out_the_next_time(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take long
    file, passed = tmp_path / "test_fake.py", tmp_path / "passed.json"
    (tmp_path / "pytest.ini").write_text(INI)
    file.write_text(TESTS)
    halves = [
        Job(f"fake-{n}", (0.1,), 30, tests=str(file), shard=f"{n}/2", least=1)
        for n in (1, 2)
    ]
    assert not run(*halves)
    lines = [(tmp_path / f"fake-{n}.jsonl").read_text().splitlines() for n in (1, 2)]
    assert [json.loads(line)["outcome"] for line in lines[0]] == ["passed", "failed"]
    assert "two is wrong" in lines[0][1]
    assert json.loads(lines[0][1])["seconds"] == 0
    (tmp_path / "merged").mkdir()
    merge(tmp_path / "done.tgz", tmp_path / "merged", passed)
    each = {f"test_fake.py::test_{name}" for name in ("one", "three", "four")}
    assert set(json.loads(passed.read_text())) == each
    assert 'failures="1"' in (tmp_path / "merged/fake-1.xml").read_text()
    ran, kept = (each / "fake-1.jsonl" for each in (tmp_path, tmp_path / "merged"))
    assert kept.read_text() == ran.read_text()
    assert kept.stat().st_mtime == int(ran.stat().st_mtime)  # when its tests ran

    assert not run(*halves, passed=passed)  # the second half is test_two
    with tarfile.open(tmp_path / "done.tgz") as tar:
        lines = tar.extractfile("./fake-2.jsonl").read().decode().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["test_fake.py::test_two"]
    assert not (tmp_path / "fake-1.jsonl").exists()


def test_of_a_long_output_the_first_error_and_the_end_are_kept():
    lines = ["starting"] * 99 + ["ERROR the cause"] + ["…"] * 9999 + ["the end"]
    told = excerpt("\n".join(lines), most=300)
    assert told.startswith("ERROR the cause") and told.endswith("the end")
    assert len(told) < 700
    assert excerpt("no fault") == "no fault"


def test_a_process_of_a_job_that_hangs_tells_its_stacks():
    """The lanes give the time, and tests/support/calm reads it in every process."""
    code = "import time\ndef waits_for_long(): time.sleep(60)\nwaits_for_long()"
    calm, started = ROOT / "tests/support/calm", time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(calm), "STACKS_AFTER_S": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("in waits_for_long" in line for line in process.stderr)
        assert time.monotonic() - started >= 1
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_has_told_its_stacks_goes_on():
    # It computes until the thread that tells has ended.
    code = "import threading\nwhile threading.active_count() > 1: pass"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "tests/support/calm"), "STACKS_AFTER_S": "0.1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr.count("Stack of thread") == 2  # its own, and that which tells


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_every_file_of_gpu_tests_is_a_job(num_gpus):
    queue = jobs(num_gpus)
    files = {str(each.relative_to(ROOT)) for each in ROOT.glob("tests/gpu/test_*.py")}
    assert {job.tests for job in queue} - {""} == files
    assert len({job.name for job in queue}) == len(queue)
    for job in queue:
        assert len(job.shares) <= num_gpus and set(job.on) <= set(range(num_gpus))


@pytest.mark.parametrize(
    ("file", "fewest", "most"),
    [
        *(("engine", 1, 1), ("soak", 1, 2), ("two_ranks", 2, 3)),
        *(("pauses_drafted", 1, 2), ("pauses_quantised", 1, 2)),
        *(("trainer_deltas", 1, 3), ("frameworks", 1, 3), ("stages_of_ranks", 4, 4)),
    ],
)
def test_a_file_gets_as_many_gpus_as_its_tests_can_use(file, fewest, most):
    path = f"tests/gpu/test_{file}.py"
    (job,) = [job for job in jobs(4) if job.tests == path]
    assert (fewest, most) == usable(ROOT / path) and len(job.shares) == most
    (row,) = [row for row in gpu_tests().splitlines() if f"`test_{file}.py`" in row]
    told = str(most) if fewest == most else f"{fewest} to {most}"
    assert row.split(" | ")[3] == told


def test_on_two_gpus_deltas_are_measured_first_and_what_has_never_run_is_tested():
    known = read()
    queue = [job for job in jobs(2) if not (job.tests and job.alone)]

    def kind(job):
        if job.tests:
            return "known tests" if job.tests in known else "new tests"
        return re.match("(bench-delta|bench-kernels|bench-|soak)", job.name)[1]

    found = [name for name, _ in groupby(queue, kind)]
    new = ["new tests"] * any(kind(job) == "new tests" for job in queue)
    deltas = ["bench-delta", "bench-kernels"]
    assert found == [*deltas, *new, "bench-", "known tests", "bench-", "soak"]
    assert all(job.limit <= 1000 for job in queue)
    for job in queue:  # what measures an engine has a GPU to itself
        assert job.shares[0] == 1.0 or not job.quiet


def test_what_make_runs_alone_is_alone_here():
    makefile = (ROOT / "Makefile").read_text()
    names = re.search(r"^ALONE := .*test_,(.*)\)$", makefile, re.M)[1].split()
    alone = {job.name for job in jobs(2) if job.alone}
    assert {name.removesuffix(".py") for name in names} <= alone
