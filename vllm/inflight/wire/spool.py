"""Tensors that came in a request's body, laid where every rank of this host can read.

Each entry is a safetensors file, or with `flattened_bucket` one with a single tensor of
bytes and, under the metadata key `metadata`, the JSON list of what it is made of. In
memory they become plain safetensors files, which the backend `local` reads.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm.inflight.errors import EngineFault, Malformed
from vllm.inflight.trainer.parcel import sweep
from vllm.inflight.wire import pickled
from vllm.inflight.wire.local import SHARED_MEMORY

PREFIX = "vllm-inflight-tensors-"
BUCKET, PARTS = "flattened_tensor", "metadata"
FORMATS = (None, "flattened_bucket")


@contextmanager
def spooled(
    entries: Sequence[Any], load_format: str | None, *, allow_pickle: bool
) -> Iterator[list[str]]:
    """The names of files in shared memory, one per entry; gone at the end.

    Raises:
        Malformed: an entry is not what its format says.
        EngineFault: shared memory has no room for them.

    """
    sweep(PREFIX)  # what a server that was killed has left
    with ExitStack() as files:
        names = []
        for number, entry in enumerate(entries):
            where = f"serialized_named_tensors[{number}]"
            data = _decoded(entry, where)
            if pickled.is_pickle(data) and not allow_pickle:
                raise Malformed(
                    f"{where} is a pickle, which can run anything; send a "
                    "safetensors file, or start with --inflight-pickled-tensors on"
                )
            try:
                file = files.enter_context(
                    tempfile.NamedTemporaryFile(
                        dir=SHARED_MEMORY, prefix=PREFIX, suffix=".safetensors"
                    )
                )
                fcntl.flock(file, fcntl.LOCK_EX)  # tells `sweep` that we are alive
                _lay(data, Path(file.name), load_format, where)
            except OSError as error:
                raise EngineFault(
                    f"{where} could not be written to {SHARED_MEMORY}: {error}"
                ) from error
            names.append(Path(file.name).name)
        yield names


def _decoded(entry: Any, where: str) -> bytes:
    try:
        return base64.b64decode(entry, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise Malformed(f"{where} is not base64") from None


def _lay(data: bytes, path: Path, load_format: str | None, where: str) -> None:
    """Write what was sent as a plain file; it stays the file that is locked."""
    if pickled.is_pickle(data):
        whole = pickled.tensors(data, where)
        path.write_bytes(_file(_cut(whole, load_format, where), where))
    else:
        path.write_bytes(data)
        _check(path, load_format, where)


def _check(path: Path, load_format: str | None, where: str) -> None:
    """Open a file that was sent; a bucket is written again as what is in it."""
    try:
        with safe_open(path, framework="pt") as file:
            if load_format is None:
                return
            if list(file.keys()) != [BUCKET]:
                raise Malformed(f"{where}: a bucket has one tensor, {BUCKET!r}")
            whole: dict[str, Any] = {
                BUCKET: file.get_tensor(BUCKET),
                PARTS: json.loads((file.metadata() or {}).get(PARTS, "null")),
            }
    except (SafetensorError, ValueError) as error:
        raise Malformed(f"{where} is not a whole safetensors file: {error}") from None
    path.write_bytes(_file(_cut(whole, load_format, where), where))


def _file(tensors: dict[str, torch.Tensor], where: str) -> bytes:
    try:
        return save(tensors)
    except (SafetensorError, ValueError, KeyError) as error:
        # Half a character in a name, or a dtype that such files do not have.
        raise Malformed(f"{where} cannot be written: {error}") from None


def _cut(whole: Any, load_format: str | None, where: str) -> dict[str, torch.Tensor]:
    """What is in a bucket, or in a list of pairs."""
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        if name in tensors:
            raise Malformed(f"{where}: {name!r:.300} comes twice")
        tensors[name] = tensor

    if load_format is None:
        for name, tensor in whole:
            add(name, tensor.contiguous().clone())
        return tensors
    bucket, parts = whole[BUCKET], whole[PARTS]
    if not isinstance(parts, list):
        raise Malformed(f"{where}: the key {PARTS!r} must hold a list")
    left = bucket.numel()
    for part in parts:
        try:
            dtype = getattr(torch, str(part["dtype"]).removeprefix("torch."))
            # Older buckets are of the tensors' dtype and count elements.
            name, start, end = str(part["name"]), part["start_idx"], part["end_idx"]
            left -= end - start
            if not (0 <= start <= end <= bucket.numel() and left >= 0):
                raise TypeError
            cut = bucket[start:end].clone().view(dtype).reshape(tuple(part["shape"]))
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise Malformed(
                f"{where}: {part!r:.300} is no part of the bucket"
            ) from error
        add(name, cut)
    return tensors
