"""The subcommands `delta` and `apply`: deltas between checkpoints on disk.

Files are mapped into memory and read once. A result gets its name when it is complete,
and its digest has been compared with the announced one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reply = dict[str, Any]
Tell = Callable[[str, int, int], None]
"""Called with what is being done, the bytes that are done, and all bytes."""


def add_commands(commands: Any) -> None:
    """Add the subcommands to those of the command line."""
    made = _command(commands, "delta", delta, _delta_lines)
    made.add_argument("old", metavar="OLD", help="safetensors file, or directory")
    made.add_argument("new", metavar="NEW", help="the checkpoint after the changes")
    made.add_argument("-o", "--out", required=True, help="file to write the delta to")
    made.add_argument(
        "--compress",
        type=int,
        metavar="LEVEL",
        help="compress with zstd at this level; 3 is a good one. Default: do not",
    )
    applied = _command(commands, "apply", apply, _apply_lines)
    applied.add_argument("old", metavar="OLD", help="the checkpoint it starts from")
    applied.add_argument("file", metavar="FILE", help="file of the delta")
    applied.add_argument(
        "-o", "--out", required=True, help="file or directory to write, like OLD"
    )


def delta(args: argparse.Namespace, tell: Tell) -> Reply:
    """Write what has changed between two checkpoints on disk into a file."""
    from vllm.inflight.cli.checkpoints import write_delta

    return write_delta(args.old, args.new, args.out, tell, compress=args.compress)


def apply(args: argparse.Namespace, tell: Tell) -> Reply:
    """Apply the file of a delta to the checkpoint on disk that it starts from."""
    from vllm.inflight.cli.checkpoints import apply_delta

    return apply_delta(args.old, args.file, args.out, tell)


def _command(
    commands: Any,
    name: str,
    work: Callable[[argparse.Namespace, Tell], Reply],
    lines: Callable[[Reply], str],
) -> argparse.ArgumentParser:
    words = (work.__doc__ or "").strip()
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=words[:1].lower() + words[1:].rstrip("."), description=words
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.set_defaults(run=lambda args: _run(work, lines, args))
    return made


def _run(
    work: Callable[[argparse.Namespace, Tell], Reply],
    lines: Callable[[Reply], str],
    args: argparse.Namespace,
) -> int:
    """Return 0, or 1 if the work cannot be done."""
    from vllm.inflight.errors import InflightError, Malformed

    began = time.monotonic()
    error: InflightError
    try:
        with _progress() as tell:
            reply = work(args, tell)
    except InflightError as failure:
        error = failure
    except OSError as failure:
        remedy = "See that the disk has room, and that the path can be written."
        error = Malformed(str(failure), remedy=remedy)
    else:
        reply["seconds"] = round(time.monotonic() - began, 3)
        print(json.dumps(reply, indent=2) if args.json else lines(reply))
        return 0
    if args.json:
        print(json.dumps({"error": error.to_dict()}, indent=2))
    else:
        print(f"{error}.\n{error.remedy}", file=sys.stderr)
    return 1


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on a terminal; elsewhere nothing is shown."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("")
        yield lambda what, done, total: bars.update(
            bar, description=what, completed=done, total=total
        )


def _delta_lines(reply: Reply) -> str:
    share = reply["changed_elements"] / max(reply["elements"], 1)
    return (
        f"{reply['file']}: {_size(reply['bytes'])}, {reply['changed_elements']:,} of "
        f"{reply['elements']:,} elements ({share:.2%}) in {reply['changed_tensors']} "
        f"of {reply['tensors']} tensors\nfrom {reply['base']}\nto   {reply['digest']}"
    )


def _apply_lines(reply: Reply) -> str:
    return (
        f"{reply['path']}: {reply['changed_tensors']} of {reply['tensors']} tensors "
        f"changed; digest {reply['digest']}, as announced"
    )


def _size(num_bytes: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000  # type: ignore[assignment]
    return f"{num_bytes:.3g} GB"
