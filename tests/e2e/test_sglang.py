"""SGLang's updates from a checkpoint, its pauses and its requests, on a real core."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.engines.core_door import Door, said
from tests.support.engines.mixtures import MLP, mixed, part
from vllm.inflight.engine.pause.abort import matching

pytestmark = pytest.mark.engine

HEAD = "lm_head.weight"


# -------------------------------------------------------------------- from disk
def test_a_subset_of_the_host_is_served_on_top_of_what_is(
    door: Door,
    folders: dict[str, Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    old, new, only = folders["old"], folders["new"], tmp_path / "part"
    whole = str(mixed(old, new, MLP, tmp_path / "whole"))
    digest = door.post("/update_weights_from_disk", model_path=whole)["digest"]
    expected = said(door.core)
    door.post("/update_weights_from_disk", model_path=str(old), weight_version="old")
    body = {"model_path": part(new, MLP, only), "subset": list(MLP)}
    reply = door.post("/update_weights_from_disk", **body, base_version="old")
    assert (reply["digest"], said(door.core)) == (digest, expected)
    record_property("digest", "equal")
    # The part is not the model that is served.
    assert door.get("/get_model_info")["model_path"] != str(only)
    body["model_path"] = str(new)
    status, message = door.refused("/update_weights_from_disk", **body)
    assert (status, "no pattern of the subset" in message) == (422, True)
    status, message = door.refused("/update_weights_from_disk", **body | {"subset": 1})
    assert (status, "subset" in message) == (400, True)


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
def test_an_unsupported_option_is_rejected_by_name(
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


def test_an_update_without_options_aborts_nothing_and_flushes_nothing(
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


@pytest.mark.parametrize(("mode", "abort"), [("abort", False), ("in_place", True)])
def test_an_update_that_contradicts_itself_ends_no_request(
    door: Door, folders: dict[str, Path], mode: str, abort: bool
) -> None:
    add(door.core, "r", prompt(2))
    streams = Streams(door.core).step(5)
    status, message = door.refused(
        "/update_weights_from_disk",
        model_path=str(folders["new"]),
        abort_all_requests=abort,
        mode=mode,
    )
    assert (status, "abort_all_requests" in message) == (400, True)
    streams.run()
    assert set(streams.stamps["r"]) == {"old"}
    assert len(streams.tokens["r"]) == 40


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


# ------------------------------------------------------------------------ pause
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
        ({"abort_all": False}, "in_place"),
        ({"abort_all": False, "non_blocking": False}, "wait"),
        ({"abort_all": False, "retract_all": True}, "retract"),
        ({"retract_all": False}, "abort"),
        ({"non_blocking": False}, "abort"),
        ({"block_generation": False}, "abort"),
        ({"online": False}, "abort"),
        ({"mode": "keep", "abort_all": False, "non_blocking": True}, "in_place"),
    ],
)
def test_a_pause_accepts_every_spelling_of_its_mode(
    door: Door, body: dict[str, Any], mode: str
) -> None:
    reply = door.post("/pause_generation", **body)
    assert (reply["status"], reply["mode"]) == ("ok", mode)
    assert reply["message"] == "Generation paused successfully."
    assert door.get("/is_paused")["mode"] == mode
    reply = door.post("/continue_generation", torch_empty_cache=True)
    assert (reply["status"], reply["paused"]) == ("ok", False)
    assert reply["message"] == "Generation continued successfully."


@pytest.mark.parametrize(
    "body",
    [
        {"mode": "abort", "abort_all": False},
        {"mode": "abort_all", "abort_all": False},
        {"mode": "in_place", "abort_all": True},
        {"mode": "retract", "retract_all": False},
        {"mode": "keep", "non_blocking": False},
        {"mode": "wait", "block_generation": False},
        {"abort_all": True, "retract_all": True},
        dict.fromkeys(
            ("abort_all", "retract_all", "non_blocking", "block_generation"), False
        ),
    ],
)
def test_a_pause_that_contradicts_itself_ends_no_request(
    door: Door, body: dict[str, Any]
) -> None:
    add(door.core, "r", prompt(1))
    streams = Streams(door.core).step(5)
    status, message = door.refused("/pause_generation", **body)
    assert (status, "these fields" in message) == (400, True)
    assert not door.get("/is_paused")["is_paused"]
    streams.run()
    assert len(streams.tokens["r"]) == 40


@pytest.mark.parametrize("said", [False, "false", "0"])
def test_a_pause_that_is_to_abort_nothing_aborts_nothing(door: Door, said: Any) -> None:
    add(door.core, "r", prompt(1))
    streams = Streams(door.core).step(5)
    reply = door.post("/pause_generation", abort_all=said)
    assert (reply["mode"], reply["num_aborted"]) == ("in_place", 0)
    door.post("/continue_generation")
    streams.run()
    assert len(streams.tokens["r"]) == 40


@pytest.mark.parametrize("body", [{"mode": "online"}, {"online": True}])
def test_sglangs_online_pause_mode_is_rejected_by_name(
    door: Door, body: dict[str, Any]
) -> None:
    status, message = door.refused("/pause_generation", **body)
    assert (status, "an update needs no pause" in message) == (400, True)


def test_a_flush_under_frozen_requests_is_rejected_before_anything_is_sent(
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


# --------------------------------------------------------------------- requests
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


def test_a_request_is_not_aborted_by_an_id_that_is_a_prefix_of_its_own() -> None:
    known = [
        *(
            "chatcmpl-a-0123abcd",
            "chatcmpl-a-1-0123abcd",
            "chatcmpl-a-12345678-00000000",
        ),
        *("cmpl-a-0-0123abcd", "1_cmpl-a-1-0123abcd", "cmpl-a-1-0-12345678"),
        *("generate-tokens-a-0123abcd", "generate-tokens-a-1-0123abcd"),
        *("resp_a_0-0123abcd", "resp_a_1-0123abcd", "resp_a_1_0-0123abcd"),
        *("a-0123abcd", "a-1-0123abcd", "3_a-0123abcd", "a"),
    ]
    assert matching(known, ["a"]) == [
        *("chatcmpl-a-0123abcd", "cmpl-a-0-0123abcd", "1_cmpl-a-1-0123abcd"),
        *("generate-tokens-a-0123abcd", "a-0123abcd", "3_a-0123abcd", "a"),
    ]
    assert matching(known, ["a-1"]) == [
        *("chatcmpl-a-1-0123abcd", "cmpl-a-1-0-12345678"),
        *("generate-tokens-a-1-0123abcd", "a-1-0123abcd"),
    ]
    assert matching(known, ["resp_a"]) == ["resp_a_0-0123abcd", "resp_a_1-0123abcd"]
    assert matching(known, ["cmpl-a-0", "other"]) == ["cmpl-a-0-0123abcd"]
