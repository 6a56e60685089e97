"""Fields of other releases of vLLM that 0.32 does not have.

Clients of those releases still send these fields. A field is ignored if its value asks
for what happens here anyway. Any other value is rejected with the field's name and a
remedy. A field of no release of vLLM stays unknown, and is rejected as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.inflight.errors import Malformed


@dataclass(frozen=True, slots=True)
class ReleaseField:
    """One field of a call.

    Attributes:
        releases: the releases of vLLM that have the field.
        meaning: its meaning there.
        harmless: the values that ask for what happens here anyway, beside `None`.
        remedy: what a client does that needs another value.

    """

    releases: str
    meaning: str
    harmless: tuple[Any, ...]
    remedy: str


_CHECKPOINT = "whether tensors have the names and shapes of the checkpoint"
_AS_SAVED = "send the tensors in checkpoint format"
_WHOLE = "send whole tensors"
_AT_INIT = "give it in init_info, which is where vLLM 0.28 and later take it"

START: Mapping[str, ReleaseField] = {
    "is_checkpoint_format": ReleaseField(
        "0.21 to 0.24", _CHECKPOINT, (True,), _AS_SAVED
    ),
}
"""Fields of `start_weight_update`."""

UPDATE_INFO: Mapping[str, ReleaseField] = {
    "is_checkpoint_format": ReleaseField(
        "0.16 to 0.20", _CHECKPOINT, (True,), _AS_SAVED
    ),
    "update_kind": ReleaseField(
        "0.23, 0.24", "whether tensors are whole or sparse", ("dense",), _WHOLE
    ),
    "num_updates_list": ReleaseField(
        "0.23, 0.24", "how many elements of each tensor are sent", (), _WHOLE
    ),
    "packed": ReleaseField(
        "0.16 to 0.27", "whether tensors travel in buckets", (), _AT_INIT
    ),
    "packed_buffer_size_bytes": ReleaseField(
        "0.16 to 0.27", "how large a bucket is", (), _AT_INIT
    ),
    "packed_num_buffers": ReleaseField(
        "0.16 to 0.27", "how many buckets there are", (), _AT_INIT
    ),
}
"""Fields of `update_info` in `update_weights`.

The last three describe the transport. Their harmless value is the one that the
transport was initialised with.
"""


def settled(
    body: Mapping[str, Any],
    table: Mapping[str, ReleaseField],
    *,
    known: frozenset[str] = frozenset(),
    opened_with: object = None,
) -> dict[str, Any]:
    """Remove the fields of `table` from `body`.

    Args:
        body: the fields of a call.
        table: the fields of other releases in this call.
        known: fields that the reader of `body` knows; they stay.
        opened_with: an object whose attributes are harmless values too.

    Returns:
        The rest of `body`.

    Raises:
        Malformed: a field of `table` has a value that is not harmless.

    """
    rest = dict(body)
    for name, older in table.items():
        if name not in rest or name in known:
            continue
        value = rest.pop(name)
        harmless = older.harmless
        if hasattr(opened_with, name):
            harmless = (*harmless, getattr(opened_with, name))
        if value is None or any(_is_same(value, each) for each in harmless):
            continue
        raise Malformed(
            f"{name} cannot be {value!r:.80} here (a field of vLLM {older.releases}: "
            f"{older.meaning}): {older.remedy}, and leave the field out"
        )
    return rest


def _is_same(value: object, other: object) -> bool:
    """Whether the values are equal and of one type: 1 is not True."""
    return type(value) is type(other) and bool(value == other)
