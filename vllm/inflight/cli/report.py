"""The reports of `doctor` as text for a terminal: the result first, then details."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLOURS = {"good": "green", "note": "yellow", "wrong": "bold red"}
PATCH_COLOURS = {"ok": "green", "added": "green"}
PATCH_COLOURS |= dict.fromkeys(("changed", "broken"), "bold red")


def terminal() -> Console:
    """Standard output, as a console of rich."""
    # A file or a pipe has no width; there a line holds a whole patch.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def print_host(
    console: Console, report: dict[str, Any], *, is_verbose: bool = False
) -> None:
    """Print the report on this host."""
    findings, patches = report["findings"], report["patches"]
    can = "can" if report["ok"] else "cannot"
    _print_result(
        console, f"Weights {can} be updated in flight here", report["ok"], findings
    )
    _print_findings(console, findings)
    _print_failures(console, patches)
    if is_verbose:
        _print_patches(console, patches)
        if calls := report.get("known_calls"):
            _print_calls(console, calls)
    else:
        console.print(f"--verbose lists the {len(patches)} patches.", style="dim")


def print_server(
    console: Console, findings: list[dict[str, Any]], is_good: bool
) -> None:
    """Print the report on a live server."""
    result = "Nothing is wrong" if is_good else "Somebody should look at this"
    _print_result(console, result, is_good, findings)
    _print_findings(console, findings)


def _print_result(
    console: Console, result: str, is_good: bool, findings: list[dict[str, Any]]
) -> None:
    states = [finding["state"] for finding in findings]
    counts = [
        f"{count} {state}"
        for state in ("wrong", "note")
        if (count := states.count(state))
    ]
    more = f" ({', '.join(counts)})" if counts else ""
    console.print(f"{result}{more}.", style="green" if is_good else "bold red")
    console.print()


def _print_findings(console: Console, findings: list[dict[str, Any]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for entry in findings:
        colour, found = COLOURS[entry["state"]], escape(plain(entry["found"]))
        table.add_row(f"[{colour}]{entry['state']}[/]", entry["name"], found)
    console.print(table)
    for entry in findings:
        if entry["remedy"]:
            console.print()
            console.print(f"[{COLOURS[entry['state']]}]{entry['name']}[/]: ", end="")
            console.print(plain(entry["remedy"]), markup=False)
    console.print()


def _print_failures(console: Console, patches: list[dict[str, Any]]) -> None:
    """Print one line for each cause for which patches do not fit."""
    causes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in patches:
        if entry["problem"] is not None:
            cause = entry["problem"].removeprefix(f"{entry['target']}: ")
            causes[entry["state"], cause].append(entry["target"])
    for (state, cause), targets in causes.items():
        which = targets[0] if len(targets) == 1 else f"{len(targets)} patches"
        console.print(f"[{PATCH_COLOURS[state]}]{state}[/] {which}: ", end="")
        console.print(plain(cause), markup=False)
    if causes:
        console.print()


def _print_patches(console: Console, patches: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    # A narrow terminal cuts the other two columns.
    table.add_column("state", no_wrap=True, width=max(map(len, PATCH_COLOURS)))
    table.add_column("patch", no_wrap=True, ratio=2)
    table.add_column("why", no_wrap=True, ratio=3)
    for entry in patches:
        state = f"[{PATCH_COLOURS[entry['state']]}]{entry['state']}[/]"
        table.add_row(state, entry["target"].partition(":")[2], entry["why"])
    console.print(table)


def _print_calls(console: Console, calls: list[dict[str, Any]]) -> None:
    """Print the worker calls of other frameworks that are adopted."""
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("framework", "worker call", "role"):
        table.add_column(heading)
    for entry in calls:
        style = "green" if entry["is_matched"] else None
        cells = (entry[key] for key in ("framework", "call", "role"))
        table.add_row(*(escape(plain(cell)) for cell in cells), style=style)
    console.print(table)


def plain(text: str) -> str:
    """`text` without control characters, which a server could send to the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
