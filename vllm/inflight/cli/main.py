"""The command `vllm-inflight`: its arguments and subcommands."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import vllm.inflight
from vllm.inflight.cli import control
from vllm.inflight.config import ADMIN_KEY_ENV, admin_key

Command = Callable[[argparse.Namespace], int]
"""Does what was asked; returns the exit code."""

LONGEST_S = 86400

LOOKS = {"good": "green", "note": "yellow", "wrong": "bold red"}
PATCH_LOOKS = {"ok": "green", "added": "green"}
PATCH_LOOKS |= dict.fromkeys(("changed", "broken"), "bold red")


def doctor(args: argparse.Namespace) -> int:
    """Say whether weights can be updated in flight here, or how a live server does."""
    if args.url is not None:
        return _visit(args)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # What vLLM prints while it is imported would get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.inflight.cli.doctor import examine

        report = examine().to_dict()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 0 if report["ok"] else 1


def _visit(args: argparse.Namespace) -> int:
    """0 if nothing is wrong with the server, 1 if something is, 2 if nobody answers."""
    from vllm.inflight.cli.finding import State
    from vllm.inflight.cli.server_check import check_server
    from vllm.inflight.errors import ConfigError, EngineUnreachable

    key = args.key or admin_key() or os.environ.get("VLLM_API_KEY")
    try:
        findings = check_server(args.url, key, args.watch)
    except ConfigError as error:
        print(f"{_plain(str(error))}.", file=sys.stderr)
        return 2
    except EngineUnreachable as error:
        print(
            f"{_plain(str(error))}. See whether a server runs there.", file=sys.stderr
        )
        return 2
    is_good = all(finding.state is not State.WRONG for finding in findings)
    told = [asdict(finding) for finding in findings]
    if args.json:
        print(json.dumps({"ok": is_good, "findings": told}, indent=2))
    else:
        console = _console()
        _print_findings(console, told)
        if is_good:
            console.print("Nothing is wrong.", style="green")
        else:
            console.print("Somebody should look at this.", style="bold red")
    return 0 if is_good else 1


def _console() -> Console:
    # A file or a pipe has no width; there a line holds a whole patch.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _print_report(report: dict[str, Any]) -> None:
    console = _console()
    patches = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    # Where the line is too short, it is the other two that are cut.
    patches.add_column("state", no_wrap=True, width=max(map(len, PATCH_LOOKS)))
    patches.add_column("patch", no_wrap=True, ratio=2)
    patches.add_column("why", no_wrap=True, ratio=3)
    for entry in report["patches"]:
        state = f"[{PATCH_LOOKS[entry['state']]}]{entry['state']}[/]"
        patches.add_row(state, entry["target"].partition(":")[2], entry["why"])
    console.print(patches)
    console.print()
    _print_findings(console, report["findings"])
    if report["ok"]:
        console.print("Weights can be updated in flight here.", style="green")
    else:
        console.print("Weights cannot be updated in flight here.", style="bold red")


def _print_findings(console: Console, entries: list[dict[str, Any]]) -> None:
    findings = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for entry in entries:
        look, found = LOOKS[entry["state"]], escape(_plain(entry["found"]))
        findings.add_row(f"[{look}]{entry['state']}[/]", entry["name"], found)
    console.print(findings)
    for entry in entries:
        if entry["remedy"]:
            console.print()
            console.print(f"[{LOOKS[entry['state']]}]{entry['name']}[/]: ", end="")
            console.print(_plain(entry["remedy"]), markup=False)
    console.print()


def _plain(text: str) -> str:
    """Without what a terminal obeys: it may be a server's, whosever that is."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


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
    examined.add_argument(
        "--url",
        help="ask the server at this address instead; exits with 1 for trouble, 2 for "
        "no answer",
    )
    examined.add_argument(
        "--key",
        help="key of the server's control routes; better given in the environment, as "
        f"{ADMIN_KEY_ENV}",
    )
    examined.add_argument(
        "--watch",
        type=seconds,
        default=2.0,
        metavar="SECONDS",
        help="look a second time after so many seconds, to see whether an update "
        "moves. Default: 2",
    )
    control.add_commands(commands)
    return whole


def seconds(text: str) -> float:
    """What `--watch` may be."""
    value = float(text)
    if not 0 <= value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"from 0 to {LONGEST_S} seconds, got {text}")
    return value


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
