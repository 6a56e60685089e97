"""A client of the control routes: what it asks, lost replies, pauses that it renews."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.support.trainers.fake_engine import (
    ABORT,
    CONTINUE,
    DROP,
    FROM_DISK,
    IS_PAUSED,
    LOSE,
    PAUSE,
    ROLLBACK,
    START,
    STARTING,
    publisher,
)
from tests.support.waiting import until
from vllm.inflight.errors import (
    EngineUnreachable,
    Forbidden,
    InflightError,
    NothingToRollBack,
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
    WaitTimeout,
)
from vllm.inflight.trainer.control.pause import Calls

pytestmark = pytest.mark.seconds

LEASE_S = 1.5
"""Of a pause that is renewed in time on a busy machine too."""


def is_renewed(engine: Any, num_before: int = 0) -> bool:
    """Whether a pause was renewed for longer than its first lease: each third of it.

    `num_before` are the calls of pauses before it.
    """
    return len(engine.bodies(PAUSE)) - num_before > 5


@pytest.fixture
def client(engine):
    with ControlClient(engine.url, timeout_s=20) as client:
        yield client


def test_a_client_needs_no_torch():
    code = (
        "import sys; import vllm.inflight.errors; before = set(sys.modules);"
        "from vllm.inflight.trainer import ControlClient, per_token_versions;"
        "print(sorted(m for m in set(sys.modules) - before if m[:5] == 'torch'),"
        "'vllm.inflight.trainer.publisher' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_the_client_sends_its_key_and_names_its_server_in_errors(engine):
    engine.faults["/weight_info"] = [Forbidden("wrong key")]
    with ControlClient(engine.url, api_key="secret") as client:
        with pytest.raises(Forbidden, match=rf"{engine.url}: wrong key"):
            client.weight_info()
        assert client.weight_info()["weight_version"] == "default"
    assert engine.key == "Bearer secret"


def test_a_server_that_does_not_answer_is_reported_within_the_timeout(engine, leaping):
    engine.faults["/weight_info"] = [STARTING] * 99
    with (
        ControlClient(engine.url, timeout_s=20) as client,
        pytest.raises(EngineUnreachable, match="503"),
    ):
        client.weight_info()
    assert sum(leaping) <= 20


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_server_of_this_host_is_asked_without_the_proxy_of_the_environment(
    engine, monkeypatch, leaping, host
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    url = engine.url.replace("127.0.0.1", host)
    with ControlClient(url, timeout_s=20) as client:
        assert client.weight_info()["weight_version"] == "default"
    with (
        ControlClient("http://192.0.2.1:80", timeout_s=20) as client,
        pytest.raises(EngineUnreachable, match="refused"),  # by the proxy
    ):
        client.weight_info()


def test_a_call_that_waits_for_a_server_says_so_in_the_log(engine, client, logged):
    engine.faults["/weight_info"] = [STARTING] * 5
    client.weight_info()
    assert set(logged) == {
        f"{engine.url}: no answer to GET /weight_info yet (HTTP 503)"
    }
    engine.delays["/weight_info"] = 1.5  # it answers, and takes its time
    client.weight_info()
    assert len(logged) == 1


def test_the_status_call_returns_one_update_or_all(engine, client):
    assert client.status()["active"] is None
    update_id = engine.begin_elsewhere()
    assert client.status()["active"]["update_id"] == update_id
    assert client.status(update_id)["update_id"] == update_id
    with pytest.raises(UnknownUpdate):
        client.status("nobody")


def test_an_abort_without_an_id_aborts_the_update_under_way_by_its_id(engine, client):
    engine.faults[ABORT] = [LOSE]
    update_id = engine.begin_elsewhere()
    assert client.abort() == {"update_id": update_id, "phase": "aborted"}
    assert [body["update_id"] for body in engine.bodies(ABORT)] == [update_id] * 2
    with pytest.raises((WrongPhase, UnknownUpdate)):
        client.abort("nobody")


# ------------------------------------------------------------------ rollback
def test_a_rollback_returns_to_the_version_before(engine, client):
    with pytest.raises(NothingToRollBack):
        client.rollback()
    engine.commit_elsewhere("new")
    with pytest.raises(VersionConflict):
        client.rollback("other")
    assert client.rollback("default", mode="retract")["weight_version"] == "default"
    assert engine.bodies(ROLLBACK)[-1] == {"to_version": "default", "mode": "retract"}


@pytest.mark.parametrize("fault", [LOSE, DROP])
def test_a_rollback_whose_reply_is_lost_is_made_once(engine, client, fault):
    engine.commit_elsewhere("new")
    engine.faults[ROLLBACK] = [fault]
    reply = client.rollback()
    assert (reply["weight_version"], reply["epoch"]) == ("default", 2)
    assert engine.version["weight_version"] == "default"
    assert len(engine.bodies(ROLLBACK)) == (1 if fault == LOSE else 2)


# ------------------------------------------------------------------ from disk
def test_a_checkpoint_of_the_server_is_published_once(engine, client):
    engine.faults[FROM_DISK] = [LOSE]
    reply = client.update_weights_from_disk("/models/x", "v1", mode="retract")
    assert (reply["weight_version"], reply["epoch"]) == ("v1", 1)
    first, again = engine.bodies(FROM_DISK)
    assert first == again
    assert first["path"] == "/models/x" and first["mode"] == "retract"


# ------------------------------------------------------------------- wait_for
def test_a_version_is_waited_for(engine, client, leaping):
    engine.commit_elsewhere("v1")
    assert client.wait_for("v1")["epoch"] == 1
    with pytest.raises(WaitTimeout, match=r"'v2' is not live after 30 s.*'v1'") as at:
        client.wait_for("v2", timeout_s=30)
    assert 10 < sum(leaping) <= 30
    assert isinstance(at.value, TimeoutError) and isinstance(at.value, InflightError)


def test_a_server_that_is_gone_is_waited_for_as_long(engine, client, leaping):
    engine.faults["/weight_info"] = [STARTING] * 99
    with pytest.raises(WaitTimeout, match="503"):
        client.wait_for("v2", timeout_s=30)
    assert 10 < sum(leaping) <= 30


# ---------------------------------------------------------------------- pause
def test_a_pause_lasts_until_it_is_continued(engine, client):
    pause = client.pause("retract", lease_s=30, owner="me", flush_cache=True)
    assert pause.reply["mode"] == "retract" and client.is_paused()
    assert engine.bodies(PAUSE) == [
        {"mode": "retract", "lease_s": 30, "owner": "me", "flush_cache": True}
    ]
    with pytest.raises(OwnedByAnother):
        client.continue_("somebody")
    assert client.pause_state()["owner"] == "me"
    assert client.continue_("me")["paused"] is False
    assert not client.is_paused()


def test_a_with_block_renews_its_pause_and_continues_at_its_end(engine, client):
    with client.pause(lease_s=LEASE_S, owner="me", flush_cache=True) as pause:
        until(lambda: is_renewed(engine))
        assert engine.pause_state()["is_paused"] and engine.leases_expired == 0
    assert pause.lost is None
    assert engine.pause is None
    first, *renewals = engine.bodies(PAUSE)
    assert first["flush_cache"] and renewals
    assert not any(body["flush_cache"] for body in renewals)


def test_a_pause_of_a_with_block_has_a_lease(engine, client):
    with client.pause():
        assert 50 < engine.pause_state()["lease_left_s"] <= 60
    with client.pause(lease_s=0):
        assert engine.pause_state()["lease_left_s"] is None
    assert engine.pause is None


def test_an_exception_in_the_block_ends_the_pause(engine, client):
    with pytest.raises(ValueError, match="mine"), client.pause():
        raise ValueError("mine")
    assert engine.pause is None


def test_a_pause_that_another_client_ended_is_lost_and_not_started_again(
    engine, client, logged
):
    with pytest.raises(PauseLost, match="continued"), client.pause(lease_s=0.3) as it:
        engine.continue_()
        until(lambda: it.lost)
        with pytest.raises(PauseLost):
            it.check()
        assert engine.pause is None
    assert "a pause was lost" in logged[0]


def test_a_pause_that_is_another_owners_now_is_left_alone(engine, client):
    with pytest.raises(PauseLost, match="'operator'"), client.pause(owner="me"):
        engine.pause = {"mode": "abort", "owner": "operator"}
    assert engine.pause == {"mode": "abort", "owner": "operator"}
    engine.continue_()


def test_a_lease_that_expired_while_the_server_was_unreachable_is_reported(
    engine, client
):
    with pytest.raises(PauseLost), client.pause(lease_s=0.3):
        engine.faults[IS_PAUSED] = [STARTING] * 5
        until(lambda: not engine.faults[IS_PAUSED])
        time.sleep(0.4)
        engine.pause_state()


def test_an_exception_in_the_block_is_raised_with_a_note_about_the_lost_pause(
    engine, client
):
    with pytest.raises(ValueError) as raised, client.pause():
        engine.continue_()
        raise ValueError("mine")
    assert "a pause was not ended as it should be" in raised.value.__notes__[0]


def test_a_pause_whose_reply_is_lost_is_asked_for_again(engine, client):
    engine.faults[PAUSE] = [LOSE]
    engine.faults[CONTINUE] = [LOSE]
    with client.pause():
        assert client.is_paused()
    assert engine.pause is None


def test_a_pause_that_drains_is_renewed_before_its_reply(engine, client):
    engine.held[PAUSE] = threading.Event()
    threading.Timer(2 * LEASE_S, engine.held[PAUSE].set).start()
    with client.pause("wait", lease_s=LEASE_S):
        assert engine.leases_expired == 0
    assert len(engine.bodies(PAUSE)) > 2


# ------------------------------------------------------------------- awaitable
async def test_the_same_calls_can_be_awaited(engine):
    async with AsyncControlClient(engine.url, timeout_s=20) as client:
        engine.commit_elsewhere("v1")
        assert (await client.wait_for("v1"))["epoch"] == 1
        assert (await client.rollback("default"))["weight_version"] == "default"
        assert (await client.weight_info())["epoch"] == 2
        assert (await client.status())["active"] is None
        pause = await client.pause("retract", owner="me")
        assert pause.reply["mode"] == "retract" and await client.is_paused()
        assert (await client.pause_state())["owner"] == "me"
        assert not (await client.continue_("me"))["paused"]
        num_before = len(engine.bodies(PAUSE))
        async with client.pause(lease_s=LEASE_S) as pause:
            await asyncio.to_thread(until, lambda: is_renewed(engine, num_before))
            assert engine.pause_state()["is_paused"]
        assert engine.pause is None and engine.leases_expired == 0
        with pytest.raises(PauseLost):
            async with client.pause():
                engine.continue_()
        reply = await client.update_weights_from_disk("/models/x", "v3")
        assert reply["weight_version"] == "v3"
        engine.begin_elsewhere()
        assert (await client.abort())["phase"] == "aborted"
        with pytest.raises(WaitTimeout):
            await client.wait_for("v9", timeout_s=0.2)


async def test_async_calls_do_not_block_the_event_loop(engine):
    engine.held["/weight_info"] = threading.Event()
    async with AsyncControlClient(engine.url) as client:
        asked = asyncio.gather(*(client.weight_info() for _ in range(8)))
        # No reply comes before all calls have: they are under way at one time.
        await asyncio.to_thread(until, lambda: len(engine.bodies("/weight_info")) == 8)
        engine.held["/weight_info"].set()
        await asked


async def test_a_cancelled_call_is_not_made_again(engine):
    engine.faults[ROLLBACK] = [STARTING] * 99
    engine.commit_elsewhere("v1")
    async with AsyncControlClient(engine.url) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.rollback(), 0.5)
        await asyncio.sleep(0.5)
        num = len(engine.bodies(ROLLBACK))
        await asyncio.sleep(1)
        assert len(engine.bodies(ROLLBACK)) == num


async def test_a_pause_whose_task_is_cancelled_does_not_stay(engine):
    engine.held[PAUSE] = threading.Event()

    async def pause() -> None:
        async with AsyncControlClient(engine.url) as client, client.pause():
            raise AssertionError("it was cancelled before")

    pausing = asyncio.create_task(pause())
    await asyncio.to_thread(until, lambda: engine.bodies(PAUSE))
    pausing.cancel()
    engine.held[PAUSE].set()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    await asyncio.to_thread(until, lambda: engine.bodies(CONTINUE))
    assert engine.pause is None


async def test_a_call_that_ends_as_its_task_is_cancelled_is_undone_once():
    calls, lock, undone = Calls(), threading.Lock(), []
    has_ended, was_cancelled = threading.Event(), threading.Event()

    class Slow:
        """A lock that the thread of the call leaves, and stands still behind."""

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            if threading.current_thread() is threading.main_thread():
                was_cancelled.set()
            else:
                has_ended.set()
                assert was_cancelled.wait(60)

    calls._lock = Slow()
    task = asyncio.create_task(calls.run(lambda: None, undo=undone.append))
    assert await asyncio.to_thread(has_ended.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await calls.settle()  # the thread of the call is over
    await asyncio.to_thread(until, lambda: undone)
    assert undone == [None]


# ------------------------------------------------------------ several engines
def test_a_publisher_asks_all_of_its_engines(engine, other):
    with publisher([engine, other]) as to:
        to.publish("v1")
        assert [info["epoch"] for info in to.wait_for("v1").values()] == [1, 1]
        assert set(to.weight_info()) == {engine.url, other.url}
        with to.pause(owner="me") as pause:
            assert set(pause.replies) == {engine.url, other.url}
            assert engine.pause and other.pause and to.is_paused()
        assert not to.is_paused()
        to.pause("retract")
        assert set(to.continue_()) == {engine.url, other.url}
        assert set(to.rollback("default")) == {engine.url, other.url}
        assert engine.version["weight_version"] == "default"
        assert set(to.status()) == {engine.url, other.url}
        with pytest.raises(WaitTimeout, match=other.url):
            to.wait_for("v1", timeout_s=0.2)


def test_an_abort_by_id_reaches_only_the_engine_that_has_the_update(engine, other):
    with publisher([engine, other]) as to:
        update_id = engine.begin_elsewhere()
        assert to.abort(update_id) == {
            engine.url: {"update_id": update_id, "phase": "aborted"}
        }
        with pytest.raises(UnknownUpdate):
            to.abort("nobody")


def test_all_engines_are_paused_or_none(engine, other):
    other.faults[PAUSE] = [PauseConflict("no")]
    with publisher([engine, other]) as to:
        with pytest.raises(PauseConflict, match=other.url):
            to.pause()
        assert engine.pause is None and other.pause is None


def test_all_engines_roll_back_or_none(engine, other):
    with publisher([engine, other]) as to:
        to.publish("v1")
        other.faults[ROLLBACK] = [NothingToRollBack("no")]
        with pytest.raises(NothingToRollBack):
            to.rollback()
        assert engine.version["weight_version"] == "v1"
        other.commit_elsewhere("v2")
        with pytest.raises(VersionConflict, match="different rollback targets"):
            to.rollback()
        assert engine.version["weight_version"] == "v1"


# ---------------------------------------------------------------- the publisher
def test_a_failed_future_that_nobody_reads_is_raised_by_the_next_publish(engine):
    engine.faults[START] = [VersionConflict("no")]
    with publisher(engine) as to:
        to.publish("v1", block=False)
        until(lambda: to._queue.is_idle)
        with pytest.raises(VersionConflict) as raised:
            until(lambda: to.publish("v2"))
        assert "'v1'" in "".join(raised.value.__notes__)
        assert to.publish("v3").version == "v3"


def test_a_failed_future_that_was_read_is_raised_nowhere_else(engine):
    engine.faults[START] = [VersionConflict("no")] * 2
    heard = []
    with publisher(engine) as to:
        future = to.publish("v1", block=False)
        assert isinstance(future.exception(), VersionConflict)
        to.publish("v2", block=False).add_done_callback(heard.append)
        until(lambda: heard)
        assert to.publish("v3").version == "v3"


def test_closing_a_publisher_raises_an_unread_error_once(engine):
    engine.faults[START] = [VersionConflict("no")]
    to = publisher(engine)
    to.publish("v1", block=False)
    with pytest.raises(VersionConflict):
        to.close()
    to.close()


async def test_a_publish_can_be_awaited(engine):
    with publisher(engine) as to:
        assert (await to.apublish("v1", step=1)).version == "v1"
        engine.faults[START] = [VersionConflict("no")]
        with pytest.raises(VersionConflict):
            await to.apublish("v2")
        outcomes = await asyncio.gather(*(to.apublish(f"v{n}") for n in range(3, 7)))
        assert sorted(o.version for o in outcomes) == ["v3", "v4", "v5", "v6"]


async def test_an_awaited_publish_that_is_cancelled_is_given_up(engine):
    engine.begin_elsewhere()
    with publisher(engine) as to:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(to.apublish("v1"), 0.5)
        await asyncio.to_thread(until, lambda: to._queue.is_idle)
        engine.end_elsewhere()
    assert engine.version["weight_version"] == "default"
