"""The public surface equals the recorded one."""

import subprocess
import sys

import pytest

from tests.support import surface

pytestmark = pytest.mark.seconds


def test_the_public_surface_is_the_one_on_record():
    # In a process of its own: an engine in this one has put our methods in place.
    command = [
        sys.executable,
        "-c",
        "from tests.support import surface; print(surface.text())",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == surface.FILE.read_text().strip(), (
        "run: python -m tests.support.surface, and look at the difference"
    )
