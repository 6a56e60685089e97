"""Writes the tables of docs/ that are facts of the code.

A page is written by hand and holds its tables between `<!-- name: generated -->`
and `<!-- end -->`. `python -m docs.generate` fills them in; `--check` says which
are out of date and changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from docs import framework_runs, signatures
from docs.families import families
from docs.gpu_tests import gpu_tests
from docs.pause_plot import picture
from docs.release_runs import releases
from docs.tables import code, first_line, table
from tests.support.frameworks.evidence import evidence_of
from tests.support.frameworks.overview import FRAMEWORKS, Framework
from vllm.inflight import patch
from vllm.inflight.api.server.flags import GROUP, add_flags
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.cli import main as cli
from vllm.inflight.config import (
    ADMIN_KEY_ENV,
    ALLOW_RUST_ENV,
    CONFIG_ENV,
    RUST_ENV,
    InflightConfig,
)
from vllm.inflight.errors import (
    BY_CODE,
    CAUSES,
    ConfigError,
    InflightError,
    UpstreamChanged,
)
from vllm.inflight.frameworks.known_call import KnownCall
from vllm.inflight.frameworks.table import BUILT_IN
from vllm.inflight.patch.records.attributes import ATTRIBUTES
from vllm.inflight.releases import fields as release_fields
from vllm.inflight.update import ACTIVE, MOVES, PAUSE_MOVES, STRICTNESS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"

AT_START_UP = (ConfigError, UpstreamChanged)
"""Errors that stop the start, and never occur over HTTP."""

ENVIRONMENT = {
    CONFIG_ENV: "Fields as a JSON object, for an engine that another program starts. "
    "Flags and `additional_config` go before it.",
    ADMIN_KEY_ENV: "Key of the control routes; "
    "[who may call](http.md#who-may-call) says what it opens.",
    patch.ALLOW_UNTESTED_ENV: "Start on a release of vLLM that was not tested.",
    ALLOW_RUST_ENV: f"Start although {RUST_ENV} is set; that front "
    "end has none of the control routes.",
}


def flags() -> str:
    """The flags that `vllm serve` gains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--additional-config")
    add_flags(parser)
    (group,) = (g for g in parser._action_groups if g.title == GROUP)
    rows = (
        [code(f"{a.option_strings[0]} {_value(a)}".strip()), str(a.help)]
        for a in group._group_actions
    )
    return table(["flag", "what it does"], rows)


def _value(flag: argparse.Action) -> str:
    """What follows a flag on the command line; nothing if it has no value."""
    return "" if flag.nargs == 0 else f"{flag.metavar or 'KEY'}"


def commands() -> str:
    """The subcommands of `vllm-inflight` and their options."""
    subparsers = next(
        action
        for action in cli.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    rows = (
        [code(f"vllm-inflight {name} {option}".strip()), str(what)]
        for name, parser in subparsers.choices.items()
        for option, what in [
            ("", parser.description),
            *(
                (a.option_strings[-1] if a.option_strings else a.dest.upper(), a.help)
                for a in parser._actions
            ),
        ]
        if option != "--help"
    )
    return table(["command", "what it does"], rows)


def fields() -> str:
    """The fields of `InflightConfig`."""
    rows = (
        [
            code(knob.name),
            ", ".join(map(code, knob.metadata["choices"])) or code(knob.type),
            code(knob.default) if str(knob.default) else "none",
            knob.metadata["doc"],
        ]
        for knob in dataclasses.fields(InflightConfig)
    )
    return table(["field", "values", "default", "what it does"], rows)


def frameworks() -> str:
    """What is promised to each framework, and what of it ran."""
    rows = (
        [
            f"[{each.name}](frameworks/{each.page}.md) {each.release}",
            each.starts or f"**not yet**; requires {each.vllm}",
            each.transport,
            each.promised,
            framework_runs.told(each.evidence),
            "equal" if framework_runs.has_digest(each.evidence) else "",
            _gaps(each),
        ]
        for each in FRAMEWORKS
    )
    headings = ["framework", "starts on vLLM", "transport", "what you get", "what ran"]
    return table([*headings, "digest", "gap at an update"], rows)


def ran_of(page: str) -> Callable[[], str]:
    """The table of what ran of the frameworks of a page."""

    def ran() -> str:
        of_page = [each for each in FRAMEWORKS if each.page == page]
        rows = (
            [*[each.name] * (len(of_page) > 1), *cells]
            for each in of_page
            for cells in framework_runs.each_file(each.evidence)
        )
        headings = ["what ran", "tests that passed", "file, below `tests/`"]
        return table([*["framework"] * (len(of_page) > 1), *headings], rows)

    return ran


ON_H200 = {
    "verl": [("gpu-h200-verl.json", "verl", "")],
    "OpenRLHF": [
        ("gpu-h200-openrlhf-nccl.json", "openrlhf", ", NCCL"),
        ("gpu-h200-openrlhf-ipc.json", "openrlhf_ipc", ", CUDA IPC"),
    ],
    "prime-rl": [("gpu-h200-prime-rl.json", "prime_rl", "")],
}
"""Framework → files of its figures on a GPU, the row in each, and its transport."""


def _side(arm: str) -> str:
    """The name of an arm for readers; without one it is this package's."""
    return arm.removeprefix("ours, ").replace("upstream", "plain vLLM")


def _gaps(framework: Framework) -> str:
    """The median of the largest gaps between two tokens at an update."""
    parts = []

    def of_arms(file: str, row: str) -> tuple[float, float]:
        arms = json.loads((RESULTS / file).read_text())["frameworks"][row]
        obey, absorb = (arms[each]["gap_median_ms"] for each in ("obey", "absorb"))
        return obey / 1000, absorb / 1000

    if row := framework.pause:
        obey, absorb = of_arms("framework-pauses.json", row)
        absorbed = f", absorbed {absorb:.1f} s" if framework.is_absorbed else ""
        parts.append(f"pause {obey:.1f} s{absorbed} (CPU)")
    if row := framework.without_pause:  # both arms do the same
        slower = max(of_arms("framework-unpaused.json", row))
        parts.append(f"no pause: {slower:.1f} s (CPU)")
    for file, row, transport in ON_H200.get(framework.name, ()):
        arms = json.loads((RESULTS / file).read_text())["frameworks"][row]["arms"]
        gaps = {arm: figures["gap_update_median_ms"] for arm, figures in arms.items()}
        told = (f"{_side(arm)} {gap:.0f} ms" for arm, gap in gaps.items())
        parts.append(f"H200{transport}: {', '.join(told)}")
    return "; ".join(parts) or framework.no_gap


def known_calls() -> str:
    """The worker calls of other frameworks that the engine core knows."""
    return calls_of(BUILT_IN)


def calls_of(rows: Iterable[KnownCall]) -> str:
    """Known calls, and what has run of each."""
    cells = (
        [
            row.framework,
            code(f"{row.method}({', '.join(row.parameters)})"),
            row.role.value,
            _end_mark(row),
            framework_runs.told(evidence_of(row)),
        ]
        for row in rows
    )
    headings = ["framework", "worker call", "role", "marks and exceptions", "what ran"]
    return table(headings, cells)


def _end_mark(row: KnownCall) -> str:
    """What is special about a known call."""
    facts = {
        "the last one has `empty_cache`": row.is_last is not None,
        "may leave out tensors": row.may_lack,
        "not for quantised models": not row.takes_quantised,
        "on one rank only": row.is_alone,
        "never adopted": not row.is_adopted,
        f"of workers with `{'`, `'.join(row.besides)}`": bool(row.besides),
    }
    return "; ".join(fact for fact, holds in facts.items() if holds)


def environment() -> str:
    """The environment variables."""
    rows = ([code(name), what] for name, what in ENVIRONMENT.items())
    return table(["variable", "what it does"], rows)


def errors() -> str:
    """Every error a caller can meet."""
    rows = (
        [
            code(kind.code),
            "start-up" if issubclass(kind, AT_START_UP) else str(kind.status),
            first_line(kind.__doc__),
            kind.remedy,
        ]
        for kind in BY_CODE.values()
        if kind is not InflightError
    )
    return table(["code", "HTTP", "what happened", "what to do"], rows)


def causes() -> str:
    """Why tensors of an update are rejected."""
    rows = ([code(cause), *told] for cause, told in CAUSES.items())
    return table(["cause", "what happened", "what to do"], rows)


def releases_of(since: str | None, before: str | None) -> str:
    """The releases of vLLM that a record is for."""
    bounds = (f"from {since}" if since else "", f"before {before}" if before else "")
    return ", ".join(filter(None, bounds)) or "all"


def patches() -> str:
    """Every change to upstream, by the place where it is made."""
    header = ["target", "parameters expected", "why", "goes when", "vLLM"]
    parts = [f"{len(patch.records())} records."]
    for module in patch.parts():
        rows = (
            [
                code(record.target),
                "none: a new name"
                if record.expects is None
                else code(", ".join(record.expects)),
                record.why + f" (on {record.only_on} alone)" * bool(record.only_on),
                record.remove_when,
                releases_of(record.since, record.before),
            ]
            for record in module.PATCHES
        )
        title = first_line(module.__doc__).rstrip(".")
        parts.append(f"## {title}\n\n{table(header, rows)}")
    ours = (
        [code(each.target), code(each.holds), each.why, each.remove_when]
        for each in ATTRIBUTES
    )
    header = ["object of vLLM", "what the attribute holds", "why", "goes when"]
    parts.append(f"## Attributes on objects of vLLM\n\n{table(header, ours)}")
    return "\n\n".join(parts)


def routes() -> str:
    """Method, path and purpose of every control route."""
    return _routes(ROUTES)


def rollout_routes() -> str:
    """Method, path and purpose of every rollout route."""
    return _routes(ROLLOUT_ROUTES)


def _routes(table_of: Mapping[tuple[str, str], object]) -> str:
    rows = (
        [method, code(path), first_line(handler.__doc__)]
        for (method, path), handler in table_of.items()
    )
    return table(["method", "path", "what it does"], rows)


def older_fields() -> str:
    """Fields of other releases of vLLM."""
    calls = (
        ("`start_weight_update`", release_fields.START),
        ("`update_info` of `update_weights`", release_fields.UPDATE_INFO),
    )
    rows = (
        [
            call,
            code(name),
            field.releases,
            field.meaning,
            ", ".join(code(json.dumps(v)) for v in (*field.harmless, None)),
            field.remedy,
        ]
        for call, fields in calls
        for name, field in fields.items()
    )
    header = ["of", "field", "vLLM", "what it says", "ignored", "instead"]
    return table(header, rows)


def moves() -> str:
    """Every change of phase of an update."""
    rows = (
        [
            code(phase.value),
            ", ".join(sorted(code(p.value) for p in to)) or "nothing",
            "yes" if phase in ACTIVE else "no",
        ]
        for phase, to in MOVES.items()
    )
    return table(["phase", "what can follow", "occupies the shadow weights"], rows)


def pauses() -> str:
    """Every legal change of a pause."""
    rows = (
        [
            "decoding" if mode is None else code(mode.value),
            ", ".join(code(m.value) for m in STRICTNESS if m in PAUSE_MOVES[mode]),
        ]
        for mode in (None, *STRICTNESS)
    )
    return table(["current mode", "modes that a pause may ask for"], rows)


def upstream_faults() -> str:
    """The faults that the last recorded run of tests/robustness/faults saw."""
    rows = json.loads((DOCS / "upstream-faults.json").read_text())
    never = {"saw": "not played yet"}
    pairs = [
        [row.get(arm, never) for arm in ("upstream", "here")] for row in rows.values()
    ]
    shown = [play for pair in pairs for play in pair if "date" in play]
    machines = ", ".join(sorted({f"vLLM {p['vllm']}, {p['machine']}" for p in shown}))
    dates = sorted({play["date"] for play in shown})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    cells = (
        [
            name,
            row["fault"],
            *(play["saw"] for play in pair),
            ", ".join(code(test.partition("::")[2]) for test in row["tests"]),
        ]
        for (name, row), pair in zip(rows.items(), pairs, strict=True)
    )
    header = ["", "vLLM as it is", "seen there", "seen here", "tests that show more"]
    return f"Seen on {when}: {machines}.\n\n{table(header, cells)}"


TABLES: dict[str, list[Callable[[], str]]] = {
    "cli.md": [flags, commands],
    "config.md": [fields, environment],
    "drop-in.md": [frameworks, known_calls],
    **{f"frameworks/{each.page}.md": [ran_of(each.page)] for each in FRAMEWORKS},
    "errors.md": [errors, causes],
    "gpu-tests.md": [gpu_tests],
    "releases.md": [releases],
    "how-it-works.md": [moves],
    "http.md": [routes, rollout_routes, older_fields],
    "models.md": [families],
    "patches.md": [patches],
    "pausing.md": [pauses],
    "python.md": [
        *(signatures.publisher, signatures.publish, signatures.outcome),
        *(signatures.client, signatures.announce, signatures.client_methods),
        *(signatures.control_client, signatures.control_methods),
        *(signatures.token_versions, signatures.engine_methods),
    ],
    "reliability.md": [upstream_faults],
}
"""Page → what is generated into it, each in a block of its own name."""


def pages() -> Iterator[tuple[Path, str, str]]:
    """(path, text as it is, text as it should be) of every page and drawing."""
    for name, made in TABLES.items():
        before = after = (DOCS / name).read_text()
        for content in made:
            after = _filled(name, after, content.__name__, content())
        yield DOCS / name, before, after
    drawing = DOCS / "pause-modes.svg"
    yield drawing, drawing.read_text() if drawing.exists() else "", picture()


def stale() -> Iterator[str]:
    """A diff of every page that is out of date."""
    for path, before, after in pages():
        if before != after:
            lines = (text.splitlines(keepends=True) for text in (before, after))
            place = f"docs/{path.relative_to(DOCS)}"
            yield "".join(difflib.unified_diff(*lines, place, "the code"))


def _filled(page: str, text: str, label: str, content: str) -> str:
    begin, end = f"<!-- {label}: generated -->", "<!-- end -->"
    block = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(block.findall(text)) != 1:
        raise SystemExit(f"docs/{page} needs one block {begin} ... {end}")
    return block.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text)


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--check", action="store_true", help="change nothing")
    if parser.parse_args(argv).check:
        diffs = list(stale())
        print("\n".join(diffs), end="")
        return 1 if diffs else 0
    for path, before, after in pages():
        if before != after:
            path.write_text(after)
            print(f"docs/{path.relative_to(DOCS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
