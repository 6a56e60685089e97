"""The package fits every release that it says it supports."""

import subprocess
import sys

import pytest

from tests.releases.wheel import ROOT
from vllm.inflight.releases.table import SUPPORTED

pytestmark = pytest.mark.seconds

ENDS = (SUPPORTED[0], SUPPORTED[-1])
"""They differ most from each other, so every run audits them."""


@pytest.mark.parametrize(
    "releases",
    [
        pytest.param(ENDS, id="oldest and newest"),
        pytest.param(SUPPORTED[1:-1], id="between", marks=pytest.mark.slow),
    ],
)
def test_the_audit_of_supported_releases_finds_nothing_that_breaks(
    releases: tuple[str, ...],
) -> None:
    """Beside other tests, and not before them: for a minute it uses one core."""
    audit = [sys.executable, "-m", "tests.releases.audit", *releases]
    done = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
