"""The command `vllm-inflight`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import vllm.inflight

Command = Callable[[argparse.Namespace], int]
"""Does what was asked; returns the exit code."""

LOOKS = {"good": "green", "note": "yellow", "wrong": "bold red"}
PATCH_LOOKS = {"ok": "green", "added": "green", "changed": "bold red"}


def doctor(args: argparse.Namespace) -> int:
    """Say whether weights can be updated in flight here; 1 if they cannot."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # What vLLM prints while it is imported would get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.inflight.doctor import examine

        report = examine().to_dict()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 0 if report["ok"] else 1


def _print_report(report: dict[str, Any]) -> None:
    # A file or a pipe has no width; there a line holds a whole patch.
    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, width=width)
    patches = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("state", "patch", "why"):
        patches.add_column(title, no_wrap=True)
    for entry in report["patches"]:
        state = f"[{PATCH_LOOKS[entry['state']]}]{entry['state']}[/]"
        patches.add_row(state, entry["target"].partition(":")[2], entry["why"])
    console.print(patches)
    console.print()
    findings = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for entry in report["findings"]:
        look = LOOKS[entry["state"]]
        findings.add_row(f"[{look}]{entry['state']}[/]", entry["name"], entry["found"])
    console.print(findings)
    remedies = [entry for entry in report["findings"] if entry["remedy"]]
    for entry in remedies:
        console.print()
        console.print(f"[{LOOKS[entry['state']]}]{entry['name']}[/]: ", end="")
        console.print(entry["remedy"], markup=False)
    console.print()
    if report["ok"]:
        console.print("Weights can be updated in flight here.", style="green")
    else:
        console.print("Weights cannot be updated in flight here.", style="bold red")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(
        prog="vllm-inflight", description="vLLM whose weights change while it decodes."
    )
    whole.add_argument("--version", action="version", version=vllm.inflight.__version__)
    commands = whole.add_subparsers(metavar="command", required=True)
    examined = _command(commands, doctor)
    examined.add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )
    return whole


def _command(commands: Any, run: Command) -> argparse.ArgumentParser:
    """A subcommand named after its function and described by its docstring."""
    words = (run.__doc__ or "").strip()
    made: argparse.ArgumentParser = commands.add_parser(
        run.__name__, help=words[:1].lower() + words[1:].rstrip("."), description=words
    )
    made.set_defaults(run=run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    args = parser().parse_args(argv)
    run: Command = args.run
    return run(args)
