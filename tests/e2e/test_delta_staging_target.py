"""The rollback target with delta staging: it outlives all that is not staged.

The tests of test_rollback_target.py, but for those of the memory of a second set.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from tests.e2e.conftest import OPTIONS
from tests.e2e.test_delta_staging import without_packing  # noqa: F401 (a fixture)
from tests.e2e.test_rollback_target import (  # noqa: F401 (tests, run here with a log)
    goes_back,
    old_says,
    previous,
    said,
    served_new,
    test_a_folder_that_cannot_be_read_keeps_the_rollback_target,
    test_a_receive_from_a_missing_group_keeps_the_rollback_target,
    test_an_aborted_update_without_data_keeps_the_rollback_target,
    test_an_update_finished_without_data_keeps_the_rollback_target,
)
from tests.support.engines.standing_receive import standing

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    """An engine core with delta staging, and nothing in front of it."""
    inflight = {"staging": "delta", "delta_gib": 0.01}
    options = OPTIONS | {"max_num_seqs": 4, "dtype": "float32"}
    options["additional_config"] = {"inflight": inflight}
    config = EngineArgs(str(folders["old"]), **options).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    yield core
    core.shutdown()


def test_a_flip_while_an_update_is_compared_with_the_live_weights_ends_it(
    served_new: EngineCore,  # noqa: F811 (the fixture)
    folders: dict[str, Path],
    old_says: dict[str, list[int]],  # noqa: F811
) -> None:
    """The engine core makes none; the rank would find it all the same."""
    core, before = served_new, said(served_new)
    with standing(core, folders["old"]):
        for _ in range(2):  # there and back
            core.vllm_inflight.ranks.flip("before")
    answer = core.inflight("prepare", {}).result(timeout=30)
    assert answer["error"]["code"] == "engine_fault"
    assert "has written into the live weights" in answer["error"]["message"]
    assert previous(core) == "old"
    assert said(core) == before
    goes_back(core, old_says)
