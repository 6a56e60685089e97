"""The public surface: everything that a caller of this package may rely on, as data.

`python -m tests.support.surface` writes it to `public_surface.json` beside this file; a
test compares the two, so a change of the surface is seen in a diff.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.route_stub import Engine, served
from vllm.inflight import patch, trainer
from vllm.inflight.api.server.flags import GROUP, add_flags
from vllm.inflight.api.server.metrics import exposition
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.counters import Counters
from vllm.inflight.errors import BY_CODE
from vllm.inflight.patch import api as patched_api
from vllm.inflight.releases.table import holds
from vllm.inflight.update import PAUSE_MOVES, Phase

FILE = Path(__file__).with_name("public_surface.json")
PACKAGE = Path(patch.__file__).parents[1]

METRICS_REPLY = Counters().to_dict() | {
    **{"weight_version": "v", "digest": "d", "drift": 0.5, "epoch": 1},
    **{"paused": False, "pause_absorbed": False, "pauses_enforced": {"sleep": 1}},
    **{"weights_differ": False, "updating": False},
    **{"update_staged_bytes": 0, "update_stalled_seconds": 0},
    **{"wire_window_bytes": 0, "wire_bucket_wait_ms": 0, "leases_expired": 0},
    **{"outcomes": {"committed": 1}, "scrubs": {"equal": 1}},
    **{"requests": {"retracted": 1}, "pause_s": {"in_place": 1}},
    **{"outside_writes": {"load_mine": 1}},
}
"""What an engine reports to the call `metrics`, with a value for every label."""

PROSE = ("summary", "description", "title", "example", "examples", "tags")
"""Keys of OpenAPI that hold text for readers; a text may change at any time."""


def flags() -> list[str]:
    """Every flag of `vllm serve`, with its metavar and its choices."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--additional-config")
    add_flags(parser)
    (group,) = (g for g in parser._action_groups if g.title == GROUP)
    return [
        f"{' '.join(a.option_strings)} {a.choices or ''}".strip()
        for a in group._group_actions
    ]


def fields() -> dict[str, str]:
    """Every field of `InflightConfig`: its type and its default."""
    return {
        f.name: f"{f.type} = {f.default!r}" for f in dataclasses.fields(InflightConfig)
    }


def without_prose(schema: Any) -> Any:
    """A part of OpenAPI without the texts that are written for readers."""
    if isinstance(schema, dict):
        return {
            key: without_prose(value)
            for key, value in schema.items()
            if key not in PROSE or not isinstance(value, str | list)
        }
    return [*map(without_prose, schema)] if isinstance(schema, list) else schema


def openapi() -> dict[str, Any]:
    """Parameters and bodies of every control route, as JSON Schema."""
    paths = served(Engine()).openapi()["paths"]
    return {
        f"{method.upper()} {path}": {
            "parameters": without_prose(call.get("parameters", [])),
            "body": without_prose(call.get("requestBody", {})),
        }
        for path, calls in sorted(paths.items())
        for method, call in calls.items()
    }


def metrics() -> dict[str, str]:
    """Every metric: its type and its labels."""
    text = exposition({0: METRICS_REPLY}).decode()
    return {
        family.name: f"{family.type} {sorted(family.samples[0].labels)}"
        for family in text_string_to_metric_families(text)
    }


def signatures(kind: Any) -> dict[str, str]:
    """The public methods of a class, or a function, with parameters and defaults."""
    if inspect.isfunction(kind):
        return {kind.__name__: str(inspect.signature(kind)).replace("'", "")}
    return {
        f"{kind.__name__}.{name}": str(inspect.signature(method)).replace("'", "")
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") or name == "__init__"
    }


def surface() -> dict[str, Any]:
    """All of it."""
    return {
        "routes": [" ".join(key) for key in [*ROUTES, *ROLLOUT_ROUTES]],
        "openapi": openapi(),
        "flags": flags(),
        "fields": fields(),
        "errors": {k.code: f"{k.__name__} {k.status}" for k in BY_CODE.values()},
        "phases": [phase.value for phase in Phase],
        "pause modes": [mode.value for mode in PAUSE_MOVES if mode],
        "metrics": metrics(),
        "backends": sorted(patch.BACKENDS),
        "patches": {
            record.target: "added" if record.expects is None else list(record.expects)
            for record in patch.records()
            if holds(record.since, record.before)
        },
        "methods": sorted(method.__name__ for method in patched_api.METHODS),
        "trainer": {
            name: signature
            for each in (getattr(trainer, name) for name in trainer.__all__)
            for name, signature in signatures(each).items()
        },
        "modules": sorted(
            str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")
        ),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(surface(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    sys.stdout.write(f"{FILE}\n")
