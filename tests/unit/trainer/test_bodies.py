"""Tensors that travel in the bodies of requests."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tests.support.trainers.fake_engine import (
    BODY,
    FINISH,
    LOSE,
    START,
    UPDATE,
    publisher,
    weights,
)
from vllm.inflight.errors import ConfigError, Malformed, WeightsMismatch
from vllm.inflight.trainer import Publisher, bodies
from vllm.inflight.trainer.snapshot import Snapshot

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def test_a_publish_in_bodies_names_no_file(engine, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_BYTES", 64)
    with publisher(engine, wire="http") as to:
        outcome = to.publish("v")
    assert outcome.num_bytes == 64 + 12
    assert torch.equal(engine.served["a.weight"], weights()["a.weight"])
    assert engine.served.keys() == weights().keys()
    assert engine.bodies(UPDATE) == []
    (opening,) = engine.bodies(START)
    found = [(body["update_id"], body["chunk"]) for body in engine.bodies(BODY)]
    assert found == [(opening["update_id"], 0), (opening["update_id"], 1)]


def test_a_body_whose_reply_is_lost_is_sent_again(engine, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_BYTES", 64)
    engine.faults[BODY] = [LOSE]
    with publisher(engine, wire="http") as to:
        to.publish("v")
    assert [body["chunk"] for body in engine.bodies(BODY)] == [0, 0, 1]
    assert engine.served.keys() == weights().keys()


def test_all_engines_get_the_bodies_or_none_commits(engine, other):
    other.faults[BODY] = [WeightsMismatch("no")]
    with publisher([engine, other], wire="http") as to:
        with pytest.raises(WeightsMismatch):
            to.publish("v")
        assert (engine.bodies(FINISH), other.bodies(FINISH)) == ([], [])
        to.publish("w")
    for one in (engine, other):
        assert one.version["weight_version"] == "w"


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_bodies_have_every_tensor_once(tmp_path: Path, size: int, monkeypatch) -> None:
    monkeypatch.setattr(bodies, "BODY_BYTES", size)
    torch.manual_seed(0)
    named = {
        f"layer.{n}\N{GREEK SMALL LETTER ALPHA}": torch.randint(0, 255, (n, 3)).to(
            DTYPES[n % 3]
        )
        for n in range(12)
    }
    snapshot = Snapshot.pack(named.items(), tmp_path)
    found: dict[str, Any] = {}
    for chunk, body in enumerate(bodies.bodies(snapshot, "id")):
        said = json.loads(body)
        assert (said["update_id"], said["chunk"]) == ("id", chunk)
        (text,) = said["serialized_named_tensors"]
        tensors = load(b64decode(text, validate=True))
        assert not tensors.keys() & found.keys()
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= size
        found |= tensors
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], named[name]) for name in named)


def test_a_tensor_that_no_body_has_room_for_is_named(engine, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_TENSOR_BYTES", 63)
    with (
        publisher(engine, wire="http") as to,
        pytest.raises(Malformed, match=r"'a\.weight' has 64 bytes"),
    ):
        to.publish("v")
    assert engine.bodies(FINISH) == []


def test_an_engine_of_this_process_takes_no_bodies():
    class Llm:
        def start_weight_update(self) -> None: ...

        abort_weight_update = start_weight_update

    with pytest.raises(ConfigError, match="given by their URLs"):
        Publisher(Llm(), weights(), wire="http")
