"""Tensors of a request body, put where every rank can read them.

Each entry of the request is a safetensors file. With `flattened_bucket`, that file has
a single tensor of bytes. Its metadata key `metadata` holds a JSON list of the tensors
in it. Entries become plain safetensors files in shared memory, which the backend
`local` reads.

A pickle may have GPU memory of the sender in place of bytes. Then nothing is written,
and a rank reads the memory itself (cuda_ipc/receiver_engine.py).
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from vllm.inflight.errors import EngineFault, Malformed
from vllm.inflight.trainer.snapshot import sweep, write_tensors
from vllm.inflight.transport.cuda_ipc import torch_exports
from vllm.inflight.transport.cuda_ipc.torch_exports import Counter, TorchExport
from vllm.inflight.transport.files.receiver_engine import SHARED_MEMORY
from vllm.inflight.transport.sglang import safe_unpickler

PREFIX = "vllm-inflight-tensors-"
BUCKET, PARTS = "flattened_tensor", "metadata"

PIECE_BYTES = 1 << 18
"""How many bytes are decoded at once. That takes less than a millisecond, because the
event loop of all streams needs the GIL meanwhile."""

LONGEST_ESCAPE = 6  # the bytes of a unicode escape


@dataclass(frozen=True, slots=True)
class LongText:
    """A JSON string that was not decoded: `raw[start:end]`, with escapes."""

    raw: bytes | bytearray
    start: int
    end: int

    def pieces(self) -> Iterator[bytes]:
        """Its text as UTF-8, in pieces; raises `ValueError` for an invalid escape."""
        at = self.start
        while at < self.end:
            stop = min(self.end, at + PIECE_BYTES)
            piece = bytes(self.raw[at:stop])
            if b"\\" in piece:
                # Do not cut within an escape, nor between two backslashes.
                cut = piece.rfind(b"\\", -LONGEST_ESCAPE)
                while stop < self.end and cut > 0 and piece[cut - 1 : cut] == b"\\":
                    cut -= 1
                if stop < self.end and cut > 0:
                    piece = piece[:cut]
                at += len(piece)
                text: str = json.loads(b'"' + piece + b'"')
                yield text.encode()
                continue
            at = stop
            yield piece


@dataclass(frozen=True, slots=True)
class RequestTensors:
    """The tensors of one request."""

    transport: str
    """What a rank reads them with: `local` or `exported`."""
    infos: list[dict[str, Any]]
    """One `update_info` for each entry."""
    names: frozenset[str]
    """The names of all tensors."""


@contextmanager
def spooled(
    entries: Sequence[Any], load_format: str | None, *, allow_pickle: bool
) -> Iterator[RequestTensors]:
    """A context in which the tensors of a request can be read.

    At its end, files in shared memory are removed, and GPU memory is given back to the
    sender.

    Args:
        entries: `serialized_named_tensors` of the request: base64 as `str`, or
            `LongText`.
        load_format: None, or `flattened_bucket`.
        allow_pickle: whether an entry may be a pickle.

    Raises:
        Malformed: an entry does not have its format.
        EngineFault: shared memory has no room for the entries.

    """
    sweep(PREFIX)  # removes files that a killed server has left
    with ExitStack() as files:
        counters: list[Counter] = []
        files.callback(lambda: torch_exports.release(dict.fromkeys(counters)))
        infos: list[dict[str, Any]] = []
        names: set[str] = set()
        transports: set[str] = set()
        for number, entry in enumerate(entries):
            where = f"serialized_named_tensors[{number}]"
            try:
                file = files.enter_context(
                    tempfile.NamedTemporaryFile(
                        dir=SHARED_MEMORY, prefix=PREFIX, suffix=".safetensors"
                    )
                )
                fcntl.flock(
                    file, fcntl.LOCK_EX
                )  # the lock keeps `sweep` from removing the file
                _decode(entry, file, where)
                tensors = _lay(
                    file, load_format, where, counters if allow_pickle else None
                )
            except OSError as error:
                raise EngineFault(
                    f"{where} could not be written to {SHARED_MEMORY}: {error}"
                ) from error
            exports = _exports(tensors, where)
            if exports is None:
                infos.append({"shm": Path(file.name).name})
            else:
                infos.append(torch_exports.update_info(exports))
            names.update(tensors)
            transports.add("local" if exports is None else "exported")
            del tensors
        if len(transports) > 1:
            raise Malformed(
                "some of serialized_named_tensors have bytes, and others GPU memory"
            )
        yield RequestTensors(transports.pop(), infos, frozenset(names))


def _exports(tensors: dict[str, Any], where: str) -> dict[str, TorchExport] | None:
    """The tensors, if they are in GPU memory; None if they are in the file.

    Raises:
        Malformed: some are in GPU memory, and some are not.

    """
    exports = {n: t for n, t in tensors.items() if isinstance(t, TorchExport)}
    for name in exports:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise Malformed(f"{where}: {name!r:.300} is no text: {error}") from None
    if exports and len(exports) < len(tensors):
        raise Malformed(f"{where} has tensors with bytes, and others in GPU memory")
    return exports or None


def _decode(entry: object, file: IO[bytes], where: str) -> None:
    """Decode the base64 of `entry` into a file."""
    carry, is_over = b"", False
    try:
        if isinstance(entry, LongText):
            pieces = entry.pieces()
        elif isinstance(entry, str):
            pieces = iter([entry.encode()])
        else:
            raise ValueError("it is not a string")
        for piece in pieces:
            if is_over:
                raise ValueError("it goes on behind its end")
            piece = carry + piece
            whole = len(piece) // 4 * 4
            carry = piece[whole:]
            file.write(base64.b64decode(piece[:whole], validate=True))
            is_over = piece[:whole].endswith(b"=")
        if carry:
            raise ValueError("it is cut off")
    except (ValueError, binascii.Error):
        raise Malformed(f"{where} is not base64") from None
    file.flush()


def _lay(
    file: IO[bytes],
    load_format: str | None,
    where: str,
    counters: list[Counter] | None,
) -> dict[str, Any]:
    """Turn a decoded entry into a plain safetensors file, in the same locked file.

    Args:
        file: the entry.
        load_format: as in `spooled`.
        where: names the entry in errors.
        counters: gets the counters of GPU memory; None if the entry may be no pickle.

    Returns:
        the tensors by name. Only for those in GPU memory, which are not written, the
        values matter.

    """
    path = Path(file.name)
    if _is_pickle(file):
        if counters is None:
            raise Malformed(
                f"{where} is a pickle, which can run anything; send a "
                "safetensors file, or start with --inflight-pickled-tensors on"
            )
        whole = safe_unpickler.tensors(path.read_bytes(), where, counters)
        if isinstance(whole, dict) != (load_format is not None):
            found = "a bucket" if isinstance(whole, dict) else "a list of tensors"
            raise Malformed(
                f"{where} is {found}, and load_format is {load_format!r}; a bucket has "
                "load_format 'flattened_bucket', and a list has none"
            )
        tensors = _cut(whole, load_format, where)
        if _exports(tensors, where) is None:
            _write(file, tensors, where)
        else:
            file.truncate(0)
        return tensors
    return _check(file, load_format, where)


def _is_pickle(file: IO[bytes]) -> bool:
    """Whether a file is a pickle; see `safe_unpickler.is_pickle`."""
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(8)
    file.seek(max(0, size - 1))
    return safe_unpickler.is_pickle(first, file.read(1), size)


def _check(
    file: IO[bytes], load_format: str | None, where: str
) -> dict[str, torch.Tensor | None]:
    """Check a safetensors file; a bucket is replaced by the tensors in it."""
    try:
        with safe_open(file.name, framework="pt") as opened:
            if load_format is None:
                return dict.fromkeys(opened.keys())
            if list(opened.keys()) != [BUCKET]:
                raise Malformed(f"{where}: a bucket has one tensor, {BUCKET!r}")
            whole: dict[str, Any] = {
                BUCKET: opened.get_tensor(BUCKET),
                PARTS: json.loads((opened.metadata() or {}).get(PARTS, "null")),
            }
    except (SafetensorError, ValueError, RecursionError) as error:
        raise Malformed(f"{where} is not a whole safetensors file: {error}") from None
    tensors = _cut(whole, load_format, where)
    _write(file, tensors, where)
    return dict.fromkeys(tensors)


def _write(file: IO[bytes], tensors: dict[str, torch.Tensor], where: str) -> None:
    """Replace the content of a file by tensors."""
    file.truncate(0)
    try:
        write_tensors(file, tensors.items())
    except (Malformed, ValueError) as error:
        # A name with half a surrogate pair, or a dtype that safetensors lacks.
        raise Malformed(f"{where} cannot be written: {error}") from None
    file.flush()


def _cut(whole: Any, load_format: str | None, where: str) -> dict[str, Any]:
    """The tensors of a bucket, or of a list of (name, tensor), by name."""
    tensors: dict[str, Any] = {}

    def add(name: str, tensor: Any) -> None:
        if name in tensors:
            raise Malformed(f"{where}: {name!r:.300} comes twice")
        tensors[name] = tensor

    if load_format is None:
        for name, tensor in whole:
            is_here = isinstance(tensor, torch.Tensor)
            add(name, tensor.contiguous().clone() if is_here else tensor)
        return tensors
    bucket, parts = whole[BUCKET], whole[PARTS]
    if len(bucket.shape) != 1:
        # With more dimensions, a row would count as one element.
        raise Malformed(f"{where}: a bucket has one dimension, got {len(bucket.shape)}")
    if not isinstance(parts, list):
        raise Malformed(f"{where}: the key {PARTS!r} must hold a list")
    length = left = bucket.shape[0]
    for part in parts:
        try:
            dtype = getattr(torch, str(part["dtype"]).removeprefix("torch."))
            # Older buckets have the tensors' dtype, and indices count elements.
            name, start, end = str(part["name"]), part["start_idx"], part["end_idx"]
            left -= end - start
            if not (0 <= start <= end <= length and left >= 0):
                raise TypeError
            cut = _part(bucket, start, end, dtype, tuple(part["shape"]))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise Malformed(
                f"{where}: {part!r:.300} is no part of the bucket"
            ) from error
        add(name, cut)
    return tensors


def _part(
    bucket: Any, start: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Any:
    """The tensor in elements `start` to `end` of a bucket."""
    if isinstance(bucket, TorchExport):
        return bucket.cut(start, end, dtype, shape)
    return bucket[start:end].clone().view(dtype).reshape(shape)
