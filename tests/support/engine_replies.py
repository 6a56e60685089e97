"""What an engine core replies to each control call, recorded from a real one.

`python -m tests.support.engine_replies` starts a core on a tiny model, makes every call
that needs no trainer, and writes the replies to `engine_replies.json` beside this file.
`route_stub.py` answers with them, so a route that reads a key which the core does not
send fails its unit test. A test with an engine compares the file with a core.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("engine_replies.json")

UNRECORDED: dict[str, dict[str, Any]] = {
    "init_transport": {},
    "shutdown_transport": {},
    "join_group": {},
    "leave_group": {},
    "compare": {},
    "miss": {},
    "undo_release": {},
}
"""Replies to the calls that need a trainer or a sleeping engine."""


def record(core: Any, folder: Path) -> dict[str, Any]:
    """Call -> reply of a core that serves no requests yet; `folder` has new weights."""
    from tests.support.engines.bare_core import Streams, add, call, prompt
    from vllm.inflight.worker.catalogue import unpacked

    replies: dict[str, Any] = {}

    def ask(method: str, key: str | None = None, **body: Any) -> Any:
        replies[key or method] = call(core, method, **body)
        return replies[key or method]

    ask("may_start")
    names = ask("names")
    ask("source")
    ask("staging")
    ask("journal")["model"] = "model"
    ask("health")
    ask("was_started", update_id="u", fingerprint="f")
    ask("unused", names=["lm_head.weight"])
    name = unpacked(names["catalogues"])["tensors"][0]["name"]
    ask("rows", tensor=name, num_rows=1)
    ask("start", update_id="u", weight_version="v", transport="local")
    ask("receive", update_id="u", update_info={"path": str(folder)})
    ask("prepare", update_id="u")
    ask("status", "status during an update")
    ask("status", "status of the active update", update_id="u")
    add(core, "r", prompt(1))
    Streams(core).step(3)
    ask("commit", update_id="u")
    ask("status")
    ask("status", "status of an update", update_id="u")
    ask("info")
    ask("held")
    ask("requests")
    ask("metrics")
    ask("verify")
    ask("checksums", skip=None, is_target=False)
    ask("pause", "pause as a trial", mode="retract", is_trial=True)
    ask("pause", mode="retract")
    ask("paused", "paused during a pause")
    ask("release", tags=["weights"], mode="retract", is_trial=True)
    ask("resume")
    ask("paused")
    ask("abort_requests", ids=None)
    Streams(core).run()
    ask("flush")
    ask("rollback", rollback_id="r")
    ask("undo", rollback_id="r")
    ask("rename", weight_version="w")
    steps = [
        ("start", {"update_id": "a", "transport": "local"}),
        ("receive", {"update_id": "a", "update_info": {"path": str(folder)}}),
        ("prepare", {"update_id": "a"}),
    ]
    ask("advance", calls=steps)
    call(core, "abort", update_id="a")
    call(core, "start", update_id="v", transport="local")
    ask("abort", update_id="v")
    return replies


def shape(reply: Any) -> Any:
    """The keys of a reply at every level; entries of a list are all alike.

    Below `seconds` and `drift` they depend on the updates before.
    """
    if isinstance(reply, dict):
        return {
            key: None if key in ("seconds", "drift") else shape(value)
            for key, value in reply.items()
        }
    if isinstance(reply, list):
        return [shape(each) for each in reply[:1]]
    return None


def dumped(replies: dict[str, Any]) -> str:
    """The content of the file."""

    def encoded(value: bytes) -> dict[str, str]:
        return {"base64": base64.b64encode(value).decode()}

    return json.dumps(replies, indent=1, default=encoded, sort_keys=True) + "\n"


def recorded() -> dict[str, Any]:
    """Call -> reply, from the file."""

    def decoded(value: dict[str, Any]) -> Any:
        is_bytes = value.keys() == {"base64"}
        return base64.b64decode(value["base64"]) if is_bytes else value

    return UNRECORDED | json.loads(FILE.read_text(), object_hook=decoded)


def main() -> None:
    """Write the file."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from tests.support.models.tiny import make_checkpoint

    with tempfile.TemporaryDirectory() as root:
        old, new = (make_checkpoint(Path(root, str(s)), s) for s in (1, 2))
        config = EngineArgs(
            str(old),
            max_model_len=256,
            max_num_seqs=4,
            dtype="float32",
            enforce_eager=True,
            gpu_memory_utilization=0.3,
        ).create_engine_config()
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
        try:
            FILE.write_text(dumped(record(core, new)))
        finally:
            core.shutdown()
    sys.stdout.write(f"{FILE}\n")


if __name__ == "__main__":
    main()
