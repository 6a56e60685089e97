"""An engine with delta staging that is started again serves what was served before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_delta_staging import delta_engine, without_packing  # noqa: F401
from tests.e2e.test_journal import (  # noqa: F401 (tests, run here with delta staging)
    served,
    test_a_journaled_folder_that_was_overwritten_is_not_restored,
    test_a_later_folder_that_was_written_over_leaves_the_one_before_it_served,
    test_a_restarted_engine_restores_the_journaled_version,
    test_a_version_committed_during_a_restore_is_not_overwritten,
)
from tests.support.deltas import stepped
from vllm.inflight.errors import ChangeLogFull, Conflict
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine


@pytest.fixture
def restart(start: Callable[..., Any], old: Path, tmp_path: Path) -> Callable[..., Any]:
    """An engine on the old weights, in the place of the one before."""
    note = {"journal": str(tmp_path / "served.json"), "staging": "delta"}

    def begin(delta_gib: float = 0.02, dtype: str = "float32") -> Any:
        inflight = note | {"delta_gib": delta_gib}
        return delta_engine(start, old, dtype=dtype, inflight=inflight)

    return begin


def test_a_version_that_differs_too_much_from_the_start_is_not_restored(
    restart: Callable[..., Any], new: Path
) -> None:
    restart().update_weights_from_disk(str(new), "new")
    llm = restart(delta_gib=0.0001)
    before = served(llm)
    with pytest.raises(ChangeLogFull, match="--inflight-delta-gib"):
        llm.restore_weights()
    assert served(llm) == before


def test_a_version_that_came_as_a_delta_is_not_restored(
    restart: Callable[..., Any], new: Path
) -> None:
    weights = load_file(new / "model.safetensors")
    with Publisher(restart(dtype="bfloat16"), lambda: weights) as to:
        to.publish()
        weights = stepped(weights, 1)
        assert to.publish(version="stepped").is_delta
    with pytest.raises(Conflict, match="'stepped' did not come from files"):
        restart().restore_weights()
