"""A caller that begins updates too often is told when to come back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.route_stub import Engine, caller, served
from vllm.inflight.api.request.rate_limit import MOST_CALLERS, RateLimit
from vllm.inflight.errors import TooManyUpdates

LIMITED = {"inflight": {"begin_rate": 2}}


def test_a_caller_may_start_one_minutes_updates_at_once_and_then_at_the_rate():
    now = [0.0]
    rate = RateLimit(2, lambda: now[0])
    rate.spend("a")
    rate.spend("a")
    with pytest.raises(TooManyUpdates) as refusal:
        rate.spend("a")
    assert refusal.value.retry_after_s == 30
    rate.spend("b")  # another caller has its own
    now[0] = 29.9
    with pytest.raises(TooManyUpdates):
        rate.spend("a")
    now[0] = 30.1
    rate.spend("a")


def test_a_rate_of_zero_is_no_limit():
    rate = RateLimit(0)
    for _ in range(10_000):
        rate.spend("a")


def test_callers_that_are_quiet_are_forgotten():
    now = [0.0]
    rate = RateLimit(1, lambda: now[0])
    for number in range(3 * MOST_CALLERS):
        now[0] += 1
        rate.spend(str(number))
    assert len(rate._buckets) <= MOST_CALLERS + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/start_weight_update", {}),
        ("/start_draft_weight_update", {}),
        ("/update_weights_from_disk", {"path": "/a"}),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        ),
        ("/receive_weight_update", {"version": 1, "parameters_info": []}),
    ],
)
def test_every_way_to_begin_is_counted_and_nothing_else_is(path, body):
    engine = Engine()
    door = caller(served(engine, additional_config=LIMITED))
    began = time.monotonic()
    for _ in range(2):
        assert door.post(path, json=body).status_code == 200
    refused = door.post(path, json=body)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_updates"
    left_s = 30 - (time.monotonic() - began)
    assert left_s <= int(refused.headers["Retry-After"]) <= 30
    assert engine.asked.count("start") == 2
    for other in ("/abort_weight_update", "/rollback_weights", "/pause", "/resume"):
        assert door.post(other).status_code == 200


class Knowing(Engine):
    """Engines of which some say that the update was begun already."""

    def __init__(self, *known: bool) -> None:
        super().__init__()
        self.core_engines = [str(index).encode() for index in range(len(known))]
        self._known = known

    async def call_utility_all_async(self, *call: Any) -> list[dict[str, Any]]:
        (reply,) = await super().call_utility_all_async(*call)
        return [{"ok": reply["ok"] | {"was_started": known}} for known in self._known]


@pytest.mark.parametrize(
    ("known", "update_id", "statuses"),
    [
        ((True,), "u", [200, 200, 200, 200]),
        ((True, True), "u", [200, 200, 200, 200]),
        ((True, False), "u", [200, 200, 429, 429]),
        ((False,), "u", [200, 200, 429, 429]),
        ((True,), None, [200, 200, 429, 429]),
    ],
)
def test_a_start_that_every_engine_knows_is_not_spent_for(known, update_id, statuses):
    app = served(Knowing(*known), additional_config=LIMITED)
    door = caller(app)
    body = {"update_id": update_id}
    replies = [door.post("/start_weight_update", json=body) for _ in statuses]
    assert [reply.status_code for reply in replies] == statuses


def test_no_engine_is_asked_about_update_ids_without_a_rate_limit():
    engine = Engine()
    door = caller(served(engine))
    door.post("/start_weight_update", json={"update_id": "u"})
    assert engine.asked == ["start"]


def test_callers_are_distinguished_by_their_keys():
    app = served(Engine(), api_key=["a", "b"], additional_config=LIMITED)
    door = TestClient(app, client=("10.0.0.1", 1))

    def begin(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return door.post("/start_weight_update", headers=headers).status_code

    assert [begin(k) for k in "aaabb"] == [200, 200, 429, 200, 200]
    assert begin("c") == 403


def test_a_rejection_does_not_contain_the_key():
    app = served(Engine(), api_key=["s3cret"], additional_config=LIMITED)
    door = TestClient(app)
    said = [
        door.post(
            "/start_weight_update",
            content=content,
            headers={"Authorization": f"Bearer {key}"},
        ).text
        for key in ("s3cret", "s3cret2")
        for content in ("{}", "{", "[]", json.dumps({"a": 1}), "{}", "{}")
    ]
    assert not any("s3cret" in text for text in said)
