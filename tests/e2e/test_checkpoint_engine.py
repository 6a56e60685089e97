"""checkpoint-engine's own parameter server and worker extension, under load.

Its worker call has the name of verl's, so it needs an engine of its own. Shared memory
is in the place of CUDA IPC, and gloo in the place of NCCL.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_framework_trainers import (  # noqa: F401 (a fixture)
    check,
    in_float32,
    run,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FRAMEWORK = "checkpoint_engine"


def test_its_server_updates_an_engine_under_load(
    in_float32: list[Path],  # noqa: F811
    record_property: Callable[[str, object], None],
) -> None:
    check(run(in_float32, 1, [FRAMEWORK]), FRAMEWORK, in_float32)
    record_property("digest", "equal")
