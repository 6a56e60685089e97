"""The replies of routes cover both ranks of an engine, not one of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    """One run of the script, for all tests of this module."""
    return run_script("two_ranks_routes", checkpoint(0), checkpoint(1))


def test_checksums_of_every_rank_equal_a_reference_cut_from_the_checkpoint(
    seen: dict[str, Any],
) -> None:
    for moment in ("at start", "after commit", "after rollback", "after broadcast"):
        assert seen[f"odd {moment}"] == [], moment
    # Every weight, norms too, on both ranks: 3 + 8 for each of the layers.
    assert seen["odd against another"] == 2 * (3 + 2 * 8)


def test_reads_put_the_parts_of_all_ranks_together(seen: dict[str, Any]) -> None:
    assert seen["misread at start"] == seen["misread after commit"] == []


def test_no_rank_commits_if_the_ranks_got_different_tensors(
    seen: dict[str, Any],
) -> None:
    assert seen["ranks that differ"] == "weights_mismatch"
    assert seen["after ranks that differ"] == seen["before"]
    assert seen["odd after that"] == []


def test_an_idle_engine_takes_any_number_of_pieces(seen: dict[str, Any]) -> None:
    assert seen["one tensor a call"] == "weights updated"


def test_tensors_for_each_rank_and_a_broadcast_to_both_are_served(
    seen: dict[str, Any],
) -> None:
    assert seen["one entry each"] is True
    assert seen["broadcast"] == "weights updated"
    assert seen["after broadcast"] == seen["expected"] != seen["before"]


def test_both_ranks_detect_a_reload_outside_of_updates(
    seen: dict[str, Any],
) -> None:
    assert seen["odd after reload"] == seen["odd after that reload"] == []
    assert "nowhere" in seen["reload of nothing"]
