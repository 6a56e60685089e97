"""Files that lie about themselves: no whole safetensors file among them."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from vllm.inflight.transport.files.bucket_reader import FileReader
from vllm.inflight.transport.files.safetensors_files import TensorFiles


def header(tensors: dict[str, Any], data: bytes = b"") -> bytes:
    """A file of these entries."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": b"",
    "a length and no more": struct.pack("<Q", 8),
    "longer than any memory": struct.pack("<Q", 1 << 63) + b"{}",
    "longer than the file": struct.pack("<Q", 1 << 20) + b"{}",
    "no object": header([]),  # type: ignore[arg-type]
    "not JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "past the end": header({"a": F32 | {"data_offsets": [0, 1 << 40]}}, bytes(8)),
    "backwards": header({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8)),
    "negative": header({"a": F32 | {"data_offsets": [-8, 0]}}, bytes(8)),
    "one over another": header({"a": F32, "b": F32}, bytes(8)),
    "a hole": header({"a": F32 | {"data_offsets": [8, 16]}}, bytes(16)),
    "too short": header({"a": F32 | {"shape": [3]}}, bytes(8)),
    "more than there is": header({"a": F32}, bytes(16)),
    "overflowing": header({"a": F32 | {"shape": [1 << 62, 1 << 62]}}, bytes(8)),
    "no such dtype": header({"a": F32 | {"dtype": "Q4"}}, bytes(8)),
    "a pickle": b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
}


def cut_when_begun(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Have a file lose its second half as soon as it is being read for a GPU."""
    begin = FileReader.begin

    def begin_and_cut(self: FileReader, files: TensorFiles) -> None:
        begin(self, files)
        os.truncate(file, file.stat().st_size // 2)

    monkeypatch.setattr(FileReader, "begin", begin_and_cut)
