"""What a field of a request may be, and as what it reaches the engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.route_stub import Engine, caller, served


class Noting(Engine):
    """Notes what every call brought."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[tuple[str, dict[str, Any]]] = []

    async def call_utility_all_async(self, name: str, method: str, body: Any) -> Any:
        self.brought.append((method, body))
        return await super().call_utility_all_async(name, method, body)

    def values_of(self, field: str) -> list[Any]:
        return [body[field] for _, body in self.brought if field in body]


CHUNK = {"update_info": {"path": "x"}}
FLAGS = [
    ("/start_weight_update", {}, "allow_nonfinite"),
    ("/start_draft_weight_update", {}, "allow_nonfinite"),
    ("/update_weights_from_disk", {"path": "x"}, "allow_nonfinite"),
    ("/finish_weight_update", {}, "flush_cache"),
    ("/update_weights_from_disk", {"path": "x"}, "flush_cache"),
    ("/pause_generation", {}, "flush_cache"),
]


@pytest.mark.parametrize("path, body, field", FLAGS)
@pytest.mark.parametrize(
    "said, meant", [("false", False), ("0", False), ("True", True), (False, False)]
)
def test_a_flag_spelt_as_a_word_is_read_as_a_flag(path, body, field, said, meant):
    for sent in ({"json": body | {field: said}}, {"params": {field: said}}):
        engine = Noting()
        sent = {"json": body} | sent
        caller(served(engine)).post(path, **sent)
        assert engine.values_of(field) == [meant]


@pytest.mark.parametrize("path, body, field", FLAGS)
@pytest.mark.parametrize("said", ["no", "", 0, 1, [], {}])
def test_flags_that_are_not_boolean_are_rejected(path, body, field, said):
    engine = Noting()
    door = caller(served(engine))
    reply = door.post(path, json=body | {field: said})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "malformed")
    assert field in reply.json()["message"]
    assert engine.values_of(field) == []


@pytest.mark.parametrize(
    "body, message",
    [
        ({"start": "now"}, "start must be an object, got 'now'"),
        ({"finish": []}, r"finish must be an object, got \[\]"),
        (
            {"start": {"mode": "wait"}},
            "unknown field 'mode'; start takes allow_nonfinite",
        ),
        (
            {"finish": {"manifest": {}}},
            "unknown field 'manifest'; finish takes flush_ca",
        ),
        ({"start": {"allow_nonfinite": 1}}, "allow_nonfinite must be true or false"),
        ({"start": {"is_checkpoint_format": False}}, "is_checkpoint_format cannot be"),
        ({"finish": {"flush_cache": 1}}, "flush_cache must be true or false, got 1"),
        (
            {"update_id": "a", "start": {"update_id": "b"}},
            "update_id is given twice, as 'a' and as 'b'",
        ),
        (
            {"start": {"owner": "a"}, "finish": {"owner": "b"}},
            "owner is given twice, as 'a' and as 'b'",
        ),
        ({"strat": {}}, "'strat' .nearest: start.; this route takes update_info"),
    ],
)
def test_what_opens_or_commits_an_update_with_its_chunk_is_checked(body, message):
    engine = Noting()
    reply = caller(served(engine)).post("/update_weights", json=CHUNK | body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "malformed")
    assert re.search(message, reply.json()["message"])
    assert engine.brought == []


def test_what_opens_and_commits_an_update_with_its_chunk_reaches_the_engine():
    engine = Noting()
    start = {"update_id": "u", "weight_version": "v", "manifest": None}
    finish = {"mode": "retract", "owner": "me", "expect_digest": "d"}
    body = CHUNK | {"owner": "me", "start": start, "finish": finish}
    reply = caller(served(engine)).post("/update_weights", json=body)
    assert reply.status_code == 200 and "gap_ms" in reply.json()
    brought = [(name, body) for name, body in engine.brought if name != "advance"]
    opened, received, prepared, committed = (body for _, body in brought)
    assert [name for name, _ in brought] == ["start", "receive", "prepare", "commit"]
    assert all(body["update_id"] == "u" for _, body in brought)
    assert {opened["owner"], received["owner"], prepared["owner"]} == {"me"}
    assert (opened["weight_version"], received["chunk"]) == ("v", 0)
    assert (committed["mode"], committed["expect_digest"]) == ("retract", "d")


@pytest.mark.parametrize(
    "said, size", [("", 8), ("true", 8), ("1", 8), ("False", 2), ("0", 2)]
)
def test_the_world_size_of_one_engine_is_returned_for_every_word_that_means_false(
    said, size
):
    engine = Engine()
    parallel = engine.vllm_config.parallel_config
    parallel.world_size, parallel.world_size_across_dp = 2, 8
    door = caller(served(engine))
    asked = {"include_dp": said} if said else {}
    assert door.get("/get_world_size", params=asked).json() == {"world_size": size}
    refused = door.get("/get_world_size", params={"include_dp": "maybe"})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    "path, body, field, empty",
    [
        ("/abort_requests", {}, "request_ids", ["", 0, False, {}]),
        ("/weights_checker", {}, "skip_tensor_list", ["", 0, False, {}]),
        ("/update_weights_from_disk", {"draft_path": "x"}, "path", ["", 0, False, []]),
    ],
)
def test_an_empty_value_of_another_type_does_not_count_as_missing(
    path, body, field, empty
):
    for value in empty:
        engine = Engine()
        door = caller(served(engine))
        reply = door.post(path, json=body | {field: value})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "malformed")
        assert not {"abort_requests", "checksums", "start"} & set(engine.asked)


@pytest.mark.parametrize("field", ["subset", "manifest"])
@pytest.mark.parametrize("value", ["", 0, False, []])
def test_an_empty_subset_is_not_taken_for_a_whole_version(field, value):
    engine = Noting()
    door = caller(served(engine))
    body = {"path": "x", "subset": ["a"]} | {field: value}
    reply = door.post("/update_weights_from_disk", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "malformed")
    assert engine.values_of("manifest") == []
