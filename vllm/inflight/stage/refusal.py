"""A refusal: every tensor that cannot be accepted, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        facts = [(name, shape, dtype) for name, (shape, dtype) in unknown.items()]
        parts.append(f"unknown: {describe_unknown(facts, known)}")
    parts += [f"{name}: {why}" for name, why in wrong.items()]
    if absent:
        parts.append(f"missing: {', '.join(absent[:MAX_ABSENT])}")
    tensors = [*unknown, *wrong]
    tensors += [name for name in absent if name not in tensors]
    count = len(tensors)
    return WeightsMismatch(
        f"{count} tensor{'s' * (count != 1)} of the update cannot be accepted; "
        + "; ".join(parts[:MAX_PARTS]),
        tensors=tensors,
    )
