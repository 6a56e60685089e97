"""Deltas in files: a safetensors file with the parts, and metadata beside them.

The tensors are `delta.0.table`, `delta.0.data`, `delta.1.table` and so on, all uint8.
Any tool that opens safetensors files can open such a file.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from vllm.inflight.delta.part import Part
from vllm.inflight.errors import Malformed

MAX_HEADER_BYTES = 100_000_000
"""Largest header of a file; safetensors' own limit. It is checked before reading."""
METADATA = "__metadata__"
KINDS = ("table", "data")


def save(
    path: str | os.PathLike[str], parts: Iterable[Part], metadata: Mapping[str, str]
) -> None:
    """Write a delta into a file, which appears when it is complete.

    Args:
        path: the file; an older one is replaced.
        parts: the parts of the delta.
        metadata: the file's metadata, as the delta's manifest in JSON.

    """
    tensors = [tensor for part in parts for tensor in (part.table, part.data)]
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for number, tensor in enumerate(tensors):
        offsets = [end, end := end + tensor.numel()]
        entry = {"dtype": "U8", "shape": [tensor.numel()], "data_offsets": offsets}
        header[_name(number)] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{whole.name}.", dir=whole.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o666 & ~_umask())
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                file.write(tensor.cpu().numpy().data)
        os.replace(name, whole)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The bits that new files do not get; a temporary file gets none of them."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def load(path: str | os.PathLike[str]) -> tuple[list[Part], dict[str, str]]:
    """Read the parts and the metadata of a file that `save` wrote.

    The parts are not checked yet.

    Raises:
        Malformed: the file is not such a file; the message says why.

    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise Malformed(f"the delta file {path} cannot be read: {error}") from error


def _read(file: BufferedReader, size: int) -> tuple[list[Part], dict[str, str]]:
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"its header has {length} bytes")
    header = json.loads(_exactly(file, length))
    metadata = header.pop(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("its header is not one of a safetensors file")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not texts")
    tensors = []
    end = 0
    for number in range(len(header)):
        entry = header[_name(number)]
        start, stop = entry["data_offsets"]
        wanted = {"dtype": "U8", "shape": [stop - start], "data_offsets": [end, stop]}
        if entry != wanted or not end <= stop <= size - 8 - length:
            raise ValueError(f"the entry of {_name(number)} is not in order")
        tensor = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        if file.readinto(tensor.numpy().data) != stop - start:
            raise ValueError("it ends too early")
        tensors.append(tensor)
        end = stop
    if len(tensors) % 2 or end != size - 8 - length:
        raise ValueError("it has a table without data, or bytes that belong to nothing")
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [Part(table, data) for table, data in pairs], dict(metadata)


def _name(number: int) -> str:
    """The name of a tensor of the file: tables and data in turn."""
    return f"delta.{number // 2}.{KINDS[number % 2]}"


def _exactly(file: BufferedReader, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it ends too early")
    return data
