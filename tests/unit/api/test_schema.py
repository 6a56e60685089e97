"""What `/openapi.json` says of the routes is what they take."""

import re
from argparse import Namespace

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.engines.sent_tensors import entry
from tests.support.route_stub import Engine, caller, served
from vllm.inflight.api.request.schema import FIELDS, NEEDED
from vllm.inflight.api.server.openapi import (
    ALWAYS,
    ERROR,
    EXAMPLES,
    IN_QUERY,
    REPLIES,
    SGLANG,
    STATUSES,
    TAG_OF,
    TAGS,
    serve_docs_offline,
)
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.errors import BY_CODE, WeightsMismatch

EVERY = [*ROUTES, *ROLLOUT_ROUTES]
POSTS = {path for method, path in EVERY if method == "POST"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return caller(served(Engine()))


def test_the_schema_describes_only_fields_of_existing_routes() -> None:
    assert FIELDS.keys() <= {path for _, path in EVERY}
    assert all(set(names) <= FIELDS[path].keys() for path, names in NEEDED.items())


def test_openapi_describes_the_body_and_the_errors_of_every_route(
    client: TestClient,
) -> None:
    told = client.get("/openapi.json").json()["paths"]
    for method, path in EVERY:
        route = told[path][method.lower()]
        assert route["summary"]
        statuses = {int(status) for status in route["responses"]}
        assert statuses == {200, *ALWAYS, *STATUSES[path]}
        assert route["tags"] == [TAG_OF.get(path, SGLANG)]
        key = "API key" if (method, path) in ROLLOUT_ROUTES else "control key"
        assert route["security"] == [{key: []}]
        if method == "POST" and path not in IN_QUERY:
            body = route["requestBody"]["content"]["application/json"]["schema"]
            assert body["properties"] == FIELDS.get(path, {})
        else:
            names = {each["name"] for each in route["parameters"]}
            assert names >= FIELDS.get(path, {}).keys()
            assert ("update_id" in names) == ("{update_id}" in path)


def test_the_key_can_be_given_in_the_page(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert schemes.keys() == {"control key", "API key"}
    for scheme in schemes.values():
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert document["tags"] == TAGS


def test_every_status_is_that_of_an_error() -> None:
    known = {kind.status for kind in BY_CODE.values()}
    assert all(known.issuperset(statuses) for statuses in STATUSES.values())
    assert STATUSES.keys() == {path for _, path in EVERY}
    assert TAG_OF.keys() <= STATUSES.keys() and {*TAG_OF.values()} < {
        tag["name"] for tag in TAGS
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.keys() - {"/generate"}))
def test_the_example_of_a_route_is_accepted(client: TestClient, path: str) -> None:
    reply = client.post(path, json=EXAMPLES[path])
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", sorted(REPLIES.keys() - {"/restore_weights"}))
def test_the_reply_of_a_route_has_the_documented_fields(
    client: TestClient, path: str
) -> None:
    (method,) = (m for m, p in ROUTES if p == path)
    url = path.format(update_id="u")
    reply = client.request(method, url, json=EXAMPLES.get(path))
    assert reply.status_code == 200, reply.text
    added = {"result", "error"} if "{update_id}" in path else set()
    assert reply.json().keys() - added == REPLIES[path].keys()


def test_an_error_has_the_documented_fields(client: TestClient) -> None:
    found = client.post("/update_weights", json={}).json()
    assert found.keys() == ERROR["properties"].keys()
    told = ERROR["properties"]["error"]
    assert {*told["required"]} <= found["error"].keys() <= told["properties"].keys()
    error = WeightsMismatch("m", tensors=["a"], update_id="u", phase="staging")
    assert error.to_dict().keys() <= told["properties"].keys() | {"causes"}


@pytest.mark.parametrize("path", sorted(NEEDED))
def test_a_missing_required_field_is_named(client: TestClient, path: str) -> None:
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
def test_the_schema_lists_the_fields_of_each_route(
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
    # Read before other fields: a rejected request must give lent memory back.
    "serialized_named_tensors": [entry({"a": torch.ones(1)})],
    "zmq_handles": {"GPU-0": "ipc://a"},
}
UNCHECKED = {
    *("/receive_weight_update", "/init_actor_update_group", "/generate"),
}
"""PipelineRL's, in which other fields are left alone, and one that needs a prompt."""


@pytest.mark.parametrize("path", sorted((FIELDS.keys() & POSTS) - UNCHECKED))
def test_a_route_accepts_the_documented_fields(client: TestClient, path: str) -> None:
    body = {name: SAMPLES[name] for name in NEEDED.get(path, ())}
    message = client.post(path, json=body | {"nonsense": 1}).json()["message"]
    assert "unknown field 'nonsense'; this route takes " in message
    taken = taken_by(message)
    assert FIELDS[path].keys() <= taken


def test_the_page_loads_its_scripts_from_the_server() -> None:
    client = caller(served(Engine(), enable_offline_docs=False))
    page = client.get("/docs").text
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    scripts = [source for source in sources if "swagger-ui" in source]
    assert len(scripts) == 2
    for script in scripts:
        assert client.get(script).status_code == 200, script


@pytest.mark.parametrize("off", ["disable_fastapi_docs", "enable_offline_docs"])
def test_the_docs_page_stays_off_if_vllms_flags_switch_it_off(off: str) -> None:
    app = FastAPI(docs_url=None)
    app.state.args = Namespace(enable_offline_docs=off == "enable_offline_docs")
    serve_docs_offline(app)
    assert caller(app).get("/docs").status_code == 404
