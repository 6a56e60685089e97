"""Scripts of tests/engine in a process of their own: vLLM wants the choice for one."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.5,
}
"""Of an `LLM` of a tiny model."""
LONGEST_S = 400
"""That a script may take."""


def tell(seen: dict[str, Any]) -> None:
    """What a script says when it is done; before that, in case it does not live on."""
    print(RESULT + json.dumps(seen), flush=True)


def run_script(
    name: str,
    *arguments: Any,
    room: str = "tests.engine",
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run `<name>.py` of a room, with `env` beside our own; returns what it told."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{room}.{name}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=LONGEST_S)
    finally:
        # With the engine's processes, which would outlive one that hangs.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    told = [x for x in said.splitlines() if x.startswith(RESULT)]
    assert told, said[-4000:] + complained[-6000:]
    seen: dict[str, Any] = json.loads(told[-1].removeprefix(RESULT))
    return seen
