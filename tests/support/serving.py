"""A real `vllm serve` in a process of its own, for the length of a `with`."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.support.preloaded_process import IS_ON_CPU, begin
from vllm.inflight.releases.table import holds

MAIN = "vllm.entrypoints.cli.main"
NUM_KV_BLOCKS = 1024
"""On a CPU. 16 requests of 1,024 tokens fill half, and each engine zeroes all of it."""
START_S = 300
"""Up to eight processes import vLLM, and other tests run beside them."""


class Server:
    """Serves a checkpoint on a loopback port.

    Args:
        model: the checkpoint.
        flags: of `vllm serve`.
        env: variables of its environment.
        key: its control key.
        main: the module that it runs.
        port: of a server that has ended; 0 for a free one.

    Attributes:
        url: where it answers.
        client: an HTTP client with the server's control key, if it has one.

    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        key: str | None = None,
        main: str = MAIN,
        port: int = 0,
    ) -> None:
        # Held, and not listened on, until the server does: nobody else is given it.
        self._probe = socket.socket()
        self._probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._probe.bind(("127.0.0.1", port))
        port = self._probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed at exit)
            prefix="vllm-serve-", suffix=".log"
        )
        words = [
            *("serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "tiny", "--enforce-eager"),
            *(("--enable-scale-out",) if holds("0.30.0", None) else ()),
            *("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "16"),
            *(("--num-gpu-blocks-override", str(NUM_KV_BLOCKS)) if IS_ON_CPU else ()),
            *flags,
        ]
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        if key is not None:
            environment["VLLM_INFLIGHT_ADMIN_KEY"] = key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # A connection per request: one kept might be closed by the server, as it
        # closes those that idle for 5 s, just as it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.Client(
            base_url=self.url, headers=headers, timeout=60, limits=limits
        )
        log = Path(self._log.name)
        self._process = begin(main, words, environment | (env or {}), log, log)

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + START_S
        with self._probe:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    said = self.log()
                    self.stop()
                    raise RuntimeError(f"vllm serve ended at start:\n{said}")
                try:
                    if self.client.get("/health").status_code == 200:
                        return self
                except httpx.TransportError:
                    time.sleep(0.2)
        said = self.log()
        self.stop()
        raise RuntimeError(f"vllm serve did not start:\n{said}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log()[-8000:])
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process, leader of its own group."""
        return self._process.pid

    def kill(self) -> None:
        """End the server and its processes at once, without a word."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> str:
        """What the server has said."""
        return Path(self._log.name).read_text(errors="replace")

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Any request, with JSON; returns the reply as it is."""
        return self.client.request(method, path, json=body)

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """POST JSON; returns the decoded reply, whatever its status."""
        return self.client.post(path, json=body or {}, **options).json()

    def post_and_leave(self, path: str, body: Any) -> None:
        """POST JSON, and hang up before there is a reply."""
        asked = self.client.build_request("POST", path, json=body)
        headers = (f"{name}: {value}" for name, value in asked.headers.items())
        head = "\r\n".join([f"POST {path} HTTP/1.1", *headers, "", ""])
        with socket.create_connection((asked.url.host, asked.url.port)) as caller:
            caller.sendall(head.encode() + asked.content)

    def stop(self) -> None:
        """End the server, politely first; only its own process group."""
        self.client.close()
        self._probe.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
