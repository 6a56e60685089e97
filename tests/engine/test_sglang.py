"""SGLang's calls on a real engine core: what they are answered, and what is served."""

import base64
import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from vllm.v1.engine.core import EngineCore

from tests.engine.bare_core import Streams, add, call, prompt, publish
from tests.engine.core_door import Door, said

pytestmark = pytest.mark.engine

HEAD = "lm_head.weight"


@pytest.fixture
def door(core: EngineCore) -> Door:
    return Door(core)


@pytest.fixture(scope="module")
def expected(booted: EngineCore, folders: dict[str, Path]) -> dict[str, Any]:
    """What the new weights say, when they come the plain way."""
    publish(booted, folders["new"], "expected")
    return said(booted)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def entry(named: dict[str, torch.Tensor], metadata: Any = None) -> str:
    return base64.b64encode(save(named, metadata)).decode()


def flattened(named: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """A bucket, and SGLang's list of what is in it."""
    parts, start = [], 0
    for name, tensor in named.items():
        end = start + tensor.nbytes
        parts.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": tensor.nbytes,
            }
        )
        start = end
    return torch.cat([t.flatten().view(torch.uint8) for t in named.values()]), parts


def halves(named: dict[str, Any]) -> list[dict[str, Any]]:
    names = list(named)
    cut = len(names) // 2
    return [{n: named[n] for n in part} for part in (names[:cut], names[cut:])]


# ------------------------------------------------------------------ from disk
def test_a_checkpoint_of_the_host_is_served_and_the_model_path_follows(
    door: Door, folders: dict[str, Path], expected: Any
) -> None:
    reply = door.post(
        "/update_weights_from_disk",
        model_path=str(folders["new"]),
        load_format="auto",
        weight_version="v7",
        is_async=False,
        torch_empty_cache=False,
        recapture_cuda_graph=False,
        token_step=7,
    )
    assert (reply["success"], reply["num_paused_requests"]) == (True, 0)
    assert (reply["weight_version"], reply["step"]) == ("v7", 7)
    assert said(door.core) == expected
    for path in ("/get_model_info", "/model_info"):
        info = door.get(path)
        assert (info["model_path"], info["weight_version"]) == (
            str(folders["new"]),
            "v7",
        )
        assert info["is_generation"] is True
    for path in ("/weight_version", "/get_weight_version"):
        assert door.get(path) == {"weight_version": "v7"}
    door.post("/rollback_weights")
    assert door.get("/model_info")["model_path"] == str(folders["old"])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("load_format", "dummy", "load_format 'dummy'"),
        ("load_format", "sharded_state", "load_format 'sharded_state'"),
        ("block_generation", True, "block_generation cannot be true"),
        ("non_blocking", False, "non_blocking cannot be false"),
        ("online", False, "online cannot be false"),
        ("flush_cache", "perhaps", "flush_cache must be true or false"),
        ("keep_pause", 3, "keep_pause must be true or false"),
        ("files", [], "unknown field 'files'"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    door: Door, folders: dict[str, Path], field: str, value: Any, named: str
) -> None:
    body = {"model_path": str(folders["new"]), field: value}
    status, message = door.refused("/update_weights_from_disk", **body)
    assert (status, named in message) == (400, True), message
    assert door.label == "old"


@pytest.mark.parametrize(
    "body", [{"non_blocking": True}, {"online": True}, {"block_generation": False}]
)
def test_older_switches_that_say_what_happens_anyway_are_accepted(
    door: Door, folders: dict[str, Path], body: dict[str, bool]
) -> None:
    path = str(folders["new"])
    assert door.post("/update_weights_from_disk", model_path=path, **body)["success"]


def test_an_update_alone_aborts_nothing_and_flushes_nothing(
    door: Door, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(1))
    streams = Streams(door.core).step(10)
    door.post(
        "/update_weights_from_disk",
        model_path=str(folders["new"]),
        weight_version="new",
    )
    streams.run()
    assert streams.stamps["r"] == ["old"] * 10 + ["new"] * 30


def test_abort_all_requests_ends_them_at_the_commit(
    door: Door, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(2))
    Streams(door.core).step(5)
    reply = door.post(
        "/update_weights_from_disk",
        model_path=str(folders["new"]),
        abort_all_requests=True,
    )
    assert reply["num_aborted"] == 1
    assert not door.core.scheduler.has_unfinished_requests()


def test_flush_cache_sends_running_requests_back_to_be_prefilled_again(
    door: Door, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(3))
    streams = Streams(door.core).step(5)
    reply = door.post(
        "/update_weights_from_disk",
        model_path=str(folders["new"]),
        flush_cache=True,
    )
    assert reply["num_retracted"] == 1
    streams.run()
    assert len(streams.tokens["r"]) == 40


def test_keep_pause_leaves_the_engine_paused_and_counts_what_is_frozen(
    door: Door, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(4))
    streams = Streams(door.core).step(5)
    path = str(folders["new"])
    reply = door.post("/update_weights_from_disk", model_path=path, keep_pause=True)
    assert reply["num_paused_requests"] == 1
    assert door.get("/is_paused")["is_paused"] is True
    assert len(streams.step(3).tokens["r"]) == 5
    status, _ = door.refused(
        "/update_weights_from_disk", model_path="/nowhere", keep_pause=True
    )
    assert (status, door.get("/is_paused")["is_paused"]) == (400, True)
    door.post("/continue_generation")
    assert len(streams.run().tokens["r"]) == 40


def test_a_pause_of_an_update_that_fails_is_taken_back(door: Door) -> None:
    door.refused("/update_weights_from_disk", model_path="/nowhere", keep_pause=True)
    assert door.get("/is_paused")["is_paused"] is False


# ---------------------------------------------------------------- from tensors
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
    assert "decoding goes on with the weights before" in message
    assert (said(door.core), door.label) == (before, "old")
    assert door.get("/weight_update")["active"] is None


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
    assert "staged" in send(first)["message"]  # sent again: from the beginning
    door.refused("/continue_generation")
    assert (said(door.core), door.label) == (before, "old")


def test_tensors_that_no_parameter_takes_open_no_version(door: Door) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    reply = door.post(
        "/update_weights_from_tensor", serialized_named_tensors=[entry(extra)]
    )
    assert "no parameter" in reply["message"]
    assert door.get("/weight_update")["active"] is None


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
def test_tensors_that_cannot_be_read_are_refused_by_name(
    door: Door, body: dict[str, Any], named: str
) -> None:
    full = {"serialized_named_tensors": [entry({"a": torch.ones(2)})]} | body
    status, message = door.refused("/update_weights_from_tensor", **full)
    assert (status, named in message) == (400, True), message
    assert door.get("/weight_update")["active"] is None


def test_a_bucket_that_reaches_beyond_itself_is_refused(door: Door) -> None:
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


# --------------------------------------------------------------------- pickles
class Evil:
    def __reduce__(self) -> Any:
        return (print, ("a pickle has run",))


def pickled(payload: Any) -> str:
    return base64.b64encode(pickle.dumps(payload)).decode()


def test_a_pickle_is_refused_unless_the_server_was_started_for_it(
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


# ----------------------------------------------------------------------- pause
@pytest.mark.parametrize(
    ("body", "mode"),
    [
        ({}, "abort"),
        ({"mode": "abort_all"}, "abort"),
        ({"mode": "retract_all"}, "retract"),
        ({"mode": "non_blocking"}, "in_place"),
        ({"abort_all": True}, "abort"),
        ({"retract_all": True}, "retract"),
        ({"non_blocking": True}, "in_place"),
        ({"block_generation": True}, "wait"),
        ({"mode": "keep"}, "in_place"),
    ],
)
def test_modes_of_a_pause_in_every_spelling(
    door: Door, body: dict[str, Any], mode: str
) -> None:
    reply = door.post("/pause_generation", **body)
    assert (reply["status"], reply["mode"]) == ("ok", mode)
    assert reply["message"] == "Generation paused successfully."
    assert door.get("/is_paused")["mode"] == mode
    reply = door.post("/continue_generation", torch_empty_cache=True)
    assert (reply["status"], reply["paused"]) == ("ok", False)
    assert reply["message"] == "Generation continued successfully."


@pytest.mark.parametrize("body", [{"mode": "online"}, {"online": True}])
def test_a_pause_that_would_be_none_is_refused_by_name(
    door: Door, body: dict[str, Any]
) -> None:
    status, message = door.refused("/pause_generation", **body)
    assert (status, "an update needs no pause" in message) == (400, True)


def test_a_flush_under_frozen_requests_is_refused_before_anything_is_sent(
    door: Door, folders: dict[str, Path]
) -> None:
    add(door.core, "r", prompt(5))
    Streams(door.core).step(5)
    door.post("/pause_generation", mode="in_place")
    status, message = door.refused(
        "/update_weights_from_disk", model_path=str(folders["new"]), flush_cache=True
    )
    assert (status, "pause with mode 'retract'" in message) == (409, True)
    assert door.refused("/flush_cache")[0] == 409
    door.post("/pause_generation", mode="retract")
    assert door.post("/flush_cache")["num_waiting"] == 1
    call(door.core, "resume")


def test_the_cache_can_be_flushed_by_either_method(door: Door) -> None:
    assert door.get("/flush_cache")["message"] == "Cache flushed."
    assert door.post("/reset_prefix_cache", reset_external=True) == {"success": True}


# -------------------------------------------------------------------- requests
def test_a_request_is_aborted_by_the_id_that_its_user_gave(door: Door) -> None:
    names = [
        "cmpl-mine-0-0123abcd",
        "0_chatcmpl-mine-89abcdef",
        "cmpl-mine2-0-00000000",
    ]
    for number, name in enumerate(names):
        add(door.core, name, prompt(number))
    Streams(door.core).step(3)
    assert door.post("/abort_request", rid="other")["num_aborted"] == 0
    assert door.post("/abort_request", rid="mine")["num_aborted"] == 2
    assert list(door.core.scheduler.requests) == names[2:]
    assert door.post("/abort_request", abort_all=True)["num_aborted"] == 1
    assert door.refused("/abort_request")[0] == 400
    add(door.core, "r", prompt(1))
    assert door.post("/abort_requests", request_ids=["r"])["aborted"] == 1


def test_a_rename_aborts_nobody_unless_it_is_asked_to(door: Door) -> None:
    add(door.core, "r", prompt(6))
    streams = Streams(door.core).step(5)
    reply = door.post("/update_weight_version", new_version="best")
    assert (reply["success"], reply["new_version"]) == (True, "best")
    streams.run()
    assert streams.stamps["r"] == ["old"] * 5 + ["best"] * 35
    add(door.core, "s", prompt(6))
    door.post("/update_weight_version", new_version="b", abort_all_requests=True)
    assert not door.core.scheduler.has_unfinished_requests()


# ----------------------------------------------------------------------- reads
def test_weights_are_read_by_the_checkpoints_names(
    door: Door, folders: dict[str, Path]
) -> None:
    served = tensors(folders["old"])
    for name in (
        HEAD,
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ):
        rows = door.post("/get_weights_by_name", name=name, truncate_size=3)
        assert rows == served[name][:3].float().tolist(), name
    rows = door.get("/get_weights_by_name", name="model.norm.weight")
    assert len(rows) == min(100, len(served["model.norm.weight"]))


@pytest.mark.parametrize(
    "body", [{"name": "no.such"}, {}, {"name": HEAD, "truncate_size": 0}]
)
def test_a_read_that_makes_no_sense_is_refused(door: Door, body: Any) -> None:
    assert door.refused("/get_weights_by_name", **body)[0] == 400


def test_checksums_tell_two_versions_apart_and_come_back_with_one(
    door: Door, folders: dict[str, Path]
) -> None:
    (before,) = door.post("/weights_checker")["payload"]
    baseline = door.post("/weight_checker", action="checksum")["checksums"]
    assert set(baseline) == {f"dp0:pp0:pcp0:tp0:{n}" for n in before["checksums"]}
    publish(door.core, folders["new"], "new")
    (after,) = door.post("/weights_checker", action="checksum")["payload"]
    same = [
        n
        for n in before["checksums"]
        if after["checksums"][n] == before["checksums"][n]
    ]
    # Norms are ones in every random model; every drawn weight differs.
    assert all("norm" in name for name in same) and len(after["checksums"]) > len(same)
    assert after["per_gpu_checksum"] != before["per_gpu_checksum"]
    compared = door.post("/weight_checker", action="compare", baseline=baseline)
    assert compared["match"] is False and compared["mismatches"]
    door.post("/rollback_weights")
    compared = door.post("/weight_checker", action="compare", baseline=baseline)
    assert compared == {"match": True, "mismatches": []}


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("/weights_checker", "reset_tensors"),
        ("/weights_checker", "snapshot"),
        ("/weight_checker", "reset"),
    ],
)
def test_an_action_that_would_touch_live_weights_is_refused(
    door: Door, path: str, action: str
) -> None:
    status, message = door.refused(path, action=action)
    assert (status, action in message) == (400, True)


@pytest.mark.parametrize(
    "path", ["/release_memory_occupation", "/resume_memory_occupation"]
)
def test_memory_is_not_released_without_sleep_mode(door: Door, path: str) -> None:
    status, message = door.refused(path, tags=["weights"])
    assert (status, "--enable-sleep-mode" in message) == (409, True)
    assert door.refused(path, tags=["cuda_graph"])[0] == 400


def test_handles_of_a_checkpoint_engine_are_refused_with_the_way_out(
    door: Door,
) -> None:
    status, message = door.refused("/update_weights_from_ipc", zmq_handles={})
    assert (status, "'shm'" in message) == (400, True)


def test_the_configuration_can_be_read_as_upstream_tells_it(door: Door) -> None:
    config = door.get("/server_info", config_format="json")["vllm_config"]
    assert config["weight_transfer_config"] is None
    assert "model=" in door.get("/server_info")["vllm_config"]
