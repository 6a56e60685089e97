"""An update's id may have any character in it, also where it is a part of a path."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from tests.support.route_stub import Engine, caller, served
from vllm.inflight.errors import UnknownUpdate

IDS = ["u", "a/b", "a/b/c", "/", "run 7/step?200", "a\nb/c", "weight_info", "ü/ü"]


class Forgetful(Engine):
    """Notes the ids that it is asked for, and knows none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[Any] = []

    async def call_utility_all_async(
        self, name: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        if method != "status":
            return await super().call_utility_all_async(name, method, body)
        self.ids.append(body["update_id"])
        error = UnknownUpdate("no such update", update_id=body["update_id"])
        return [{"error": error.to_dict()}]


@pytest.fixture
def engine() -> Forgetful:
    return Forgetful()


@pytest.fixture
def door(engine: Forgetful) -> TestClient:
    return caller(served(engine))


@pytest.mark.parametrize("update_id", IDS)
def test_an_unknown_update_id_in_a_path_is_rejected_with_our_error(
    engine: Forgetful, door: TestClient, update_id: str
) -> None:
    reply = door.get("/weight_update/" + quote(update_id, safe=""))
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_update"
    assert engine.ids == [update_id]


def test_an_update_id_in_a_path_may_contain_a_plain_slash(
    engine: Forgetful, door: TestClient
) -> None:
    door.get("/weight_update/run7/200")
    assert engine.ids == ["run7/200"]


def test_the_status_route_without_an_id_returns_all_updates(
    engine: Forgetful, door: TestClient
) -> None:
    for path in ("/weight_update", "/weight_update/"):
        door.get(path)
    assert engine.ids == [None, None]
