"""What `/openapi.json` says of the routes is what they take."""

import pytest
from fastapi.testclient import TestClient

from tests.support.route_stub import Engine, caller, served
from vllm.inflight.api.request.schema import FIELDS, NEEDED
from vllm.inflight.api.server.routes import ROUTES

POSTS = {path for method, path in ROUTES if method == "POST"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return caller(served(Engine()))


def test_all_fields_are_of_a_route() -> None:
    assert FIELDS.keys() <= {path for _, path in ROUTES}
    assert all(set(names) <= FIELDS[path].keys() for path, names in NEEDED.items())


def test_openapi_tells_the_body_and_the_refusals_of_every_route(
    client: TestClient,
) -> None:
    told = client.get("/openapi.json").json()["paths"]
    for method, path in ROUTES:
        route = told[path][method.lower()]
        assert route["summary"]
        assert {"400", "401", "409", "422"} <= route["responses"].keys()
        if method == "POST":
            body = route["requestBody"]["content"]["application/json"]["schema"]
            assert body["properties"] == FIELDS.get(path, {})
        else:
            names = {each["name"] for each in route["parameters"]}
            assert names >= FIELDS.get(path, {}).keys()
            assert ("update_id" in names) == ("{update_id}" in path)


@pytest.mark.parametrize("path", sorted(NEEDED))
def test_a_field_that_is_needed_is_missed_by_name(
    client: TestClient, path: str
) -> None:
    refused = client.post(path, json={})
    assert refused.status_code == 400
    assert any(name in refused.json()["message"] for name in NEEDED[path])


def taken_by(refusal: str) -> set[str]:
    """The fields of a route that a refusal of another one names."""
    named = refusal.partition("this route takes ")[2]
    return set(named.partition(";")[0].split(", "))


@pytest.mark.parametrize(
    ("path", "untold"),
    [
        ("/pause", set()),
        ("/weights_checker", set()),
        ("/continue_generation", {"http_worker_ipc"}),
    ],
)
def test_what_a_route_takes_is_told(
    client: TestClient, path: str, untold: set[str]
) -> None:
    message = client.post(path, json={"nonsense": 1}).json()["message"]
    taken = taken_by(message)
    assert taken - untold == FIELDS[path].keys()


SAMPLES = {
    "init_info": {},
    "update_info": {},
    "names": [],
    "dtypes": [],
    "shapes": [],
    "master_address": "a",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "new_version": "v",
    "action": "checksum",
    "name": "a",
    "serialized_named_tensors": ["a"],
}
UNCHECKED = {
    *("/receive_weight_update", "/init_actor_update_group"),
}
"""PipelineRL's, in which other fields are left alone."""


@pytest.mark.parametrize("path", sorted((FIELDS.keys() & POSTS) - UNCHECKED))
def test_a_route_takes_the_fields_that_are_told_of(
    client: TestClient, path: str
) -> None:
    body = {name: SAMPLES[name] for name in NEEDED.get(path, ())}
    message = client.post(path, json=body | {"nonsense": 1}).json()["message"]
    assert "unknown field 'nonsense'; this route takes " in message
    taken = taken_by(message)
    assert FIELDS[path].keys() <= taken
