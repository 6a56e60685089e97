"""The client of one server: what it says, what it repeats, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.trainers.fake_engine import (
    ABORT,
    DROP,
    FINISH,
    LOSE,
    START,
    STARTING,
    UPDATE,
    StandIn,
)
from tests.support.waiting import until
from tests.unit.trainer.conftest import noted
from vllm.inflight.background import in_background
from vllm.inflight.errors import (
    ConfigError,
    EngineUnreachable,
    Malformed,
    UnknownUpdate,
    UpdateBusy,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.trainer import ServerClient
from vllm.inflight.trainer.http_client import HttpEngine
from vllm.inflight.trainer.retry import RetryBudget

INIT = "/init_weight_transfer_engine"


@pytest.fixture
def client(engine: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerClient]:
    # The stand-in reads files; what a wire brings is not its affair.
    monkeypatch.setattr(StandIn, "_stage", received)
    with ServerClient(engine.url, timeout_s=20) as client:
        yield client


def received(self: StandIn, update_id: Any, body: dict[str, Any]) -> dict[str, Any]:
    update = self._ledger.find(update_id)
    update.num_chunks = max(update.num_chunks, body["chunk"] + 1)
    return {"update_id": update_id}


def send(client: ServerClient, num_chunks: int = 1) -> None:
    """What upstream's trainers call for one update."""
    client.start_weight_update()
    for number in range(num_chunks):
        client.update_weights({"part": number})
    client.finish_weight_update()


def test_an_update_in_one_call_has_what_was_announced(engine, client):
    client.announce("step-7", step=7, mode="retract", base_version="default")
    manifest = {"format": 1, "subset": ["a.*"]}
    client.update_weights({"part": 0}, start={"manifest": manifest}, finish={})
    ((path, body),) = engine.calls
    update_id = body["update_id"]
    assert (path, body) == (
        UPDATE,
        {
            "update_id": update_id,
            "chunk": 0,
            "update_info": {"part": 0},
            "start": {
                "update_id": update_id,
                "weight_version": "step-7",
                "base_version": "default",
                "manifest": manifest | {"step": 7},
            },
            "finish": {"mode": "retract"},
        },
    )
    assert client.committed is not None
    assert client.committed["weight_version"] == "step-7"
    client.update_weights({"part": 0}, start={}, finish={"weight_version": "mine"})
    second = engine.bodies(UPDATE)[1]
    assert second["start"].keys() == {"update_id"}
    assert second["start"]["update_id"] == second["update_id"] != update_id
    assert second["finish"] == {"weight_version": "mine"}
    assert engine.bodies(ABORT) == []


@pytest.mark.parametrize("fault", [DROP, LOSE, STARTING])
def test_one_call_whose_reply_was_lost_is_made_again(engine, client, fault):
    engine.faults[UPDATE] = [fault]
    client.update_weights({"part": 0}, start={}, finish={})
    first, again = engine.bodies(UPDATE)
    assert first == again
    assert engine.version["epoch"] == client.committed["epoch"] == 1


def test_an_update_may_be_opened_with_its_first_chunk_and_committed_with_its_last(
    engine, client
):
    client.update_weights({"part": 0}, start={})
    client.update_weights({"part": 1})
    client.update_weights({"part": 2}, finish={})
    bodies = engine.bodies(UPDATE)
    assert [body["chunk"] for body in bodies] == [0, 1, 2]
    assert len({body["update_id"] for body in bodies}) == 1
    assert engine.version["epoch"] == client.committed["epoch"] == 1


def test_one_call_ends_an_update_that_failed_before_it(engine, client):
    client.update_weights({"part": 0}, start={})
    client.update_weights({"part": 0}, start={}, finish={})
    (ended,) = engine.bodies(ABORT)
    assert ended["update_id"] == engine.bodies(UPDATE)[0]["update_id"]
    assert engine.version["epoch"] == 1


def test_a_reply_that_comes_after_the_next_update_has_begun_does_not_count(
    engine, client
):
    engine.held[UPDATE] = threading.Event()
    late = in_background(
        lambda: client.update_weights({"part": 0}, start={}, finish={})
    )
    until(lambda: engine.version["epoch"] == 1)
    client.start_weight_update()
    engine.held[UPDATE].set()
    late.result(timeout=60)
    client.update_weights({"part": 0})
    assert engine.bodies(UPDATE)[-1]["chunk"] == 0
    client.finish_weight_update()
    assert engine.version["epoch"] == 2


def test_an_announcement_applies_to_the_next_update_only(engine, client):
    client.announce(
        "step-7", step=7, mode="retract", subset=["a.*"], base_version="default"
    )
    send(client)
    assert engine.version["weight_version"] == "step-7"
    assert engine.version["step"] == 7
    (opening,), (closing,) = engine.bodies(START), engine.bodies(FINISH)
    assert opening["base_version"] == "default"
    assert opening["manifest"]["subset"] == ["a.*"]
    assert closing["mode"] == "retract"
    assert client.committed is not None and client.committed["epoch"] == 1
    send(client)
    assert engine.version["weight_version"] == "update-2"
    assert engine.bodies(START)[1].keys() == {"update_id"}
    assert "mode" not in engine.bodies(FINISH)[1]


def test_a_rejected_update_is_sent_again_with_the_same_announcement(engine, client):
    client.announce("step-7")
    engine.faults[FINISH] = [WeightsMismatch("missing: b", tensors=["b"])]
    with pytest.raises(WeightsMismatch, match=f"{engine.url}: missing: b") as raised:
        send(client)
    assert raised.value.tensors == ["b"]
    assert raised.value.remedy in raised.value.__notes__
    send(client)
    assert engine.version["weight_version"] == "step-7"


def test_every_chunk_has_its_number_and_every_call_its_update(engine, client):
    for _ in range(2):
        send(client, num_chunks=3)
    first, second = (body["update_id"] for body in engine.bodies(START))
    assert first != second
    assert [(c["update_id"], c["chunk"]) for c in engine.bodies(UPDATE)] == [
        *((first, 0), (first, 1), (first, 2)),
        *((second, 0), (second, 1), (second, 2)),
    ]
    assert [body["update_id"] for body in engine.bodies(FINISH)] == [first, second]


@pytest.mark.parametrize("path", [START, UPDATE, FINISH])
@pytest.mark.parametrize("fault", [DROP, LOSE, STARTING])
def test_a_call_whose_reply_was_lost_is_made_again(engine, client, path, fault):
    engine.faults[path] = [fault]
    send(client)
    assert len(engine.bodies(path)) == 2
    assert engine.version["epoch"] == 1


@pytest.mark.parametrize("announced", [None, "step-8"])
def test_a_commit_whose_reply_never_came_is_found_out_about(
    engine, client, monkeypatch, announced
):
    client.announce("step-7")
    engine.faults[FINISH] = [LOSE]
    with monkeypatch.context() as hurried:
        hurried.setattr(RetryBudget, "pause", lambda *_: False)
        with pytest.raises(EngineUnreachable):
            send(client)
    assert client.committed is None and engine.version["weight_version"] == "step-7"
    if announced is not None:
        client.announce(announced)
    client.start_weight_update()
    assert client.committed is not None
    assert client.committed["weight_version"] == "step-7"
    client.finish_weight_update()
    assert engine.version["weight_version"] == (announced or "update-2")


def test_a_join_is_never_repeated(engine, client):
    """Made twice, the second call would be refused as busy."""
    engine.faults[INIT] = [LOSE]
    with pytest.raises(EngineUnreachable, match=INIT):
        client.init_weight_transfer_engine({})
    assert len(engine.bodies(INIT)) == 1


def test_retries_end_at_the_timeout(engine):
    engine.faults[START] = [DROP] * 100
    with (
        ServerClient(engine.url, timeout_s=0.3) as client,
        pytest.raises(EngineUnreachable, match=r"within 0\.3 s"),
    ):
        client.start_weight_update()


def test_a_trainer_that_waits_for_its_server_says_so_in_the_log(engine, client, logged):
    engine.faults[START] = [STARTING] * 5
    client.start_weight_update()
    (line,) = set(logged)
    assert line.startswith(f"{engine.url}: no answer to POST {START} yet")


def test_an_update_left_by_its_trainer_is_aborted_before_the_next_one(engine, client):
    client.start_weight_update()
    send(client)
    left, sent = (body["update_id"] for body in engine.bodies(START))
    assert [body["update_id"] for body in engine.bodies(ABORT)] == [left]
    assert engine.bodies(FINISH)[0]["update_id"] == sent


def test_leaving_the_group_aborts_the_failed_update_first(engine, client, monkeypatch):
    """Else the refusal would hide why the trainer lets go."""
    monkeypatch.setattr(
        HttpEngine, "shutdown_transport", lambda *_: engine.begin_elsewhere()
    )
    client.start_weight_update()
    client.shutdown_weight_transfer_engine()
    assert len(engine.bodies(ABORT)) == 1


def test_a_client_that_is_closed_leaves_no_update_under_way(engine):
    with ServerClient(engine.url) as client:
        client.start_weight_update()
    client.close()
    assert len(engine.bodies(ABORT)) == 1
    with ServerClient(engine.url) as next_one:
        send(next_one, num_chunks=0)
    assert len(engine.bodies(ABORT)) == 1
    assert engine.version["epoch"] == 1


def test_closing_does_not_wait_for_a_server_that_is_gone(engine, monkeypatch):
    monkeypatch.setattr("vllm.inflight.trainer.sync_client.CLOSING_S", 0.2)
    engine.faults[ABORT] = [DROP] * 100
    with (
        pytest.raises(ZeroDivisionError),
        ServerClient(engine.url) as client,
    ):
        client.start_weight_update()
        raise ZeroDivisionError
    assert engine.bodies(ABORT)


def test_an_update_of_another_trainer_is_left_alone(engine, client):
    engine.begin_elsewhere()
    for _ in range(2):
        with pytest.raises(UpdateBusy):
            client.start_weight_update()
    with pytest.raises(UnknownUpdate):
        client.abort_weight_update()
    engine.end_elsewhere()
    send(client)
    assert engine.version["epoch"] == 1


def test_an_abort_names_the_update_of_its_client(engine, client):
    client.start_weight_update()
    client.abort_weight_update()
    client.abort_weight_update()
    (opening,) = engine.bodies(START)
    given_up = [body["update_id"] for body in engine.bodies(ABORT)]
    assert given_up == [opening["update_id"]] * 2
    send(client)
    with pytest.raises(WrongPhase, match="committed"):
        client.abort_weight_update()


def test_the_key_is_the_argument_or_else_that_of_the_environment(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "api")
    monkeypatch.setenv("VLLM_INFLIGHT_ADMIN_KEY", "admin")
    for given, sent in (("given", "given"), (None, "admin")):
        with ServerClient(engine.url, api_key=given) as client:
            client.weight_info()
        assert engine.key == f"Bearer {sent}"


def test_an_invalid_call_is_rejected_before_anything_is_sent(engine, client):
    client.announce("kept")
    for wrong in ({"mode": "now"}, {"version": ""}, {"subset": []}):
        with pytest.raises(Malformed):
            client.announce(**wrong)
    with pytest.raises(ConfigError, match="inflight_ipc"):
        client.update_weights([{"ipc_handles": [()]}])
    with pytest.raises(ConfigError, match="http://"):
        ServerClient("localhost:8000")
    assert engine.calls == []
    send(client)
    assert engine.version["weight_version"] == "kept"


def test_an_abort_before_a_start_spends_the_budget_of_that_start(engine, monkeypatch):
    aborts = noted(monkeypatch, HttpEngine, "abort")
    starts = noted(monkeypatch, HttpEngine, "start")
    with ServerClient(engine.url, timeout_s=20) as client:
        for _ in range(2):  # the second ends the first
            client.start_weight_update()
    assert aborts[0].args[-1] is starts[1].args[-1]


def test_a_client_of_an_unreachable_server_closes_at_once(monkeypatch):
    client = ServerClient("http://127.0.0.1:9", timeout_s=0.3)
    with pytest.raises(EngineUnreachable):
        client.start_weight_update()
    aborts = noted(monkeypatch, HttpEngine, "abort")
    client.close()
    assert aborts == []
