"""Files of the engine's host: which of them an update may read.

A path is resolved before it is judged, symlinks and `..` included, and what is opened
is what was judged. Outside of the allowed folders nothing is looked at, so that a
refusal does not tell what exists there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.inflight.errors import Forbidden, Malformed
from vllm.inflight.update import MAX_MANIFEST_BYTES


def resolved(path: Path, allowed: str) -> Path:
    """Where `path` leads.

    Args:
        path: as a caller gave it.
        allowed: folders with `:` between them; empty allows every path.

    Raises:
        Forbidden: it leads out of them.
        Malformed: it cannot be a path.

    """
    try:
        real = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a loop is the last
        raise Malformed(f"{str(path)!r:.300} is no path: {error}") from None
    folders = [Path(folder).resolve() for folder in allowed.split(":") if folder]
    if folders and not any(map(real.is_relative_to, folders)):
        raise Forbidden(
            f"{str(path)!r:.300} leads out of the folders that an update may read "
            f"here: {allowed} (--inflight-allowed-paths)"
        )
    return real


def resolved_folder(path: Path, allowed: str) -> Path:
    """Where the folder `path` leads, if each entry in it may be read as well.

    For a reader that opens files of the folder by itself. What it opens is not known
    here, so each entry is judged.

    Args:
        path: as a caller gave it.
        allowed: folders with `:` between them.

    Raises:
        Forbidden: it is not absolute, or it or an entry leads out of them.
        Malformed: it cannot be a path.

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
    except OSError:  # it is not there, or no folder: its reader says so
        entries = []
    for entry in entries:
        resolved(entry, allowed)
    return folder


def existing(path: Path, allowed: str) -> Path:
    """The file that `path` leads to; raises `Malformed` if there is none."""
    real = resolved(path, allowed)
    try:
        is_there = real.is_file()
    except OSError:  # too long a name, or a folder that is closed to us
        is_there = False
    if not is_there:
        raise Malformed(f"{path!s:.300} does not exist on the engine's host")
    return real


def read_json(file: Path) -> Any:
    """What a JSON file says; raises `Malformed` if it is none, or is too large."""
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise Malformed(f"{file} is larger than {MAX_MANIFEST_BYTES} bytes")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Malformed(f"{file} is no JSON: {error}") from None
