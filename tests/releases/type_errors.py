"""Errors of mypy in our package, over the files of a release of vLLM.

They tell of attributes that are gone, and of calls whose arguments are gone. There are
such errors in the reference release, too, since upstream is partly untyped. So only
errors that are not in the reference release count.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.releases.checks import BREAKS, FITS, Finding, made_by_ours
from tests.releases.release import OURS, UPSTREAM, Release, is_meant
from tests.releases.wheel import RELEASES
from vllm.inflight.patch.records.record import Patch
from vllm.inflight.releases.table import ADAPTERS

CONFIGURATION = f"""\
[mypy]
python_version = 3.11
mypy_path = .
namespace_packages = True
strict = True
allow_untyped_calls = True
allow_subclassing_any = True
warn_return_any = False
warn_unused_ignores = False
follow_imports = skip
ignore_missing_imports = True
hide_error_context = True
[mypy-vllm.*]
follow_imports = silent
[mypy-{OURS}.*]
follow_imports = normal
[mypy-{UPSTREAM}]
implicit_reexport = True
[mypy-{OURS}.ops.triton_kernels]
ignore_errors = True
[mypy-{OURS}.delta.triton_kernels]
ignore_errors = True
"""

ROOM = RELEASES / "types"
"""The folder of the links and of mypy's caches."""

ERROR = re.compile(r"^(?P<file>[^:\n]+\.py):(?P<line>\d+): error: (?P<told>.*)$", re.M)


MISSING = re.compile(r'"(?P<kind>\w+)" has no attribute "(?P<name>\w+)"')


def new_errors(
    release: Release, reference: Release, records: Iterable[Patch]
) -> Iterator[Finding]:
    """Errors of types that the reference release does not have.

    It is no error that a class lacks an attribute that `records` add, or that one of
    the patched classes has, which are derived of it.
    """
    records = list(records)
    known = Counter(_without(_told(reference), _had(reference, records)))
    now = Counter(_without(_told(release), _had(release, records)))
    for subject, number in sorted((now - known).items()):
        told = f"({number} more than in vLLM {reference.name})"
        yield Finding("types", subject, BREAKS, told)
    for subject in sorted(now & known):
        yield Finding("types", subject, FITS)


def _had(release: Release, records: list[Patch]) -> set[str]:
    """`Class.name` of the attributes that our code may use on objects of a class."""
    meant = [each for each in records if is_meant(each, release)]
    had = {each.target.partition(":")[2] for each in meant if each.expects is None}
    for owner in {each.target.rpartition(".")[0] for each in meant}:
        kind = release.tree.find(owner) if ":" in owner else None
        if kind is None or kind.kind != "class":
            continue
        names = release.tree.members(kind).keys() | {
            each.target.rpartition(".")[2]
            for each in meant
            if each.target.startswith(f"{owner}.")
        }
        for base in release.tree.line(kind)[1:]:
            had.update(f"{base.name}.{name}" for name in names)
    # An adapter uses methods of the class of ours that is derived of it.
    made = made_by_ours(release)
    for place in {place for entries in ADAPTERS.values() for place in entries.values()}:
        adapter = place.partition(":")[2]
        had.update(f"{adapter}.{name}" for name in made)
    return had


def _without(errors: list[str], had: set[str]) -> Iterator[str]:
    """The errors, but those about attributes that objects have."""
    for error in errors:
        found = MISSING.search(error)
        if found is None or f"{found['kind']}.{found['name']}" not in had:
            yield error


@cache
def _told(release: Release) -> list[str]:
    """`file: error` of every error, without lines, which change with every edit."""
    told = []
    for error in ERROR.finditer(_run_mypy(release)):
        file = error["file"]
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        # The check of names tells of `upstream.py`.
        if module != UPSTREAM and not release.is_left_out(module, int(error["line"])):
            told.append(f"{file}: {error['told']}")
    return told


def _run_mypy(release: Release) -> str:
    folder = overlay(release)
    cache = folder.parent / f"mypy-{release.name}"
    others = sorted(folder.parent.glob("mypy-*"))
    if others and not cache.exists():
        # Most files are as in another release, and mypy compares their contents.
        shutil.copytree(others[-1], cache)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", "mypy.ini"),
            *("--cache-dir", str(cache)),
            *("--package", OURS),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"mypy could not run: {done.stdout}{done.stderr}")
    return done.stdout


def overlay(release: Release) -> Path:
    """A folder with links to the files of a release, and to ours beside them."""
    folder = ROOM / release.name
    shutil.rmtree(folder, ignore_errors=True)
    theirs, ours = release.folder / "vllm", release.ours / "vllm" / "inflight"
    place = folder / "vllm" / "inflight"
    place.mkdir(parents=True)
    for entry in theirs.iterdir():
        if entry.name not in ("inflight", "__pycache__"):
            (folder / "vllm" / entry.name).symlink_to(entry.resolve())
    for entry in ours.iterdir():
        if entry.name not in ("upstream.py", "__pycache__"):
            (place / entry.name).symlink_to(entry.resolve())
    (place / "upstream.py").write_text(_upstream(release, ours / "upstream.py"))
    (folder / "mypy.ini").write_text(CONFIGURATION)
    return folder


def _upstream(release: Release, file: Path) -> str:
    """`upstream.py` as plain imports, which mypy reads."""
    places = {}
    for node in ast.walk(
        ast.parse(file.read_text()) if file.exists() else ast.Module()
    ):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            places |= {
                a.name: f"{node.module}:{a.name}" for a in node.names if a.asname
            }
    places |= release.names
    lines = []
    for name, place in places.items():
        module, _, attribute = place.partition(":")
        lines.append(f"from {module} import {attribute} as {name}")
    return "\n".join(lines) + "\n"
