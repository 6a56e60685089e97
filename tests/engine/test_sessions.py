"""Sessions whose input comes in chunks, and an abort of the engine's."""

from pathlib import Path

import pytest

from tests.engine.script import run_script

pytestmark = pytest.mark.engine


def test_a_session_that_is_aborted_has_ended(old: Path) -> None:
    seen = run_script("sessions", old)
    ended = {"finish_reason": "abort", "num_more": 0, "is_left": True}
    for when in ("running", "with a chunk that waits", "awaiting a chunk"):
        assert seen[when] == ended, when
    assert seen["after"] == 4
    assert seen["states"] == 0
