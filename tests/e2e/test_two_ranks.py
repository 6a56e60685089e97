"""Tensor parallelism: all ranks change, or none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    """One run of the script, for all tests of this module."""
    return run_script("two_ranks", checkpoint(0), checkpoint(1))


def test_two_ranks_commit_together_and_equal_a_fresh_engine(
    seen: dict[str, Any],
) -> None:
    assert seen["whole"] == "committed"
    assert seen["after commit"] == seen["expected"] != seen["before"]


def test_a_scrub_adds_up_two_ranks_and_finds_changed_tensors(
    seen: dict[str, Any],
) -> None:
    whole, spoilt = seen["scrubbed"]
    assert (whole["result"], whole["num_tensors"]) == ("equal", 25)
    assert (whole["num_parameters"], whole["unknown"]) == (0, [])
    # A part that only the second rank has, and one that the first has as well.
    assert spoilt["different"] == ["model.embed_tokens.weight", "model.norm.weight"]


def test_two_ranks_roll_back_together(seen: dict[str, Any]) -> None:
    assert seen["after rollback"] == seen["before"]


def test_two_ranks_carry_the_rest_of_a_subset_and_vote_for_the_whole(
    seen: dict[str, Any],
) -> None:
    assert seen["subset"] == seen["mixture"] == seen["subset again"]
    assert seen["mixture"][1] not in (seen["before"], seen["expected"])


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_commits_if_one_rank_fails(seen: dict[str, Any], rank: int) -> None:
    assert seen[f"rank {rank} broken"] == "engine_fault"
    assert seen[f"rank {rank} short"] == "weights_mismatch"
    assert seen[f"rank {rank} poisoned"] == "weights_mismatch"
    assert seen[f"after rank {rank}"] == seen["before"]
    assert seen[f"label after rank {rank}"] == "default"


def test_tensors_larger_than_the_shards_of_all_ranks_are_rejected(
    seen: dict[str, Any],
) -> None:
    assert seen["larger"] == ["weights_mismatch"] * 2
    assert seen["after larger"] == seen["before"]


def test_updates_from_another_thread_reach_an_engine_of_its_own_process(
    seen: dict[str, Any],
) -> None:
    assert seen["lengths in flight"] == [300]
    assert seen["versions in flight"] > 1


def test_staging_rests_while_ranks_decode_but_not_while_their_queues_spin(
    seen: dict[str, Any],
) -> None:
    assert seen["rests when idle"] == [[], []]
    assert all(map(any, seen["rests in flight"]))


def test_an_extension_that_fails_before_its_write_on_one_rank_changes_nothing(
    seen: dict[str, Any],
) -> None:
    own = seen["own"]
    assert "of one rank" in own["fails"]
    assert own["after failing"] == own["served"]
    assert own["served"] == [["new", own["served"][0][1], "live"], seen["expected"]]


def test_an_extensions_write_on_two_ranks_begins_a_version(
    seen: dict[str, Any],
) -> None:
    own = seen["own"]
    (label, digest, weights), said = own["after writing"]
    assert label.startswith("untracked-") and (digest, weights) == (None, "live")
    assert said == seen["before"]
    assert own["way back"] == "nothing_to_roll_back"


def test_weights_half_written_on_one_of_two_ranks_are_gone_until_written_whole(
    seen: dict[str, Any],
) -> None:
    own = seen["own"]
    assert "of the extension" in own["breaks off"]
    assert own["after breaking off"][1:] == [None, "gone"]
    assert "there are none to read" in own["is read"]
    (_, digest, weights), said = own["after a second try"]
    assert (digest, weights) == (None, "live") and said == seen["expected"]
