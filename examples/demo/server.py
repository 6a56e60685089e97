"""The server: a real `vllm serve` on the loopback, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

from examples.demo.rollout import MODEL

START_S = 300.0
END_S = 20.0


class Server:
    """Serves a checkpoint for the length of a `with`.

    Attributes:
        url: its URL.

    """

    def __init__(self, checkpoint: Path, log: Path) -> None:
        # Held until the server listens there, so that nobody else is given the port.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(checkpoint), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            # The trainer has float32. Few roundings of its weights change at a step,
            # so deltas are small.
            *("--dtype", "bfloat16"),
            *("--enforce-eager", "--block-size", "32"),
            *("--max-model-len", "512", "--max-num-seqs", "256"),
            *("--weight-transfer-config", json.dumps({"backend": "local"})),
            "--disable-uvicorn-access-log",
        ]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            # One thread for so small a model: a second would only be waited for,
            # and trainer and clients need the core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # The worker in the engine core's process: on the CPU they are apart by
            # default, and each spins on a core while it waits for the other.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the server's process group: politely first, then by SIGKILL."""
        self._held.close()
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)
        finally:  # also if Ctrl-C comes twice
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def await_ready(self) -> None:
        """Return once it answers; raises with the end of its log if it cannot."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    self._held.close()
                    return
            time.sleep(0.2)
        tail = self._log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"vllm serve did not start:\n{tail}")
