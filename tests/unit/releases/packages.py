"""Small packages, which stand for releases of vLLM and for ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from tests.releases.release import Release


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write modules (`vllm.engine` → text) into a folder."""
    names = set(files)
    for module, text in files.items():
        is_package = any(other.startswith(f"{module}.") for other in names)
        parts = module.split(".")
        place = (
            folder.joinpath(*parts, "__init__.py")
            if is_package
            else (folder.joinpath(*parts[:-1], f"{parts[-1]}.py"))
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(dedent(text))
    return folder


def release(
    room: Path,
    name: str,
    theirs: Mapping[str, str],
    ours: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Release:
    """A release with these modules, and a package of ours beside it."""
    folder = write(room / name, {"vllm": "", **theirs})
    beside = write(room / "ours", ours or {})
    (beside / "vllm" / "inflight").mkdir(parents=True, exist_ok=True)
    return Release(name, folder, beside, names or {})
