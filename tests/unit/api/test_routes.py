"""Whatever is sent to a control route, the reply is a typed one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.support.route_stub import Engine, caller, served
from vllm.inflight.api.request.body import read
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.errors import Malformed, PauseConflict
from vllm.inflight.update import MAX_MANIFEST_BYTES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
POSTS = [path for method, path in ROUTES if method == "POST"]
FIELDS = st.sampled_from(
    [
        *("path", "update_info", "init_info", "update_id", "weight_version", "mode"),
        *("clear_cache", "flush_cache", "chunk", "manifest", "new_version"),
    ]
)


def client(engine: Engine | None = None) -> TestClient:
    return caller(served(engine or Engine()))


def refusal(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[1]",
        b'"pause"',
        b"\xff\xfe",
        b'{"update_id": "\\ud800"}',
        b'{"update_id": "\xed\xa0\x80"}',
        b'{"\xed\xa0\x80": "u"}',
        '{"update_id": "\\ud800"}'.encode("utf-16"),
        '{"update_id": "u"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 32 + b"]" * 32 + b"}",
        b'{"deadline_s": NaN}',
        b'{"deadline_s": 1e999}',
        b'{"deadline_s": -Infinity}',
        b'{"update_id": 18446744073709551616}',
        b'{"update_id": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_a_body_that_cannot_be_read_is_rejected(raw):
    engine = Engine()
    reply = client(engine).post("/start_weight_update", content=raw)
    assert refusal(reply) == (400, "malformed")
    assert engine.asked == []


def test_a_null_body_counts_as_an_empty_body():
    assert client().post("/start_weight_update", content=b" null").status_code == 200


@pytest.mark.parametrize(
    "path, body",
    [
        ("/start_weight_update", {"weight_vresion": "v"}),
        ("/start_weight_update", {"is_checkpoint_format": False}),
        ("/start_weight_update", {"is_checkpoint_fromat": True}),
        ("/start_draft_weight_update", {"is_checkpoint_format": True}),
        ("/finish_weight_update", {"is_checkpoint_format": True}),
        ("/pause", {"wait_for_inflight_requests": 1}),
        ("/finish_weight_update", {"path": "x"}),
        ("/update_weights", {}),
        ("/update_weights", {"update_info": "x"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"path": 3}),
        ("/update_weights_from_disk", {"path": "x", "load_format": "pt"}),
        ("/update_weights_from_disk", {"path": "x", "colour": "red"}),
        ("/init_weight_transfer_engine", {}),
        ("/init_weight_transfer_engine", {"init_info": {}, "int_info": {}}),
        ("/init_weight_transfer_engine", {"init_info": None}),
        ("/shutdown_weight_transfer_engine", {"group_name": "g"}),
        ("/prepare_weight_update", {"updateid": "u"}),
        ("/rollback_weights", {"version": "v"}),
        ("/update_weight_version", {}),
        ("/pause_generation", {"flush_cache": "yes"}),
        ("/pause", {"clear_cache": 1}),
        ("/pause", {"mode": "keep", "lease": 60}),
        ("/pause", {"mode": 3}),
        ("/resume", {"onwer": "trainer"}),
        ("/pause_generation", {"mode": "retract", "leases_s": 60}),
        ("/pause_generation", {"onwer": "trainer"}),
        ("/continue_generation", {"onwer": "trainer"}),
        ("/update_weights", {"update_info": {}, "updateid": "u"}),
        ("/abort_weight_update", {"updateid": "u"}),
        ("/start_draft_weight_update", {"manifest": [1]}),
        ("/start_draft_weight_update", {"manifest": 0}),
    ],
)
def test_a_field_that_is_missing_unknown_or_wrong_is_rejected(path, body):
    engine = Engine()
    assert refusal(client(engine).post(path, json=body)) == (400, "malformed")
    assert engine.asked == []


@pytest.mark.parametrize(
    "path", ["/is_paused", "/weight_update", "/weight_info", "/get_world_size"]
)
def test_a_query_that_is_not_known_is_rejected(path):
    engine = Engine()
    reply = client(engine).get(path, params={"updat_id": "u"})
    assert refusal(reply) == (400, "malformed")
    assert engine.asked == []


@pytest.mark.parametrize("path", POSTS)
@settings(max_examples=15)
@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_every_body_gets_a_typed_reply_from_every_route(path, body):
    reply = client().post(path, content=json.dumps(body))
    # 409: this server was not started for what the route does.
    assert reply.status_code in (200, 400, 409)
    assert isinstance(reply.json(), dict)


def test_a_folder_may_hold_a_model_and_its_drafter():
    sent: list[Any] = []

    class Noting(Engine):
        async def call_utility_all_async(
            self, name: str, method: str, body: Any
        ) -> Any:
            if method == "receive":
                sent.append(body["update_info"])
            return await super().call_utility_all_async(name, method, body)

    both = {"path": "/models/a", "draft_path": "/models/a"}
    client(Noting()).post("/update_weights_from_disk", json=both)
    assert sent == [{"path": "/models/a"}, {"path": "/models/a", "draft": True}]


@pytest.mark.parametrize("told", [None, 10, MAX_MANIFEST_BYTES, 1 << 80, "ten"])
def test_a_body_that_is_too_large_is_rejected_while_it_arrives(told):
    drawn = 0

    async def chunks() -> Any:
        nonlocal drawn
        while drawn < 4 * MAX_MANIFEST_BYTES:
            drawn += 1 << 20
            yield {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    headers = [] if told is None else [(b"content-length", str(told).encode())]
    arriving = chunks()
    scope = {"type": "http", "headers": headers}
    request = Request(scope, receive=lambda: anext(arriving))
    with pytest.raises(Malformed, match=str(MAX_MANIFEST_BYTES)):
        asyncio.run(read(request, MAX_MANIFEST_BYTES))
    most = 0 if told == 1 << 80 else MAX_MANIFEST_BYTES + (1 << 20)
    assert drawn == most


def test_a_truncated_body_is_rejected():
    async def left() -> Any:
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": []}, receive=left)
    with pytest.raises(Malformed, match="before it was complete"):
        asyncio.run(read(request, 10))


def test_each_route_has_its_own_limit_of_the_body_size():
    big = b'{"a": "' + b"x" * MAX_MANIFEST_BYTES + b'"}'
    reply = client().post("/start_weight_update", content=big)
    assert refusal(reply) == (400, "malformed")
    assert str(MAX_MANIFEST_BYTES) in reply.json()["message"]
    reply = client().post("/update_weights_from_tensor", content=big)
    assert "serialized_named_tensors" in reply.json()["message"]


class Sleeper(Engine):
    def __init__(self) -> None:
        super().__init__()
        self.vllm_config.model_config.enable_sleep_mode = True

    async def sleep(self, **how: Any) -> None:
        self.asked.append(f"sleep {how}")

    async def wake_up(self, tags: Any) -> None:
        self.asked.append(f"wake {tags}")


def test_sglangs_memory_tags_are_mapped_to_vllms_sleep():
    engine = Sleeper()
    door = client(engine)
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    assert door.post(release).json()["success"] is True
    assert door.post(resume, json={"tags": ["weights"]}).json()["success"] is True
    assert door.post(resume, json={"tags": ["kv_cache"]}).json()["success"] is True
    assert door.post(release, json={"tags": ["kv_cache"]}).json()["success"] is True
    assert engine.asked == [
        *("release", "release"),  # a trial comes first
        "wake ['weights']",
        "wake ['kv_cache']",
        *("release", "release"),
    ]
    assert refusal(door.post(resume, json={"tags": ["cuda_graph"]}))[0] == 400


@pytest.mark.parametrize("is_trial", [True, False])
def test_no_engine_releases_memory_if_one_engine_rejects_the_release(is_trial):
    class Failing(Sleeper):
        async def call_utility_all_async(self, _: str, method: str, body: Any) -> Any:
            (reply,) = await super().call_utility_all_async(_, method, body)
            if method == "release" and bool(body.get("is_trial")) is is_trial:
                return [{"error": PauseConflict("not now").to_dict()}]
            return [reply]

    engine = Failing()
    body = {"tags": ["kv_cache"], "mode": "retract"}
    reply = client(engine).post("/release_memory_occupation", json=body)
    assert refusal(reply) == (409, "pause_conflict")
    release = ["release"]
    assert engine.asked == (release if is_trial else [*release * 2, "undo_release"])


def test_a_query_string_is_read_as_fields():
    engine = Engine()
    reply = client(engine).post("/pause?mode=keep&clear_cache=false")
    assert reply.json()["status"] == "paused"
    assert engine.asked == ["pause"]


def test_the_checkpoint_format_field_that_trl_sends_is_accepted():
    engine = Engine()
    body = {"is_checkpoint_format": True}
    assert client(engine).post("/start_weight_update", json=body).status_code == 200
    assert engine.asked == ["start"]


@pytest.mark.parametrize(
    "path",
    [
        "/pause?mode=keep&clear_cache=false",
        "/pause?wait_for_inflight_requests=false&clear_cache=true",
        "/resume?owner=trainer",
        "/abort_weight_update?update_id=u",
    ],
)
def test_fields_that_clients_of_upstream_send_are_accepted(path):
    assert client().post(path).status_code == 200


@pytest.mark.parametrize(
    "path, body",
    [
        ("/pause_generation", {}),
        ("/continue_generation", {}),
        ("/begin_weight_update", {}),
        ("/end_weight_update", {}),
        ("/update_weights_from_disk", {"model_path": "x"}),
        ("/update_weight_version", {"new_version": "v"}),
        ("/destroy_weights_update_group", {}),
    ],
)
@pytest.mark.parametrize("ids", [None, "r"])
def test_fields_that_sglang_adds_to_every_request_are_accepted(path, body, ids):
    body = body | {"rid": ids, "http_worker_ipc": None}
    assert client().post(path, json=body).status_code == 200


def test_the_older_way_to_ask_for_a_pause_that_waits():
    sent: list[Any] = []

    class Noting(Engine):
        async def call_utility_all_async(
            self, name: str, method: str, body: Any
        ) -> Any:
            sent.append(body["mode"])
            return await super().call_utility_all_async(name, method, body)

    door = client(Noting())
    for older in ("true", "false", "true&mode=keep", "false&mode=wait", "yes", "off"):
        door.post(f"/pause?wait_for_inflight_requests={older}&clear_cache=f")
    assert sent == ["wait", "abort", "wait", "wait", "wait", "abort"]


def test_upstreams_pause_flushes_in_upstreams_modes_alone():
    sent: list[Any] = []

    class Noting(Engine):
        async def call_utility_all_async(
            self, name: str, method: str, body: Any
        ) -> Any:
            sent.append((body["mode"], body["flush_cache"]))
            return await super().call_utility_all_async(name, method, body)

    door = client(Noting())
    for mode in ("abort", "wait", "keep", "in_place", "retract"):
        door.post(f"/pause?mode={mode}")
    door.post("/pause?mode=keep&clear_cache=false")
    assert sent == [
        *(("abort", True), ("wait", True), ("retract", True)),
        *(("in_place", False), ("retract", False), ("keep", False)),
    ]


def test_an_error_of_the_engine_keeps_its_status():
    class Busy(Engine):
        async def call_utility_all_async(self, *call: Any) -> list[dict[str, Any]]:
            return [{"error": {"code": "update_in_progress", "message": "wait"}}]

    reply = client(Busy()).post("/start_weight_update", json={})
    assert refusal(reply) == (409, "update_in_progress")
