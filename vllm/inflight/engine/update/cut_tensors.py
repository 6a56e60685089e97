"""The proof of what a delta makes of tensors that are cut over ranks.

Each rank tells its share and the sum of all: see worker/delta/shares.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.inflight.errors import DeltaUnsupported, InflightError, WeightsMismatch
from vllm.inflight.worker.delta.shares import NUM, NUM_HELD

Told = Sequence[int]
"""What one rank tells: its share, the sum of all shares, and of `held_by_several`."""


def problem(told: Sequence[Told]) -> InflightError | None:
    """What is wrong with what the ranks tell, in rank order; None if it adds up."""
    if (error := _different_holders(told)) is not None:
        return error
    for expected, shares in _by_stage(told).items():
        sums = tuple(sum(column) % 2**64 for column in zip(*shares, strict=True))
        # Two stages that both have a tied embedding may expect the same.
        copies, rest = divmod(sums[-1], expected[-1]) if expected[-1] else (1, 0)
        if rest or not copies:
            return DeltaUnsupported(
                f"the delta changes {expected[-1]} elements of tensors that are cut "
                f"over the ranks, and the ranks serve {sums[-1]} of them: some are "
                "served more often than others, or nowhere"
            )
        if sums != tuple(copies * each % 2**64 for each in expected):
            return WeightsMismatch(
                "with the changes of the delta, the digests of the tensors that are "
                "cut over the ranks are not the announced ones: the changes were made "
                "for other weights than are served, or some of them were lost",
                remedy="Send the whole version.",
            )
    return None


def _different_holders(told: Sequence[Told]) -> InflightError | None:
    """An error if ranks that hold the same parts have not found the same."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for rank, each in enumerate(told):
        held = each[2 * NUM :]
        for at in range(0, len(held), NUM_HELD):
            num_holders, parts, terms = held[at : at + NUM_HELD]
            found.setdefault((num_holders, parts), {})[rank] = terms
    for (num_holders, _), terms_of in found.items():
        ranks = ", ".join(map(str, terms_of))
        if len(terms_of) % num_holders:
            return DeltaUnsupported(
                f"the delta changes tensors whose parts {num_holders} ranks each "
                f"should hold, and the ranks that hold the same parts are {ranks}"
            )
        if len(set(terms_of.values())) > 1:
            return WeightsMismatch(
                f"ranks {ranks} hold the same parts of tensors, and do not all serve "
                "the same weights or did not receive the same changes",
                remedy="Send the whole version.",
            )
    return None


def _by_stage(told: Iterable[Told]) -> dict[tuple[int, ...], list[Told]]:
    """The shares of ranks that expect the same sum.

    Ranks of a pipeline stage expect the same, and each stage has other tensors. A rank
    that received another delta expects something else, which its own share is not.
    """
    stages: dict[tuple[int, ...], list[Told]] = {}
    for each in told:
        stages.setdefault(tuple(each[NUM : 2 * NUM]), []).append(each[:NUM])
    return stages
