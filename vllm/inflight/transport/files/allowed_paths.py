"""Which files of the engine's host an update may read.

A path is resolved, with symlinks and `..`, before it is checked, and the resolved path
is opened. Nothing outside of the allowed folders is read, so a rejection does not show
what exists there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.inflight.errors import Forbidden, Malformed
from vllm.inflight.update import MAX_MANIFEST_BYTES

INDEX = "model.safetensors.index.json"
"""The file of a checkpoint that says which file has which tensor."""


def resolved(path: Path, allowed: str) -> Path:
    """The absolute path of `path`, with symlinks resolved.

    Args:
        path: as a caller gave it.
        allowed: the allowed folders, separated by `:`; empty allows every path.

    Raises:
        Forbidden: the path leads out of the allowed folders.
        Malformed: this cannot be a path.

    """
    try:
        real = path.resolve()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: a loop of symlinks
        raise Malformed(f"{str(path)!r:.300} is no path: {error}") from None
    folders = [Path(folder).resolve() for folder in allowed.split(":") if folder]
    if folders and not any(map(real.is_relative_to, folders)):
        raise Forbidden(
            f"{str(path)!r:.300} leads out of the folders that an update may read "
            f"here: {allowed} (--inflight-allowed-paths)"
        )
    return real


def resolved_folder(path: Path, allowed: str) -> Path:
    """The absolute path of a folder of which every entry may be read.

    This is for a reader that opens files of the folder itself. Every entry is checked,
    because it is not known which ones the reader opens.

    Args:
        path: as a caller gave it.
        allowed: the allowed folders, separated by `:`.

    Raises:
        Forbidden: the path is not absolute, or the folder or an entry leads out of the
            allowed folders.
        Malformed: this cannot be a path.

    """
    if not path.is_absolute():
        raise Forbidden(
            f"{str(path)!r:.300} is not an absolute path, and may lead out of the "
            f"folders that an update may read here: {allowed} "
            "(--inflight-allowed-paths)"
        )
    folder = resolved(path, allowed)
    try:
        entries = sorted(folder.iterdir())
    except OSError:  # there is no such folder; the reader reports it
        entries = []
    for entry in entries:
        resolved(entry, allowed)
    return folder


def existing(path: Path, allowed: str) -> Path:
    """The resolved path of a file; raises `Malformed` if there is no such file."""
    real = resolved(path, allowed)
    try:
        is_there = real.is_file()
    except OSError:  # the name is too long, or a folder is not readable
        is_there = False
    if not is_there:
        raise Malformed(f"{path!s:.300} does not exist on the engine's host")
    return real


def read_json(file: Path) -> Any:
    """The content of a JSON file; raises `Malformed` if it is invalid or too large."""
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise Malformed(f"{file} is larger than {MAX_MANIFEST_BYTES} bytes")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Malformed(f"{file} is no JSON: {error}") from None


def shards(index: Path) -> list[str]:
    """The file names in a checkpoint's index; raises `Malformed` if it is invalid."""
    body = read_json(index)
    places = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(places, dict) or not places:
        raise Malformed(f"{index} is not a checkpoint index")
    names = set()
    for name in places.values():
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise Malformed(f"{index} names files outside its directory: {name!r:.300}")
        names.add(name)
    return sorted(names)
