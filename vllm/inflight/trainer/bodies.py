"""The tensors of a snapshot as bodies of requests, for engines that share no files.

A body is JSON for `/update_weights_from_tensor`, and one chunk of an update. In it is a
safetensors file in base64, with some of the tensors.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from vllm.inflight.errors import Malformed
from vllm.inflight.trainer.snapshot import Snapshot, mapped

BODY_BYTES = 64 << 20
"""Bytes of tensors from which the next body begins. A body is in memory as a whole, on
both sides."""

MAX_TENSOR_BYTES = 760 << 20
"""Most bytes of one tensor, since a server takes bodies of up to 1 GiB, with base64."""

HEADER_UNIT = 24
"""Of bytes before the tensors: their start is aligned, and base64 needs no padding."""


def bodies(snapshot: Snapshot, update_id: str) -> Iterator[bytes]:
    """The bodies of one update, in the order of their chunks.

    Raises:
        Malformed: a tensor is too large for a body.

    """
    header, start = snapshot.header()
    for name, entry in header.items():
        if (size := _size(entry)) > MAX_TENSOR_BYTES:
            raise Malformed(
                f"{name!r} has {size} bytes, and a request has room for "
                f"{MAX_TENSOR_BYTES}: publish with wire='disk', or send over NCCL"
            )
    memory = memoryview(mapped(snapshot.owner))[start:]
    for chunk, group in enumerate(_groups(header)):
        first = min(entry["data_offsets"][0] for entry in group.values())
        end = max(entry["data_offsets"][1] for entry in group.values())
        said = json.dumps({"update_id": update_id, "chunk": chunk})
        yield b"".join(
            (
                said[:-1].encode(),
                b', "serialized_named_tensors": ["',
                b64encode(_header(group, first)),
                b64encode(memory[first:end]),
                b'"]}',
            )
        )


def _groups(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries whose tensors follow one another in the file, in groups for one body."""
    group: dict[str, Any] = {}
    num_bytes = 0
    for name, entry in header.items():
        if group and num_bytes + _size(entry) > BODY_BYTES:
            yield group
            group, num_bytes = {}, 0
        group[name] = entry
        num_bytes += _size(entry)
    if group:
        yield group


def _header(group: dict[str, Any], first: int) -> bytes:
    """The header of a safetensors file with these tensors alone.

    Args:
        group: their entries in the snapshot.
        first: the offset in the snapshot of the first one.

    """
    moved = {
        name: entry | {"data_offsets": [at - first for at in entry["data_offsets"]]}
        for name, entry in group.items()
    }
    text = json.dumps(moved).encode()
    size = -(-(8 + len(text)) // HEADER_UNIT) * HEADER_UNIT
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def _size(entry: dict[str, Any]) -> int:
    first, end = entry["data_offsets"]
    return int(end - first)
