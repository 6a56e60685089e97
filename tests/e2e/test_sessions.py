"""Sessions whose input comes in chunks, and an abort of the engine's."""

from pathlib import Path

import pytest

from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine


def test_a_session_that_is_aborted_has_ended(old: Path) -> None:
    # Without what makes ids differ: a new session has that of an aborted one.
    env = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
    seen = run_script("sessions", old, env=env)
    ended = {"finish_reason": "abort", "num_more": 0, "is_left": True}
    for when in ("running", "with a chunk that waits", "awaiting a chunk"):
        assert seen[when] == ended, when
    assert seen["after"] == 4
    assert seen["abandoned"] == 5
    assert (seen["b again"], seen["c again"]) == (12, 12)
    assert seen["states"] == 0
