"""The envelopes of several engines: what they amount to, as one reply."""

from __future__ import annotations

from typing import Any

from vllm.inflight.api.door import Reply
from vllm.inflight.errors import InflightError, WeightsMismatch

ADDED = (
    *("num_running", "num_waiting", "num_aborted", "num_retracted"),
    *("bytes", "parameters", "dropped"),
    *("num_tensors", "num_parameters", "num_unknown", "num_different"),
)
"""What is counted in a reply, or has counts in it: of several engines the sum is told.

Not among them are numbers that every engine has alike: an epoch, the leases that ended.
"""


def is_partial(envelopes: list[Reply]) -> bool:
    """Whether some engines did it and some did not."""
    return len({"error" in envelope for envelope in envelopes}) > 1


def merged(envelopes: list[Reply]) -> Reply:
    """One engine's reply; of several, the first's with all under `engines`.

    Counts are those of all together. Raises the first engine's error, if any has one.
    """
    errors = {
        index: InflightError.from_dict(envelope["error"])
        for index, envelope in enumerate(envelopes)
        if "error" in envelope
    }
    for index, error in errors.items():
        if len(envelopes) > 1:
            error.message = f"engine {index} of {len(envelopes)}: {error.message}"
            _add_refused(error, [e for n, e in errors.items() if n != index])
        raise error
    replies: list[Reply] = [envelope["ok"] for envelope in envelopes]
    if len(replies) == 1:
        return replies[0]
    sums = {
        name: _added([reply[name] for reply in replies])
        for name in ADDED
        if all(name in reply for reply in replies)
    }
    return replies[0] | sums | {"engines": replies}


def _add_refused(error: InflightError, others: list[InflightError]) -> None:
    """Name in a refusal the tensors that other engines alone have refused."""
    if not isinstance(error, WeightsMismatch):
        return
    for other in others:
        more = [name for name in other.tensors if name not in error.tensors]
        if isinstance(other, WeightsMismatch) and more:
            error.tensors += more
            error.num_tensors = max(
                error.num_tensors, other.num_tensors, len(error.tensors)
            )
            error.message += f"; another engine: {other.message}"


def _added(found: list[Any]) -> Any:
    """The sum of counts, of each of those in an object; what else it is, the first.

    None if one has none: not all of them did it then.
    """
    first = found[0]
    if None in found:
        return None
    if isinstance(first, dict):
        return {n: _added([each[n] for each in found if n in each]) for n in first}
    is_count = isinstance(first, int) and not isinstance(first, bool)
    return sum(found) if is_count else first
