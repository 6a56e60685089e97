"""verl's own worker extension is asked for a delta in verl's format (`delta_sharded`).

Usage: python -m tests.support.frameworks.verl_deltas OLD NEW

The calls are those of its trainer for one delta. Prints as JSON what each has raised,
and what the engine serves afterwards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.engines.script import tell

CALLS: dict[str, dict[str, Any]] = {
    "start_weight_update": {},
    "update_verl_delta_weights": {"kwargs": {"update_info": {}}},
    "finish_weight_update": {},
}


def main(old: Path, new: Path) -> None:
    from tests.e2e.test_adoption import served
    from tests.support.engines.bare_core import answers, call, publish
    from tests.support.frameworks.core import extended_core

    extension = "benchmarks.frameworks.extensions.verl"
    transport = {"weight_transfer_config": {"backend": "local"}}
    with extended_core(old, extension, **transport) as core:
        publish(core, new, "new")
        publish(core, old, "old")
        before, said = served(core), answers(core, "before")
        raised: dict[str, str | None] = {}
        for method, told in CALLS.items():
            try:
                core.collective_rpc(method, **told)
                raised[method] = None
            except Exception as error:
                raised[method] = str(error)
        is_same = (served(core), answers(core, "after")) == (before, said)
        active = call(core, "status")["active"]
        back = call(core, "rollback")["weight_version"]
        tell({"raised": raised, "same": is_same, "active": active, "back": back})


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*map(Path, sys.argv[1:]))
