"""`vllm-inflight doctor --url` on a real server, healthy and broken."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

KEY = "a-key-of-the-tests"
HEALTH_S = 6
COMMAND = Path(sys.executable).with_name("vllm-inflight")


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    flags = ("--weight-transfer-config", '{"backend": "local"}')
    flags += ("--worker-extension-cls", "tests.support.frameworks.openrlhf.Extension")
    with Server(old, *flags, "--inflight-health-s", f"{HEALTH_S}", key=KEY) as running:
        yield running


def visit(server: Server, key: str | None = KEY) -> tuple[int, dict[str, Any]]:
    """The exit code, and the findings by name."""
    environment = {k: v for k, v in os.environ.items() if "KEY" not in k}
    if key is not None:
        environment["VLLM_INFLIGHT_ADMIN_KEY"] = key
    done = subprocess.run(
        [COMMAND, "doctor", "--url", server.url, "--watch", "0.3", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert KEY not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return done.returncode, {f["name"]: f for f in report["findings"]}


def test_a_server_that_serves_is_healthy(server: Server, new: Path) -> None:
    server.post("/update_weights_from_disk", {"path": str(new), "weight_version": "n"})
    code, findings = visit(server)
    assert code == 0, findings
    assert {finding["state"] for finding in findings.values()} == {"good"}
    assert findings["vLLM"]["found"] == "0.32.0"
    assert "'n' (epoch" in findings["weights"]["found"]
    told = findings["worker extension"]["found"]
    assert "is adopted as OpenRLHF: update_weight(name, dtype, shape, empty" in told


def test_the_doctor_reports_that_control_routes_need_a_key(server: Server) -> None:
    code, findings = visit(server, key=None)
    assert code == 1
    assert findings["control routes"]["found"] == "they need a key"


def test_a_pause_without_a_lease_needs_attention_and_one_with_a_lease_does_not(
    server: Server,
) -> None:
    pause = {"mode": "in_place", "owner": "rl-0"}
    server.post("/pause_generation", pause)
    code, findings = visit(server)
    assert code == 1
    assert "by rl-0, without a lease" in findings["decoding"]["found"]
    server.post("/pause_generation", pause | {"lease_s": 60})
    code, findings = visit(server)
    server.post("/resume")
    assert code == 0
    assert "s unless renewed" in findings["decoding"]["found"]


def test_an_update_that_stands_still_needs_attention_until_it_is_given_up(
    server: Server,
) -> None:
    server.post("/start_weight_update", {"update_id": "left", "deadline_s": 899})
    code, findings = visit(server)
    assert code == 1
    told = findings["update"]["found"]
    assert "'left' is staging" in told and "it waits for its trainer" in told
    assert "it is aborted in 8" in told  # hundred and something
    time.sleep(1)
    active = server.client.get("/weight_update").json()["active"]
    assert active["stalled_s"] > 1
    assert server.client.get("/health").status_code == 200
    stalled = 'vllm:inflight_update_stalled_seconds{engine="0"} '
    (line,) = (
        line
        for line in server.client.get("/metrics").text.splitlines()
        if line.startswith(stalled)
    )
    assert float(line.removeprefix(stalled)) > 1
    server.post("/abort_weight_update", {"update_id": "left"})
    code, findings = visit(server)
    assert code == 0
    assert findings["update"]["found"] == "'left' was aborted"


def test_the_doctor_reports_a_failed_update_with_its_reason(
    server: Server, old: Path
) -> None:
    server.post("/update_weights_from_disk", {"path": "/nowhere"})
    code, findings = visit(server)
    assert code == 1
    assert "/nowhere" in findings["update"]["found"]
    assert findings["update"]["remedy"]
    server.post("/update_weights_from_disk", {"path": str(old)})
    assert visit(server)[0] == 0


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def core_of(server: Server) -> psutil.Process:
    (core,) = [
        child
        for child in psutil.Process(server.pid).children()
        if "EngineCore" in " ".join(child.cmdline())
    ]
    return core


def health(server: Server) -> int:
    return server.client.get("/health").status_code


def test_the_doctor_reports_a_hanging_engine_core_before_health_does(
    server: Server,
) -> None:
    # It may have been stopped a moment ago, and have that to catch up with.
    until(lambda: health(server) == 200, "it never recovers")
    with stopped(core_of(server)):
        assert health(server) == 200
        code, findings = visit(server)
    assert code == 1
    assert "the engine core hangs" in findings["control routes"]["found"]


def test_health_says_503_while_the_core_does_not_answer_and_200_when_it_does_again(
    server: Server,
) -> None:
    # It may have been stopped a moment ago, and have that to catch up with.
    until(lambda: health(server) == 200, "it never recovers")
    with stopped(core_of(server)):
        time.sleep(HEALTH_S)
        began = time.monotonic()
        assert health(server) == 503
        assert time.monotonic() - began < HEALTH_S + 5
        began = time.monotonic()
        assert health(server) == 503
        assert time.monotonic() - began < HEALTH_S, "a question is asked once"
    until(lambda: health(server) == 200, "it never recovers")


def test_an_engine_under_load_with_an_update_under_way_is_healthy(
    server: Server, new: Path
) -> None:
    """For longer than it may be silent."""
    body = {"model": "tiny", "prompt": "a" * 60, "max_tokens": 300, "ignore_eos": True}
    ends = time.monotonic() + 2 * HEALTH_S
    seen = []

    def ask() -> None:
        while time.monotonic() < ends:
            server.post("/v1/completions", body)

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask) for _ in range(4)]
        while time.monotonic() < ends:
            server.post("/update_weights_from_disk", {"path": str(new)})
            seen.append(health(server))
        for done in asking:
            done.result()
    assert set(seen) == {200}
