"""checkpoint-engine's own parameter server and worker extension, under load.

Its worker call has the name of verl's, so it needs an engine of its own. Shared memory
is in the place of CUDA IPC, and gloo in the place of NCCL.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_framework_trainers import (  # noqa: F401 (a fixture)
    Seen,
    check,
    in_float32,
    run,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FRAMEWORK = "checkpoint_engine"


@pytest.fixture(scope="module")
def seen(in_float32: list[Path]) -> Seen:  # noqa: F811
    return run(in_float32, 1, [FRAMEWORK])


def test_its_server_updates_an_engine_under_load(
    in_float32: list[Path],  # noqa: F811
    seen: Seen,
    record_property: Callable[[str, object], None],
) -> None:
    check(seen, FRAMEWORK, in_float32)
    record_property("digest", "equal")


def test_its_request_is_told_that_a_version_is_rejected_and_its_server_is_not(
    seen: Seen,
) -> None:
    """`ParameterServer.update` has returned as if the version had been taken."""
    found = seen[FRAMEWORK]["incomplete"]
    assert "missing" in found["error"] and found["same"]
