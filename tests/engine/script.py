"""Scripts of tests/engine in a process of their own: vLLM wants the choice for one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "


def tell(seen: dict[str, Any]) -> None:
    """What a script says when it is done."""
    print(RESULT + json.dumps(seen), flush=True)


def run_script(name: str, *arguments: Any) -> dict[str, Any]:
    """Run `tests/engine/<name>.py`; returns what it told."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engine.{name}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    told = [x for x in done.stdout.splitlines() if x.startswith(RESULT)]
    assert told, done.stdout[-4000:] + done.stderr[-6000:]
    seen: dict[str, Any] = json.loads(told[0].removeprefix(RESULT))
    return seen
