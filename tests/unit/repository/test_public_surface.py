"""The public surface equals the recorded one."""

import pytest

from tests.support import surface
from tests.support.preloaded_process import run

pytestmark = pytest.mark.seconds


def test_the_public_surface_is_the_one_on_record():
    # In a process of its own: an engine in this one has put our methods in place.
    code = "from tests.support import surface; print(surface.text())"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == surface.FILE.read_text().strip(), (
        "run: python -m tests.support.surface, and look at the difference"
    )
