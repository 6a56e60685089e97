"""Fields that other releases of vLLM take, and 0.32 does not.

A client that was written for another release still sends them. A field of this table is
ignored where its value asks for what happens here anyway. Any other value is refused by
name, with a remedy. A field that is in no release of vLLM and not ours stays unknown.
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
        releases: the releases of vLLM that take it.
        meaning: what it says there.
        harmless: the values that ask for what happens here anyway. `None` is always
            one of them.
        remedy: what to do for a client that needs another value.

    """

    releases: str
    meaning: str
    harmless: tuple[Any, ...]
    remedy: str


_CHECKPOINT = "whether tensors have the names and shapes of the checkpoint"
_AS_SAVED = "send the tensors as the checkpoint has them"
_WHOLE = "send whole tensors"
_AT_INIT = "give it in init_info, which is where vLLM 0.28 and later take it"

START: Mapping[str, ReleaseField] = {
    "is_checkpoint_format": ReleaseField(
        "0.21 to 0.24", _CHECKPOINT, (True,), _AS_SAVED
    ),
}
"""Of `start_weight_update`."""

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
"""Of `update_info` in `update_weights`.

The last three describe the wire. A transport that has such an attribute takes the value
that it was opened with.
"""


def settled(
    body: Mapping[str, Any],
    table: Mapping[str, ReleaseField],
    *,
    known: frozenset[str] = frozenset(),
    opened_with: Any = None,
) -> dict[str, Any]:
    """`body` without the fields of `table`.

    Args:
        body: the fields of a call.
        table: those of other releases, for this call.
        known: fields that whoever reads `body` knows, which stay in it.
        opened_with: an object whose attributes are harmless values as well.

    Raises:
        Malformed: a field of `table` asks for what cannot be had here.

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


def _is_same(value: Any, other: Any) -> bool:
    """Equal and of one type: 1 is not True."""
    return type(value) is type(other) and bool(value == other)
