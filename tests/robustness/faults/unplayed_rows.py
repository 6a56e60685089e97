"""Rows that are not played."""

from tests.robustness.faults.row import Row


class W20(Row):
    """An update needs memory that nobody has set aside."""

    not_shown = "its buffers are those of its NCCL transport on GPUs"
    instead = (
        "nor is it better: a [second set of weights](limits.md#memory), but taken "
        "before the KV cache is sized"
    )


ROWS = (W20,)
