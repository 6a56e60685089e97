"""SGLang's updates in pieces: what begins a version, joins one, and ends one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.core_door import Door, said
from tests.engine.sent_tensors import entry, halves, tensors

pytestmark = pytest.mark.engine


def test_two_trainers_halves_never_make_one_version(
    door: Door, folders: dict[str, Path]
) -> None:
    before = said(door.core)
    first, last = halves(tensors(folders["new"]))

    def send(part: Any, label: str | None = None) -> Any:
        body = {"serialized_named_tensors": [entry(part)], "weight_version": label}
        return door.post("/update_weights_from_tensor", **body)

    send(first, "one")
    assert "staged" in send(last, "two")["message"]  # another label, another version
    door.post("/pause_generation", mode="retract")  # whoever pauses begins anew
    assert "staged" in send(first)["message"]
    door.refused("/continue_generation")
    assert (said(door.core), door.label) == (before, "old")


@pytest.mark.parametrize("is_cut_alike", [True, False])
def test_a_piece_that_is_sent_again_begins_a_new_version(
    door: Door, folders: dict[str, Path], expected: Any, is_cut_alike: bool
) -> None:
    first, last = halves(tensors(folders["new"]))

    def send(part: Any) -> Any:
        path = "/update_weights_from_tensor"
        return door.post(path, serialized_named_tensors=[entry(part)])

    lost = send(first)["update_id"]
    if not is_cut_alike:
        name = min(first)
        last[name] = first.pop(name)
        first, last = last, first
    again = send(first)
    assert again["update_id"] != lost
    assert door.get(f"/weight_update/{lost}")["phase"] == "aborted"
    done = send(last)
    assert (done["message"], done["update_id"]) == (
        "weights updated",
        again["update_id"],
    )
    assert said(door.core) == expected


def test_a_piece_without_a_label_does_not_join_a_version_that_has_one(
    door: Door, folders: dict[str, Path]
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    door.post(path, serialized_named_tensors=[entry(first)], weight_version="one")
    status, message = door.refused(path, serialized_named_tensors=[entry(last)])
    assert (status, "'one' is under way" in message, door.label) == (409, True, "old")
    door.post(path, serialized_named_tensors=[entry(last)], weight_version="one")
    assert door.label == "one"


@pytest.mark.parametrize("asked", [{"mode": "nap"}, {"lease_s": -1}, {"owner": ""}])
def test_a_pause_that_is_refused_ends_no_version(
    door: Door, folders: dict[str, Path], asked: dict[str, Any]
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    door.post(path, serialized_named_tensors=[entry(first)])
    assert door.refused("/pause_generation", **asked)[0] == 400
    reply = door.post(path, serialized_named_tensors=[entry(last)])
    assert reply["message"] == "weights updated"


@pytest.mark.parametrize("owner, status", [("another", 423), ("", 400)])
def test_going_on_that_is_refused_ends_no_version(
    door: Door, folders: dict[str, Path], owner: str, status: int
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    door.post("/pause_generation", mode="retract", owner="trainer")
    door.post(path, serialized_named_tensors=[entry(first)])
    assert door.refused("/continue_generation", owner=owner)[0] == status
    reply = door.post(path, serialized_named_tensors=[entry(last)])
    assert reply["message"] == "weights updated"
    assert door.post("/continue_generation", owner="trainer")["paused"] is False


def test_tensors_that_no_parameter_takes_open_no_version(door: Door) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    reply = door.post(
        "/update_weights_from_tensor", serialized_named_tensors=[entry(extra)]
    )
    assert "no parameter" in reply["message"]
    assert door.get("/weight_update")["active"] is None
