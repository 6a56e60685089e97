"""The command `vllm-inflight`: its arguments and subcommands."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import vllm.inflight
from vllm.inflight.cli import checkpoint_delta, control
from vllm.inflight.cli.arguments import add_key, seconds, server_url
from vllm.inflight.config import API_KEY_ENV, admin_key

# Commands import what they need when they run: `--help` waits neither for vLLM nor for
# rich and httpx.
Command = Callable[[argparse.Namespace], int]
"""A subcommand; returns the exit code."""


def doctor(args: argparse.Namespace) -> int:
    """Say whether weights can be updated in flight here, or how a live server does."""
    if args.url is not None:
        return _check_server(args)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # What vLLM prints while it is imported would get into the JSON.
    with contextlib.redirect_stdout(sys.stderr), _progress() as progress:
        progress("importing vLLM")
        from vllm.inflight.cli.doctor import examine

        report = examine(progress, args.worker_extension_cls).to_dict()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        from vllm.inflight.cli.report import print_host, terminal

        print_host(terminal(), report, is_verbose=args.verbose)
    return 0 if report["ok"] else 1


def _check_server(args: argparse.Namespace) -> int:
    """Return 0 if the server is well, 1 if something is wrong, 2 if nobody answers."""
    from vllm.inflight.cli.finding import State
    from vllm.inflight.cli.report import plain, print_server, terminal
    from vllm.inflight.cli.server_check import check_server
    from vllm.inflight.errors import ConfigError, EngineUnreachable

    key = args.key or admin_key() or os.environ.get(API_KEY_ENV)
    try:
        with _progress() as progress:
            progress(f"asking {plain(args.url)}")
            findings = check_server(args.url, key, args.watch)
    except ConfigError as error:
        print(f"{plain(str(error))}.", file=sys.stderr)
        return 2
    except EngineUnreachable as error:
        print(f"{plain(str(error))}. See whether a server runs there.", file=sys.stderr)
        return 2
    is_good = all(finding.state is not State.WRONG for finding in findings)
    entries = [asdict(finding) for finding in findings]
    if args.json:
        print(json.dumps({"ok": is_good, "findings": entries}, indent=2))
    else:
        print_server(terminal(), entries, is_good)
    return 0 if is_good else 1


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done; elsewhere show nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda doing: status.update(f"{doing} …")


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
        "--verbose",
        action="store_true",
        help="list every patch and why it is there, and every known worker call",
    )
    examined.add_argument(
        "--worker-extension-cls",
        metavar="CLASS",
        help="say which calls of this worker extension are adopted",
    )
    examined.add_argument(
        "--url",
        type=server_url,
        help="ask the server at this address instead; exits with 1 for trouble, 2 for "
        "no answer",
    )
    add_key(examined)
    examined.add_argument(
        "--watch",
        type=seconds,
        default=2.0,
        metavar="SECONDS",
        help="look a second time after so many seconds, to see whether an update "
        "moves. Default: 2",
    )
    control.add_commands(commands)
    checkpoint_delta.add_commands(commands)
    return whole


def _command(commands: Any, run: Command) -> argparse.ArgumentParser:
    """Add a subcommand with the name and the docstring of its function."""
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
