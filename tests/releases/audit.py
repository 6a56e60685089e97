"""Audit releases of vLLM: `python -m tests.releases.audit 0.33.0`.

The audit reads the Python files of a release, which it takes from the wheel. It neither
installs nor imports them. Without a release it audits all supported ones.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.releases import checks, records, type_errors, wheel
from tests.releases.checks import ABSENT, BREAKS, DIFFERS, FITS, Finding
from tests.releases.release import Release
from vllm.inflight import patch, upstream
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.patch.records.attributes import ATTRIBUTES
from vllm.inflight.patch.records.private_names import OVERRIDES, PRIVATES
from vllm.inflight.releases.table import REFERENCE, SUPPORTED

SETTLED = "settled"
"""The finding would break us, and an entry says how we deal with it."""

STATES = (FITS, DIFFERS, ABSENT, SETTLED, BREAKS)

OTHER_ROUTES = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/version")]
"""Routes of ours that are not in the table of control routes."""


def findings(release: Release, reference: Release) -> Iterator[Finding]:
    """What every check says of a release."""
    patches = patch.records()
    sides = release, reference
    yield from checks.patches(release, patches)
    yield from checks.names_of_records(release, [*OVERRIDES, *PRIVATES])
    yield from checks.attributes(release, ATTRIBUTES)
    yield from checks.mixins(*sides, records.MIXINS)
    yield from checks.derived_classes(*sides)
    yield from checks.protocols(*sides, records.PROTOCOLS)
    yield from checks.names(release, upstream.NAMES)
    yield from checks.imports(release)
    yield from checks.words(*sides, patches)
    yield from checks.fields(release, records.FIELDS)
    yield from checks.routes(*sides, [*ROUTES, *ROLLOUT_ROUTES, *OTHER_ROUTES])
    yield from checks.ways_around(*sides, patches)
    yield from checks.families(*sides, records.FAMILIES)
    yield from checks.code(*sides, records.RESTS_ON)
    yield from type_errors.new_errors(*sides, patches)


def settle(
    found: Iterable[Finding],
    release: str,
    entries: Iterable[records.Settled] = tuple(records.SETTLED),
) -> Iterator[Finding]:
    """Mark what is settled; an entry that settles nothing is a finding itself."""
    open_entries = [
        each for each in entries if each.fits(each.check, each.subject, release)
    ]
    used = set()
    for each in found:
        how = [e for e in open_entries if e.fits(each.check, each.subject, release)]
        if each.state == BREAKS and how:
            used.update(how)
            yield replace(each, state=SETTLED, told=f"{each.told}: {how[0].how}")
        else:
            yield each
    for entry in open_entries:
        if entry not in used:
            told = f"is settled for {entry.check}, but nothing is found there"
            yield Finding("settled", entry.subject, BREAKS, told)


def table(found: Iterable[Finding]) -> str:
    """A row for each check, a column for each state."""
    numbers: dict[str, Counter[str]] = {}
    for each in found:
        numbers.setdefault(each.check, Counter())[each.state] += 1
    rows = [["check", *STATES]]
    rows += [
        [check, *(str(number[state] or "-") for state in STATES)]
        for check, number in numbers.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def audit(release: Release, reference: Release, verbose: bool = False) -> bool:
    """Print what is found of a release; returns whether the package fits."""
    found = list(settle(findings(release, reference), release.name))
    libraries = dict.fromkeys(
        line.partition(";")[0].strip()
        for line in wheel.requirements(release.folder)
        if line.startswith(("torch=", "transformers", "fastapi", "pydantic"))
    )
    print(f"\nvLLM {release.name}, compared with {reference.name}")
    print(f"requires {', '.join(libraries) or 'nothing that is known'}\n")
    print(table(found))
    shown = (DIFFERS, ABSENT, SETTLED, BREAKS) if verbose else (BREAKS,)
    for state in shown:
        told = [each for each in found if each.state == state]
        if told:
            print(f"\n{state}:")
        for each in told:
            print(f"  {each.check}: {each.subject} {each.told}".rstrip())
    if verbose:
        recorded = [*patch.records(), *OVERRIDES, *PRIVATES]
        print(f"\ncode that is not as in {reference.name}, to be read:")
        for target in checks.changed_bodies(release, reference, recorded):
            print(f"  {target}")
    return all(each.state != BREAKS for each in found)


def main(argv: list[str] | None = None) -> int:
    """Audit the releases of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("releases", nargs="*", default=SUPPORTED, metavar="RELEASE")
    parser.add_argument("--wheel", type=Path, help="the wheel of the one release")
    parser.add_argument("--folder", type=Path, help="a folder with its files in vllm/")
    parser.add_argument("--verbose", action="store_true", help="all but what fits")
    asked = parser.parse_args(argv)
    gc.disable()  # syntax trees have no cycles, and a collection visits all of them
    if (asked.wheel or asked.folder) and len(asked.releases) != 1:
        parser.error("--wheel and --folder need exactly one release")
    with tempfile.TemporaryDirectory() as room:
        if asked.wheel:
            wheel.unpack(asked.wheel, Path(room) / "unpacked")
            asked.folder = Path(room) / "unpacked"
        try:
            reference = Release(REFERENCE, wheel.folder_of(REFERENCE))
            fits = []
            for name in asked.releases:
                release = reference  # read once, where it is one of them
                if asked.folder or name != REFERENCE:
                    folder = asked.folder or wheel.folder_of(name)
                    release = Release(name, folder)
                fits.append(audit(release, reference, asked.verbose))
        except wheel.NoWheelError as error:
            print(error, file=sys.stderr)
            return 2
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
