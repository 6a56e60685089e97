"""The package fits every release that it says it supports."""

import subprocess
import sys

import pytest

from tests.releases.wheel import ROOT

pytestmark = pytest.mark.seconds


def test_the_audit_of_all_supported_releases_finds_nothing_that_breaks() -> None:
    """Beside other tests, and not before them: for a minute it uses one core."""
    audit = [sys.executable, "-m", "tests.releases.audit"]
    done = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
