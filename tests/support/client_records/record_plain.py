"""What vLLM as it is answers to its own clients' calls: see plain.json.

The server has no plugin, and vLLM's development mode on. A test asks ours the same, in
the same order. A call that plain vLLM answers with 500 is not among these: what ours
says there is in docs/reliability.md.

Usage: python -m tests.support.client_records.record_plain FOLDER
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.models.tiny import make_checkpoint
from tests.support.serving import Server

RECORD = Path(__file__).with_name("plain.json")
PLAIN = {"VLLM_PLUGINS": "", "VLLM_SERVER_DEV_MODE": "1"}
NONE: Any = object()
"""No body."""

MODES = ("abort", "wait", "keep")
WORDS = ("true", "True", "1", "on", "yes", "t", "false", "FALSE", "0", "off", "no", "f")
NO_WORDS = ("", "2", "maybe", "None")
NO_MODES = ("", "KEEP", "drain", "true")


def asked() -> list[tuple[str, str, Any]]:
    """Method, path with its query, and body."""
    calls: list[tuple[str, str, Any]] = []

    def paused(query: str, body: Any = NONE) -> None:
        calls.extend(
            [
                ("POST", f"/pause{query}", body),
                ("GET", "/is_paused", NONE),
                ("POST", "/resume", body),
                ("GET", "/is_paused", NONE),
            ]
        )

    paused("")
    paused("", {})
    for mode in MODES:
        for clear in ("true", "false"):
            paused(f"?mode={mode}&clear_cache={clear}")
        paused(f"?mode={mode}", {})
    for word in (*WORDS, *NO_WORDS):
        paused(f"?clear_cache={word}")
        calls.append(("POST", f"/reset_prefix_cache?reset_external={word}", NONE))
        query = f"?reset_running_requests={word}&reset_external=false"
        calls.append(("POST", f"/reset_prefix_cache{query}", NONE))
        calls.append(("GET", f"/get_world_size?include_dp={word}", NONE))
    for mode in NO_MODES:
        paused(f"?mode={mode}")
    paused("?mode=abort&mode=keep")
    # The last one of a pause and of going on count, however often they are asked.
    for path in (
        "/pause?mode=keep",
        "/pause?mode=keep",
        "/pause",
        "/resume",
        "/resume",
    ):
        calls += [("POST", path, NONE), ("GET", "/is_paused", NONE)]
    for body in (NONE, {}):
        calls += [
            ("POST", "/reset_prefix_cache", body),
            ("POST", "/reset_mm_cache", body),
            ("POST", "/reset_encoder_cache", body),
            ("POST", "/wake_up", body),
            ("POST", "/wake_up?tags=weights", body),
            ("POST", "/wake_up?tags=weights&tags=kv_cache", body),
        ]
    for query in ("?level=3", "?level=-1", "?level=x", "?mode=drain", "?level=1&mode="):
        calls.append(("POST", f"/sleep{query}", NONE))
    calls += [
        ("GET", "/is_sleeping", NONE),
        *(
            ("POST" if path[1] in "sw" else "GET", path, NONE)
            for query in ("", "?level=0", "?level=1&mode=keep", "?level=2&tags=weights")
            for path in (f"/sleep{query}", "/is_sleeping", "/wake_up", "/is_sleeping")
        ),
        ("GET", "/get_world_size", NONE),
        ("POST", "/abort_requests", {}),
        ("POST", "/abort_requests", {"request_ids": []}),
        ("POST", "/abort_requests", {"request_ids": ["no such request"]}),
        ("POST", "/update_weight_version", {"new_version": "named"}),
        ("GET", "/weight_info", NONE),
        ("POST", "/update_weight_version", {}),
        ("POST", "/collective_rpc", {}),
        ("POST", "/collective_rpc", []),
        ("POST", "/collective_rpc", {"method": "check_health"}),
        ("POST", "/collective_rpc", {"method": "check_health", "args": []}),
        ("POST", "/collective_rpc", {"method": "check_health", "kwargs": {}}),
        ("POST", "/collective_rpc", {"method": "check_health", "timeout": 10}),
        ("POST", "/collective_rpc", {"method": "check_health", "colour": "red"}),
        ("GET", "/server_info", NONE),
        ("GET", "/server_info?config_format=json", NONE),
        ("GET", "/server_info?config_format=yaml", NONE),
    ]
    return calls


def main(folder: Path) -> None:
    records = []
    with Server(make_checkpoint(folder / "a", 0), env=PLAIN) as server:
        for method, path, body in asked():
            entry: dict[str, Any] = {"method": method, "path": path}
            if body is not NONE:
                entry["json"] = body
            reply = server.client.request(method, path, json=entry.get("json"))
            entry["status"] = reply.status_code
            if reply.status_code == 200 and not path.startswith("/server_info"):
                entry["reply"] = reply.json() if reply.content else None
            records.append(entry)
    lines = ",\n".join(json.dumps(each) for each in records)
    head = json.dumps({"server": f"vllm {version('vllm')}"})[1:-1]
    RECORD.write_text(f'{{{head}, "requests": [\n{lines}\n]}}\n')
    failed = [each for each in records if each["status"] >= 500]
    print(f"{len(records)} requests; {len(failed)} are 500: {failed}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
