"""SGLang's updates from tensors of a request: pieces, buckets, and pickles."""

import base64
import json
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.engines.core_door import Door, said
from tests.support.engines.sent_tensors import entry, flattened, halves, tensors
from tests.support.transports.host_memory import HostMemory
from tests.support.transports.torch_exporter import Exporter, exported

pytestmark = pytest.mark.engine

HEAD = "lm_head.weight"


def test_tensors_of_one_call_are_served(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    reply = door.post(
        "/update_weights_from_tensor",
        serialized_named_tensors=[entry(tensors(folders["new"]))],
        weight_version="t1",
        flush_cache=False,
    )
    assert (reply["success"], reply["weight_version"]) == (True, "t1")
    assert said(door.core) == expected


def test_pieces_are_staged_and_the_last_one_commits(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    before = said(door.core)
    first, last = halves(tensors(folders["new"]))
    reply = door.post(
        "/update_weights_from_tensor", serialized_named_tensors=[entry(first)]
    )
    assert reply["success"] is True
    assert 0 < reply["parameters"]["complete"] < reply["parameters"]["total"]
    assert (said(door.core), door.label) == (before, "old")
    reply = door.post(
        "/update_weights_from_tensor",
        serialized_named_tensors=[entry(last)],
        weight_version="t2",
    )
    assert reply["weight_version"] == "t2"
    assert said(door.core) == expected


def test_a_bucket_is_cut_into_its_tensors(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    for part in halves(tensors(folders["new"])):
        bucket, parts = flattened(part)
        door.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[
                entry({"flattened_tensor": bucket}, {"metadata": json.dumps(parts)})
            ],
            load_format="flattened_bucket",
        )
    assert said(door.core) == expected


def test_a_version_that_stays_incomplete_is_named_and_never_served(
    door: Door, folders: dict[str, Path]
) -> None:
    before = said(door.core)
    named = tensors(folders["new"])
    del named[HEAD]
    door.post("/pause_generation", mode="retract")
    door.post("/update_weights_from_tensor", serialized_named_tensors=[entry(named)])
    status, message = door.refused("/continue_generation")
    assert (status, HEAD in message) == (422, True)
    assert "decoding goes on with the live weights" in message
    assert (said(door.core), door.label) == (before, "old")
    assert door.get("/weight_update")["active"] is None


def test_a_version_may_have_a_beginning_and_an_end(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    first, last = halves(tensors(folders["new"]))

    def send(part: Any) -> Any:
        path = "/update_weights_from_tensor"
        return door.post(path, serialized_named_tensors=[entry(part)], selector="all")

    send(last)  # of a trainer that is gone
    door.post("/begin_weight_update", selector="all")
    send(first)
    status, message = door.refused("/end_weight_update")
    assert (status, "missing: " in message, door.label) == (422, True, "old")
    door.post("/begin_weight_update")
    send(first)
    send(last)
    assert door.post("/end_weight_update")["success"] is True
    assert said(door.core) == expected
    assert door.refused("/begin_weight_update", selector="draft")[0] == 400


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"serialized_named_tensors": []}, "a list of 1 or 1 strings"),
        ({"serialized_named_tensors": ["***"]}, r"[0] is not base64"),
        ({"serialized_named_tensors": ["AAAA"]}, "not a whole safetensors file"),
        ({"load_format": "direct"}, "load_format 'direct'"),
        ({"load_format": "my.loader"}, "load_format 'my.loader'"),
        ({"load_format": "flattened_bucket"}, "a bucket has one tensor"),
        ({"weight_versions": "x"}, "unknown field 'weight_versions'"),
    ],
)
def test_tensors_that_cannot_be_read_are_rejected_by_name(
    door: Door, body: dict[str, Any], named: str
) -> None:
    full = {"serialized_named_tensors": [entry({"a": torch.ones(2)})]} | body
    status, message = door.refused("/update_weights_from_tensor", **full)
    assert (status, named in message) == (400, True), message
    assert door.get("/weight_update")["active"] is None


def test_a_bucket_that_reaches_beyond_itself_is_rejected(door: Door) -> None:
    part = {
        "name": "a",
        "shape": [9],
        "dtype": "float32",
        "start_idx": 0,
        "end_idx": 36,
    }
    bucket = entry(
        {"flattened_tensor": torch.zeros(8, dtype=torch.uint8)},
        {"metadata": json.dumps([part])},
    )
    body = {"serialized_named_tensors": [bucket], "load_format": "flattened_bucket"}
    status, message = door.refused("/update_weights_from_tensor", **body)
    assert (status, "is no part of the bucket" in message) == (400, True), message


# ---------------------------------------------------------------------- pickles
class Evil:
    def __reduce__(self) -> Any:
        return (print, ("a pickle has run",))


def pickled(payload: Any) -> str:
    return base64.b64encode(pickle.dumps(payload)).decode()


def test_a_pickle_is_rejected_unless_the_server_was_started_for_it(
    door: Door, folders: dict[str, Path]
) -> None:
    payload = pickled(list(tensors(folders["new"]).items()))
    status, message = door.refused(
        "/update_weights_from_tensor", serialized_named_tensors=[payload]
    )
    assert (status, "--inflight-pickled-tensors" in message) == (400, True)


@pytest.fixture
def pickles(door: Door, monkeypatch: pytest.MonkeyPatch) -> Door:
    """A server that was started for them."""
    config = {"inflight": {"pickled_tensors": "on"}}
    monkeypatch.setattr(door.core.vllm_config, "additional_config", config)
    return door


def test_pickled_tensors_are_served_where_that_is_allowed(
    pickles: Door, folders: dict[str, Path], expected: Any
) -> None:
    payload = pickled(list(tensors(folders["new"]).items()))
    pickles.post("/update_weights_from_tensor", serialized_named_tensors=[payload])
    assert said(pickles.core) == expected


def test_a_pickled_bucket_of_sglangs_is_served_where_that_is_allowed(
    pickles: Door,
    folders: dict[str, Path],
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = "sglang.srt.weight_sync.tensor_bucket"
    # As the trainer has it; the engine has no SGLang.
    record = type("FlattenedTensorMetadata", (), {"__module__": where})
    module = ModuleType(where)
    module.FlattenedTensorMetadata = record  # type: ignore[attr-defined]
    for part in halves(tensors(folders["new"])):
        bucket, facts = flattened(part)
        metadata = [record() for _ in facts]
        for item, fact in zip(metadata, facts, strict=True):
            dtype = getattr(torch, fact["dtype"].removeprefix("torch."))
            vars(item).update(fact | {"shape": torch.Size(fact["shape"])})
            vars(item)["dtype"] = dtype
        with monkeypatch.context() as patched:
            for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync", where):
                patched.setitem(sys.modules, name, module)
            payload = pickled({"flattened_tensor": bucket, "metadata": metadata})
        pickles.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[payload],
            load_format="flattened_bucket",
        )
    assert said(pickles.core) == expected


def test_gpu_memory_of_a_trainer_is_rejected_by_an_engine_without_a_gpu(
    pickles: Door,
) -> None:
    trainer = Exporter(HostMemory())
    body = {"serialized_named_tensors": [exported(trainer, [(HEAD, torch.ones(2))])]}
    status, message = pickles.refused("/update_weights_from_tensor", **body)
    assert (status, "this engine runs on cpu" in message) == (400, True), message
    assert pickles.get("/weight_update")["active"] is None


@pytest.mark.parametrize(
    "payload",
    [
        [("a", Evil())],
        Evil(),
        [("a", torch.ones(2)), ("b", OrderedDict(x=Evil()))],
        {"flattened_tensor": torch.ones(2), "metadata": [Evil()]},
    ],
    ids=["in a list", "alone", "deep inside", "in a bucket"],
)
def test_a_pickle_that_names_anything_but_tensors_is_not_run(
    pickles: Door, payload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"serialized_named_tensors": [pickled(payload)]}
    status, message = pickles.refused("/update_weights_from_tensor", **body)
    assert (status, "builtins.print" in message) == (400, True), message
    assert "a pickle has run" not in capsys.readouterr().out
