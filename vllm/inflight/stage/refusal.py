"""A refusal: every tensor that cannot be accepted, and what is wrong with each."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.names import describe_unknown
from vllm.inflight.stage.shadow import Known

MAX_ABSENT, MAX_PARTS = 8, 12
"""Spelled out in the message; the list of tensors is complete."""


def refusal(
    unknown: Mapping[str, tuple[list[int], str]],
    wrong: Mapping[str, str],
    absent: Sequence[str],
    known: Known,
) -> WeightsMismatch:
    """The error that names them all.

    Args:
        unknown: tensors that the model has no place for, with shape and dtype.
        wrong: tensors and what is wrong with them.
        absent: tensors that did not arrive.
        known: what the model has places for, to suggest the nearest.

    """
    parts: list[str] = []
    if unknown:
        facts = [(n, shape, dtype) for n, (shape, dtype) in unknown.items()]
        parts.append(f"unknown: {describe_unknown(facts[:MAX_PARTS], known)}")
    parts += [f"{name}: {why}" for name, why in wrong.items()]
    if absent:
        parts.append(f"missing: {', '.join(absent[:MAX_ABSENT])}")
    tensors = list(dict.fromkeys([*unknown, *wrong, *absent]))
    count = len(tensors)
    return WeightsMismatch(
        f"{count} tensor{'s' * (count != 1)} of the update cannot be accepted; "
        + "; ".join(parts[:MAX_PARTS]),
        tensors=tensors,
    )


def require_matches(patterns: Sequence[str], names: Iterable[str]) -> None:
    """Raise `WeightsMismatch` naming the patterns that match none of `names`."""
    known = list(names)
    idle = [p for p in patterns if not fnmatch.filter(known, p)]
    if idle:
        raise WeightsMismatch(
            f"no tensor matches {', '.join(idle[:MAX_ABSENT])} of the subset",
            tensors=idle,
        )
