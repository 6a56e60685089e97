"""Rows that this build cannot show, or that have not been played."""

from tests.faults.row import Row


class W9(Row):
    """An update while the engine sleeps ends it."""

    tests = (
        "tests/engine/test_sleep.py::"
        "test_whatever_needs_weights_is_refused_while_they_are_asleep",
        "tests/engine/test_sleep.py::"
        "test_after_level_2_nothing_is_served_until_a_whole_version_has_come",
    )
    not_shown = (
        "the CPU build ignores sleep; read in its code, and reported to vLLM (#57853)"
    )
    instead = "409 `engine_asleep`"


class W10(Row):
    """When one of two data-parallel engines fails, they serve different weights under
    one label.
    """

    tests = (
        "tests/trainer/test_delivery.py::"
        "test_if_one_engine_cannot_stage_no_engine_commits",
        "tests/trainer/test_delivery.py::"
        "test_if_one_engine_cannot_commit_those_that_did_go_back",
    )
    not_shown = "read in vLLM's code; two engines have not been played with"
    instead = "all engines stage before one commits, and go back if one cannot"


class W20(Row):
    """An update needs memory that nobody has set aside."""

    not_shown = "its buffers are those of its NCCL transport on GPUs"
    instead = (
        "nor is it better: a [second set of weights](limits.md#memory), but taken "
        "before the KV cache is sized"
    )


ROWS = (W9, W10, W20)
