"""Rows that this build cannot show."""

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


class W20(Row):
    """An update needs memory that nobody has set aside."""

    not_shown = "its buffers are those of its NCCL transport on GPUs"
    instead = (
        "nor is it better: a [second set of weights](limits.md#memory), but taken "
        "before the KV cache is sized"
    )


ROWS = (W9, W20)
