"""The subcommands of `vllm-inflight` that ask a server's control routes.

Exit codes: 0, the server did it; 1, the server rejected the call or failed; 2, no
server answers, or the address, the key or an argument cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.inflight.cli.arguments import add_key, seconds, server_url

if TYPE_CHECKING:
    from vllm.inflight.trainer.control.client import ControlClient

Reply = dict[str, Any]
Call = Callable[["ControlClient", argparse.Namespace], Reply]

URL = "http://localhost:8000"
MODES = ("in_place", "retract", "abort", "wait")


def status(client: ControlClient, args: argparse.Namespace) -> Reply:
    """Show the live version, the update under way, and the pause of a server."""
    updates = client.status(args.update_id)
    if args.update_id is not None:
        return updates
    return {
        "weights": client.weight_info(),
        "updates": updates,
        "pause": client.pause_state(),
    }


def publish(client: ControlClient, args: argparse.Namespace) -> Reply:
    """Publish a checkpoint that is on the server's host."""
    return client.update_weights_from_disk(
        args.path,
        args.version,
        mode=args.mode,
        subset=args.subset,
        base_version=args.base_version,
        expect_digest=args.expect_digest,
    )


def rollback(client: ControlClient, args: argparse.Namespace) -> Reply:
    """Serve the version before again."""
    return client.rollback(args.to_version, args.mode)


def pause(client: ControlClient, args: argparse.Namespace) -> Reply:
    """Pause decoding; the command ends when the pause is in force."""
    return client.pause(
        args.mode,
        lease_s=args.lease_s,
        owner=args.owner,
        flush_cache=args.flush_cache,
    ).reply


def continue_(client: ControlClient, args: argparse.Namespace) -> Reply:
    """Continue decoding after a pause."""
    return client.continue_(args.owner)


def abort(client: ControlClient, args: argparse.Namespace) -> Reply:
    """Abort an update that is not committed; the live weights do not change."""
    return client.abort(args.update_id)


def add_commands(commands: object) -> None:
    """Add the subcommands to those of the command line."""
    asked = _command(commands, status, _status_lines)
    asked.add_argument("--update-id", help="show this update alone")

    sent = _command(commands, publish, _version_lines, timeout_s=600.0)
    sent.add_argument(
        "path", help="safetensors file, or directory of them, on the server's host"
    )
    sent.add_argument("--version", help="label to serve it under")
    _add_mode(sent, "what happens to running requests at the commit")
    sent.add_argument(
        "--subset",
        action="append",
        metavar="PATTERN",
        help="pattern of the names in the checkpoint, if it does not have all; may be "
        "given several times",
    )
    sent.add_argument(
        "--base-version", metavar="LABEL", help="reject unless this is the live label"
    )
    sent.add_argument(
        "--expect-digest",
        metavar="HEX",
        help="reject unless the new version has this digest",
    )

    back = _command(commands, rollback, _version_lines)
    back.add_argument(
        "--to-version", metavar="LABEL", help="reject unless this is the version before"
    )
    _add_mode(back, "what happens to running requests. Default: in_place")

    paused = _command(commands, pause, _pause_lines)
    _add_mode(paused, "what happens to running requests. Default: in_place", "in_place")
    paused.add_argument(
        "--lease-s",
        type=float,
        metavar="SECONDS",
        help="continue by itself after so many seconds; 0: never. Default: the "
        "server's --inflight-pause-lease-s",
    )
    paused.add_argument("--owner", help="whose pause it is; others cannot end it")
    paused.add_argument("--flush-cache", action="store_true", help="drop the caches")

    continued = _command(commands, continue_, _pause_lines)
    continued.add_argument("--owner", help="whose pause it is; without, anybody's")

    ended = _command(commands, abort, _update_lines)
    ended.add_argument(
        "update_id", nargs="?", help="which update; without, the one under way"
    )


def _add_mode(
    parser: argparse.ArgumentParser, what: str, default: str | None = None
) -> None:
    parser.add_argument("--mode", choices=MODES, default=default, help=what)


def _command(
    commands: Any,
    call: Call,
    lines: Callable[[Reply], list[str]],
    timeout_s: float = 60.0,
) -> argparse.ArgumentParser:
    """A subcommand with the options that all of them have."""
    words = (call.__doc__ or "").strip()
    parser: argparse.ArgumentParser = commands.add_parser(
        call.__name__.rstrip("_"),
        help=words[:1].lower() + words[1:].rstrip("."),
        description=words,
    )
    parser.add_argument(
        "--url",
        type=server_url,
        default=URL,
        help=f"address of the server, or of its control port. Default: {URL}",
    )
    add_key(parser)
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=timeout_s,
        metavar="SECONDS",
        help=f"go on trying for so long. Default: {timeout_s:g}",
    )
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    parser.set_defaults(run=lambda args: _run(call, lines, args))
    return parser


def _run(
    call: Call, lines: Callable[[Reply], list[str]], args: argparse.Namespace
) -> int:
    from vllm.inflight.errors import ConfigError, EngineUnreachable, InflightError
    from vllm.inflight.trainer.control.client import ControlClient

    try:
        with ControlClient(
            args.url, api_key=args.key, timeout_s=args.timeout_s
        ) as client:
            reply = call(client, args)
    except InflightError as error:
        if args.json:
            print(json.dumps({"error": error.to_dict()}, indent=2))
        else:
            print(_plain(f"{error.code}: {error}"), file=sys.stderr)
            print(_plain(error.remedy), file=sys.stderr)
        return 2 if isinstance(error, ConfigError | EngineUnreachable) else 1
    if args.json:
        print(json.dumps(reply, indent=2))
    else:
        print(_plain("\n".join(lines(reply))))
    return 0


# --------------------------------------------------------------- replies as text
def _status_lines(reply: Reply) -> list[str]:
    if "weights" not in reply:
        return _update_lines(reply)
    lines = []
    for number, info in enumerate(_engines(reply["weights"])):
        which = f"engine {number} " if "engines" in reply["weights"] else ""
        before = info["previous"]
        back = "none" if before is None else f"{before['weight_version']!r}"
        lines += [f"{which}{_version(info)}", f"rollback target: {back}"]
        if info.get("weights", "live") != "live":
            lines.append(f"weights: {info['weights']}")
    for updates in _engines(reply["updates"]):
        active = updates["active"]
        lines += _update_lines(active) if active else ["no update is under way"]
        under_way = active and active["update_id"]
        ended = [u for u in updates["outcomes"] if u["update_id"] != under_way]
        lines += [f"last {_update_lines(last)[0]}" for last in ended[:1]]
    for state in _engines(reply["pause"]):
        lines += _pause_lines(state)
    return list(dict.fromkeys(lines))


def _update_lines(reply: Reply) -> list[str]:
    line = f"update {reply['update_id']!r}: {reply['phase']}"
    if (label := reply.get("weight_version")) is not None:
        line += f", version {label!r}"
    if (left := reply.get("deadline_left_s")) is not None:
        line += f", {left:.0f} s until its deadline"
    if (error := reply.get("error")) is not None:
        line += f", {error['code']}: {error['message']}"
    return [line]


def _version_lines(reply: Reply) -> list[str]:
    gap = reply.get("gap_ms")
    return [_version(reply) + ("" if gap is None else f", gap {gap:g} ms")]


def _version(reply: Reply) -> str:
    digest = reply["digest"] or "unknown"
    return f"live: {reply['weight_version']!r}, epoch {reply['epoch']}, digest {digest}"


def _pause_lines(reply: Reply) -> list[str]:
    if not reply.get("is_paused", reply.get("paused")):
        return ["decoding is not paused"]
    if reply.get("absorbed"):
        line = f"a pause in mode {reply['mode']} is absorbed, and decoding goes on"
    else:
        line = f"decoding is paused in mode {reply['mode']}"
    if reply.get("owner") is not None:
        line += f" by {reply['owner']!r}"
    left = reply.get("lease_left_s", reply.get("lease_s"))
    line += (
        ", without a lease" if left is None else f", for {left:.0f} s unless renewed"
    )
    return [line]


def _engines(reply: Reply) -> list[Reply]:
    engines: list[Reply] = reply.get("engines", [reply])
    return engines


def _plain(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
