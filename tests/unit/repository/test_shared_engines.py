"""Tests that share an engine find it alive, whatever ran before them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

CONFTEST = """
import pytest
from tests.support.shared_engines import ENDED, renew, require_one

class Engine:
    is_alive = True

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    renew(item)

def pytest_collection_finish(session):
    require_one(session.items)

@pytest.fixture(scope="module")
def start():
    alive = []
    def engine():
        for each in alive:
            each.is_alive = False
            ENDED.add(each)
        alive[:] = [Engine()]
        return alive[0]
    yield engine

@pytest.fixture(scope="module")
def shared(start):
    return start()

@pytest.fixture(scope="module")
def fed(shared):
    return shared, "nccl"

@pytest.fixture(scope="module", params=[1, 2])
def another(start, request):
    return start()

@pytest.fixture
def made_of_it(fed):
    yield fed[0]
    assert fed[0].is_alive
"""
SHARING = """
def test_shared(shared):
    assert shared.is_alive

def test_own(start):
    assert start().is_alive

def test_shared_in_a_tuple(made_of_it):
    assert made_of_it.is_alive

def test_another(another):
    assert another.is_alive

def test_shared_again(shared):
    assert shared.is_alive
"""
BOTH = """
def test_of_two(shared, another):
    pass
"""


def run(folder: Path, text: str) -> str:
    """What pytest says of these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_sharing.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_test_finds_its_engine_alive_after_tests_that_started_others(tmp_path):
    told = run(tmp_path, SHARING)
    assert "6 passed" in told, told


def test_two_engines_of_one_test_whose_order_nobody_has_said_are_refused(tmp_path):
    told = run(tmp_path, BOTH)
    assert "shared and another start an engine each" in told
    assert "passed" not in told
