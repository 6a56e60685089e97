"""Every control call of the Python client and of the command line, on a real server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.errors import (
    Forbidden,
    InflightError,
    OwnedByAnother,
    PauseConflict,
    UnknownUpdate,
    VersionConflict,
    WrongPhase,
)
from vllm.inflight.trainer import (
    AsyncControlClient,
    ControlClient,
    PauseLost,
    Publisher,
    WaitTimeout,
    per_token_versions,
)

pytestmark = pytest.mark.engine

KEY = "a-key-of-the-tests"
COMMAND = Path(sys.executable).with_name("vllm-inflight")


@pytest.fixture(scope="module")
def running(old: Path) -> Iterator[Server]:
    flags = ("--weight-transfer-config", '{"backend": "local"}')
    with Server(old, *flags, key=KEY) as server:
        yield server


@pytest.fixture
def client(running: Server, old: Path) -> Iterator[ControlClient]:
    """A client of the server, which serves `old`, has no update, and is not paused."""
    with ControlClient(running.url, api_key=KEY) as client:
        client.continue_()
        if client.status()["active"] is not None:
            client.abort()
        client.update_weights_from_disk(str(old), "old")
        yield client
        client.continue_()


def command(server: Server, *words: str, code: int = 0, key: str = KEY) -> Any:
    """What a subcommand prints as JSON."""
    name, *rest = words
    done = subprocess.run(
        [COMMAND, name, "--url", server.url, "--json", *rest],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"VLLM_INFLIGHT_ADMIN_KEY": key},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def generated(server: Server, num_tokens: int, timeout: float = 60) -> Any:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": num_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = server.client.post("/v1/completions", json=body, timeout=timeout)
    return reply.json()["choices"][0]


def test_versions_are_published_rolled_back_and_waited_for(
    client: ControlClient, running: Server, new: Path
) -> None:
    reply = client.update_weights_from_disk(str(new), "new", mode="retract")
    assert client.wait_for("new")["digest"] == reply["digest"]
    choice = generated(running, 8)
    versions = per_token_versions(choice["weight_versions"])
    assert versions == ["new"] * len(choice["token_ids"])
    with pytest.raises(VersionConflict):
        client.rollback("another")
    assert client.rollback("old", mode="in_place")["weight_version"] == "old"
    assert client.weight_info()["previous"]["weight_version"] == "new"
    with pytest.raises(WaitTimeout):
        client.wait_for("new", timeout_s=0.5)


def test_an_update_is_shown_and_aborted(client: ControlClient, running: Server) -> None:
    running.post("/start_weight_update", {"update_id": "u"})
    assert client.status()["active"]["update_id"] == "u"
    assert client.abort() == {"update_id": "u", "phase": "aborted"}
    assert client.status("u")["phase"] == "aborted"
    with pytest.raises(WrongPhase):
        client.abort()
    with pytest.raises(UnknownUpdate):
        client.status("nobody")


def test_a_pause_is_renewed_and_ends_with_its_block(
    client: ControlClient, running: Server
) -> None:
    with client.pause(lease_s=6, owner="me") as pause:
        time.sleep(7)
        assert client.is_paused() and pause.lost is None
        assert client.pause_state()["leases_expired"] == 0
        with pytest.raises(httpx.TimeoutException):
            generated(running, 4, timeout=0.5)
        with pytest.raises(OwnedByAnother):
            client.continue_("somebody")
    assert not client.is_paused()
    assert len(generated(running, 4)["token_ids"]) == 4


def test_requests_that_arrive_in_a_block_outlive_its_renewals(
    client: ControlClient, running: Server
) -> None:
    with ThreadPoolExecutor() as pool:
        with client.pause("abort", lease_s=6, owner="me") as pause:
            reply = pool.submit(generated, running, 4)
            until(lambda: client.pause("abort", owner="me").reply["num_waiting"])
            time.sleep(7)  # longer than the lease, and several renewals
            assert not reply.done() and pause.lost is None
        choice = reply.result()
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 4


def test_a_pause_that_an_operator_ends_is_lost(client: ControlClient) -> None:
    with pytest.raises(PauseLost), client.pause("retract", lease_s=1, owner="me") as it:
        client.continue_()
        until(lambda: it.lost)
        assert not client.is_paused()
    with pytest.raises(ValueError), client.pause():
        raise ValueError
    assert not client.is_paused()


def test_a_pause_that_is_not_renewed_ends_by_itself(client: ControlClient) -> None:
    client.pause("abort", lease_s=600)
    with pytest.raises(PauseConflict):
        client.pause("in_place")
    client.pause("abort", lease_s=0.5)
    until(lambda: not client.is_paused())


async def test_the_calls_can_be_awaited(
    client: ControlClient, running: Server, new: Path
) -> None:
    async with AsyncControlClient(running.url, api_key=KEY) as waiting:
        reply = await waiting.update_weights_from_disk(str(new), "awaited")
        assert (await waiting.wait_for("awaited"))["epoch"] == reply["epoch"]
        async with waiting.pause("retract", owner="me"):
            assert await waiting.is_paused()
            assert (await waiting.pause_state())["owner"] == "me"
        assert not await waiting.is_paused()
        assert (await waiting.pause("wait")).reply["mode"] == "wait"
        assert not (await waiting.continue_())["paused"]
        assert (await waiting.rollback())["weight_version"] == "old"
        assert (await waiting.weight_info())["weight_version"] == "old"
        running.post("/start_weight_update", {"update_id": "awaited"})
        assert (await waiting.status("awaited"))["phase"] != "aborted"
        assert (await waiting.abort())["phase"] == "aborted"


async def test_a_publisher_has_the_same_calls(
    client: ControlClient, running: Server, new: Path
) -> None:
    from safetensors.torch import load_file

    weights = load_file(new / "model.safetensors")
    with Publisher(running.url, weights, api_key=KEY) as publisher:
        outcome = await publisher.apublish("published", step=3)
        assert outcome.version == "published"
        (info,) = publisher.wait_for("published").values()
        assert info["step"] == 3
        with publisher.pause() as pause:
            assert publisher.is_paused() and set(pause.replies) == {running.url}
        assert publisher.rollback()[running.url]["weight_version"] == "old"
        assert (
            publisher.status(outcome.update_id)[running.url]["phase"] == "rolled_back"
        )
        with pytest.raises(InflightError):
            publisher.abort()


def test_the_command_line_has_each_call(
    client: ControlClient, running: Server, new: Path
) -> None:
    told = command(running, "publish", str(new), "--version", "new")
    assert told["weight_version"] == "new"
    assert command(running, "status")["weights"]["weight_version"] == "new"
    assert command(running, "rollback")["weight_version"] == "old"
    paused = command(running, "pause", "--lease-s", "60", "--owner", "me")
    assert (paused["mode"], paused["owner"]) == ("in_place", "me")
    error = command(running, "continue", "--owner", "somebody", code=1)["error"]
    assert error["code"] == OwnedByAnother.code
    assert command(running, "continue")["paused"] is False
    running.post("/start_weight_update", {"update_id": "by-hand"})
    assert command(running, "abort")["update_id"] == "by-hand"
    error = command(running, "publish", "/nowhere", code=1)["error"]
    assert "/nowhere" in error["message"]
    error = command(running, "status", code=1, key="wrong")["error"]
    assert error["code"] == Forbidden.code
