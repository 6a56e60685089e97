"""Updates whose tensors are in the bodies of requests: whole versions, and deltas."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deltas import delta_between, stepped
from tests.support.engines.core_door import Door, said
from tests.support.engines.sent_tensors import entry, tensors
from vllm.inflight import ops

pytestmark = pytest.mark.engine

PATH = "/update_weights_from_tensor"
NORM = "model.norm.weight"
Weights = dict[str, torch.Tensor]


def manifest(named: Weights) -> dict[str, Any]:
    """Names, shapes, dtypes and digests of a whole version."""
    digests = ops.digest(list(named.values()))
    return {
        "format": 1,
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "digest": digest.hex(),
            }
            for (name, tensor), digest in zip(named.items(), digests, strict=True)
        ],
    }


def whole(door: Door, named: Weights, **fields: Any) -> dict[str, Any]:
    body = {"manifest": manifest(named), "serialized_named_tensors": [entry(named)]}
    return door.post(PATH, **body, **fields)


@pytest.fixture
def served(door: Door, folders: dict[str, Path]) -> tuple[str, Weights]:
    """The digest and the tensors of the version that a body has brought."""
    named = tensors(folders["old"])
    return whole(door, named, weight_version="base")["digest"], named


@pytest.fixture
def change(served: tuple[str, Weights]) -> dict[str, Any]:
    """The body of a delta from what is served."""
    base, named = served
    stated, parts = delta_between(named, stepped(named, 1), base)
    return {
        "manifest": stated,
        "serialized_named_tensors": [entry(parts)],
        "weight_version": "delta",
    }


@pytest.fixture
def unchanged(door: Door, served: tuple[str, Weights]) -> Callable[[], bool]:
    """Whether what was served is served, and no update is under way."""

    def seen() -> list[Any]:
        info = door.get("/weight_info")
        return [said(door.core), info["weight_version"], info["digest"], info["epoch"]]

    before = seen()

    def look() -> bool:
        return door.get("/weight_update")["active"] is None and before == seen()

    return look


def test_a_body_with_a_manifest_is_an_update_of_its_own(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    named = tensors(folders["new"])
    before = door.label
    lacking = dict(named)
    del lacking[NORM]
    body = {"manifest": manifest(named), "serialized_named_tensors": [entry(lacking)]}
    # A piece of a version would wait for the rest.
    status, message = door.refused(PATH, **body)
    assert (status, NORM in message, door.label) == (422, True, before)
    assert door.get("/weight_update")["active"] is None
    assert whole(door, named, weight_version="w")["weight_version"] == "w"
    assert said(door.core) == expected


def test_a_delta_in_a_body_is_committed_and_rolled_back(
    door: Door, served: tuple[str, Weights], change: dict[str, Any]
) -> None:
    before = said(door.core)
    found = door.post(PATH, **change)
    assert (found["success"], found["weight_version"]) == (True, "delta")
    after = said(door.core)
    digest = whole(door, stepped(served[1], 1))["digest"]
    assert (digest, said(door.core)) == (found["digest"], after)
    whole(door, served[1])
    door.post(PATH, **change)
    assert door.post("/rollback_weights")["digest"] == served[0]
    assert said(door.core) == before


def test_a_repeated_body_is_the_same_update(door: Door, change: dict[str, Any]) -> None:
    change["update_id"] = uuid.uuid4().hex
    first = door.post(PATH, **change)
    assert door.post(PATH, **change) == first
    assert door.get("/weight_info")["epoch"] == first["epoch"]


def test_a_delta_from_another_version_changes_nothing(
    door: Door, change: dict[str, Any], unchanged: Callable[[], bool]
) -> None:
    for base in ("0" * 32, "f" * 32):
        change["manifest"]["base"] = base
        reply = door.client.post(PATH, json=change)
        assert reply.status_code == 409, reply.text
        assert reply.json()["error"]["code"] == "base_mismatch"
    assert unchanged()


def test_a_delta_that_leads_elsewhere_changes_nothing(
    door: Door, change: dict[str, Any], unchanged: Callable[[], bool]
) -> None:
    spec = change["manifest"]["tensors"][-1]
    spec["digest"] = f"{int(spec['digest'], 16) ^ 1:032x}"
    status, message = door.refused(PATH, **change)
    assert (status, spec["name"] in message) == (422, True), message
    assert unchanged()


def test_a_delta_that_cannot_be_applied_changes_nothing(
    door: Door, folders: dict[str, Path]
) -> None:
    """What came without digests is not kept by an engine on a CPU."""
    named = tensors(folders["new"])
    body = {"model_path": str(folders["new"])}
    base = door.post("/update_weights_from_disk", **body)["digest"]
    stated, parts = delta_between(named, stepped(named, 1), base)
    before = said(door.core)
    body = {"manifest": stated, "serialized_named_tensors": [entry(parts)]}
    reply = door.client.post(PATH, json=body)
    assert reply.status_code == 409, reply.text
    assert reply.json()["error"]["code"] == "delta_unsupported"
    assert door.get("/weight_update")["active"] is None
    assert said(door.core) == before


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"expect_digest": "0" * 32}, "expect_digest"),
        ({"update_id": "a", "base_version": "b"}, "base_version"),
        ({"chunk": 0, "weight_version": "b"}, "weight_version"),
        ({"chunk": 0, "mode": "abort"}, "mode"),
    ],
)
def test_fields_of_another_form_are_rejected_by_name(
    door: Door, fields: dict[str, Any], named: str
) -> None:
    body = {"serialized_named_tensors": [entry({"a": torch.ones(2)})]}
    status, message = door.refused(PATH, **body, **fields)
    assert (status, named in message) == (400, True), message
    assert door.get("/weight_update")["active"] is None
