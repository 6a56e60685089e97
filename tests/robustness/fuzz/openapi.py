"""`python -m tests.robustness.fuzz.openapi --requests 20000`: schemathesis, and a real
server.

It makes requests from what `/openapi.json` says of the control routes, good and bad,
and sends them to a server with an engine. No answer may be a fault of the server or of
a kind that is not told of; at the end the server updates and decodes as before.
`make fuzz` installs schemathesis beside `.venv`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from tests.robustness.fuzz.requests import KEY, LEFT_OUT, says
from tests.support.models.tiny import make_checkpoint
from tests.support.serving import Server
from vllm.inflight.api.server.routes import ROUTES

TOOL = Path("build/schemathesis/bin/st")
CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"


def main() -> int:
    """Send them; 1 if a check has failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    paths = sorted({path for _, path in ROUTES if path not in LEFT_OUT})
    each = -(-asked.requests // len([path for _, path in ROUTES if path in paths]))
    with tempfile.TemporaryDirectory() as root:
        model = make_checkpoint(Path(root) / "model", 0)
        flags = (
            *("--weight-transfer-config", '{"backend": "local"}'),
            *("--inflight-allowed-paths", root, "--inflight-pause-lease-s", "1"),
        )
        with Server(model, *flags, key=KEY) as server:
            before = says(server)
            told = subprocess.run(
                [
                    *(str(TOOL.resolve()), "run", f"{server.url}/openapi.json"),
                    *("--header", f"Authorization: Bearer {KEY}"),
                    *("--include-path-regex", f"^({'|'.join(map(re.escape, paths))})$"),
                    *("--phases", "fuzzing", "--checks", CHECKS),
                    *("--mode", "all", "--max-examples", str(each)),
                    *("--seed", str(asked.seed), "--workers", "2"),
                    *("--continue-on-failure", "--no-color"),
                ],
                check=False,
                cwd=root,  # it keeps a cache where it is
            )
            server.post("/abort_weight_update")
            server.post("/continue_generation")
            reply = server.post("/update_weights_from_disk", {"path": str(model)})
            lives = reply.get("success") is True and says(server) == before
    print(f"afterwards it updates and says what it said: {lives}")
    return told.returncode or not lives


if __name__ == "__main__":
    raise SystemExit(main())
