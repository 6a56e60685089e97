"""Updates of an engine in this process: what is served before, during and after."""

import time
from itertools import groupby, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.support.engines.probe import greedy, outputs_during, send, state
from tests.support.waiting import until
from vllm.inflight.errors import (
    Conflict,
    Malformed,
    NothingToRollBack,
    OwnedByAnother,
    PauseConflict,
    UnknownUpdate,
    UpdateBusy,
    VersionConflict,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.engine


# ------------------------------------------------------------------- progress
def test_the_status_of_an_update_reports_what_the_update_waits_for_and_how_long(
    llm: Any, new: Path
) -> None:
    def seen() -> dict[str, Any]:
        active: dict[str, Any] = llm.weight_update_status()["active"]
        return active

    llm.start_weight_update()
    until(
        lambda: seen()["waits_for"] == "trainer",
        "the order to begin is never carried out",
    )
    until(lambda: seen()["stalled_s"] >= 0.2, "nothing moves, and that is not seen")
    looks = [seen()]
    receiving = in_background(lambda: send(llm, new, sleep_s=0.1))
    while not receiving.done():
        time.sleep(0.02)
        looks.append(seen())
    receiving.result()
    looks.append(seen())
    told = [whom for whom, _ in groupby(looks, lambda look: look["waits_for"])]
    assert told == ["trainer", "ranks", "trainer"]
    stalled = [look["stalled_s"] for look in looks if look["waits_for"] == "ranks"]
    num_moves = sum(after < before for before, after in pairwise(stalled))
    assert num_moves > 5, "bytes came, and were not seen"
    llm.finish_weight_update()
    assert seen() is None


# ------------------------------------------------------------------ success
def test_a_commit_reports_the_drift_of_the_weights(
    llm: Any, old: Path, new: Path, tmp_path: Path
) -> None:
    tensors = load_file(old / "model.safetensors")
    nearby = {name: tensor * 1.25 for name, tensor in tensors.items()}
    save_file(nearby, tmp_path / "model.safetensors")
    reply = llm.update_weights_from_disk(str(tmp_path))
    assert reply["drift"]["overall"] == pytest.approx(0.25, abs=0.01)
    assert reply["drift"]["layers"]["model.layers.1"] == pytest.approx(0.25, abs=0.01)
    # After a rollback it is the old version that the next one is compared with.
    llm.rollback_weights()
    assert llm.update_weights_from_disk(str(old))["drift"]["overall"] == 0.0
    assert llm.update_weights_from_disk(str(new))["drift"]["overall"] > 1.0


def test_after_a_commit_new_requests_equal_a_fresh_engine(
    llm: Any, new: Path, fresh: Any
) -> None:
    assert greedy(llm) != fresh
    reply = llm.update_weights_from_disk(str(new), "v1")
    assert greedy(llm) == fresh
    assert (reply["weight_version"], llm.get_weight_version()) == ("v1", "v1")


def test_a_transport_may_hand_over_one_tensor_at_a_time(
    llm: Any, new: Path, fresh: Any
) -> None:
    llm.start_weight_update()
    send(llm, new, one_by_one=True)
    llm.finish_weight_update()
    assert greedy(llm) == fresh


def test_a_foreign_transport_receives_into_the_shadow_weights(
    llm: Any, new: Path, fresh: Any
) -> None:
    before = greedy(llm)
    llm.init_weight_transfer_engine({"init_info": {"tag": "x"}})
    llm.start_weight_update()
    send(llm, new)
    assert greedy(llm) == before, "the live weights changed before the commit"
    llm.finish_weight_update("theirs")
    assert greedy(llm) == fresh
    assert llm.get_weight_version() == "theirs"


def test_an_update_may_come_in_several_chunks(llm: Any, new: Path, fresh: Any) -> None:
    from safetensors import safe_open

    with safe_open(new / "model.safetensors", "pt") as file:
        names = sorted(file.keys())
    llm.start_weight_update()
    for start in range(0, len(names), 5):
        send(llm, new, names=names[start : start + 5])
    llm.finish_weight_update()
    assert greedy(llm) == fresh


def test_a_version_without_a_label_is_named_after_its_epoch(
    llm: Any, new: Path
) -> None:
    reply = llm.update_weights_from_disk(str(new))
    assert reply["weight_version"] == f"update-{reply['epoch']}"


def test_a_rollback_serves_the_version_before_and_back_again(
    llm: Any, new: Path, fresh: Any
) -> None:
    before = state(llm)
    epoch = llm.update_weights_from_disk(str(new), "v1")["epoch"]
    assert llm.rollback_weights()["epoch"] == epoch + 1
    assert state(llm) == before
    assert llm.weight_update_status()["outcomes"][0]["phase"] == "rolled_back"
    assert llm.rollback_weights("v1")["weight_version"] == "v1"
    assert greedy(llm) == fresh
    assert llm.weight_update_status()["outcomes"][0]["phase"] == "committed"


def test_the_phases_called_on_the_workers_are_the_same_transaction(
    llm: Any, new: Path, fresh: Any
) -> None:
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"path": str(new)}})
    llm.collective_rpc("finish_weight_update")
    assert greedy(llm) == fresh


def test_renaming_changes_the_label_and_nothing_else(llm: Any) -> None:
    tokens, _ = state(llm)
    info = llm.weight_info()
    llm.update_weight_version("renamed")
    after = llm.weight_info()
    assert state(llm) == (tokens, "renamed")
    assert (after["digest"], after["epoch"]) == (info["digest"], info["epoch"] + 1)


def test_updates_from_another_thread_run_between_the_steps_of_generate(
    llm: Any, old: Path, new: Path
) -> None:
    def update() -> None:
        for index in range(6):
            path = (new, old)[index % 2]
            llm.update_weights_from_disk(str(path), f"t{index}")

    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    outputs = outputs_during(update, llm, 4, repeat(params))
    assert all(len(o.outputs[0].token_ids) == 400 for o in outputs)
    assert any(len(o.outputs[0].weight_versions) > 1 for o in outputs)


# ------------------------------------------------------------- ids and phases
def test_the_same_id_and_body_is_the_same_update(llm: Any, new: Path) -> None:
    first = llm.update_weights_from_disk(str(new), "v1", update_id="once")
    again = llm.update_weights_from_disk(str(new), "v1", update_id="once")
    assert again == first
    with pytest.raises(Conflict, match="another body"):
        llm.update_weights_from_disk(str(new), "v2", update_id="once")


def test_a_numbered_chunk_is_received_once(llm: Any, new: Path, fresh: Any) -> None:
    llm.start_weight_update(update_id="chunks")
    info = {"update_info": {"path": str(new)}}
    for _ in range(3):
        llm.update_weights(info, "chunks", chunk=0)
    llm.finish_weight_update()
    assert greedy(llm) == fresh


def test_only_one_update_can_be_active(llm: Any) -> None:
    llm.start_weight_update(update_id="first")
    with pytest.raises(UpdateBusy, match="first"):
        llm.start_weight_update(update_id="second")
    with pytest.raises(UpdateBusy):
        llm.rollback_weights()


def test_another_owner_can_neither_feed_nor_finish_nor_abort_an_update(
    llm: Any, new: Path
) -> None:
    llm.start_weight_update(owner="trainer")
    info = {"update_info": {"path": str(new)}}
    for call in (
        lambda owner: llm.update_weights(info, owner=owner),
        lambda owner: llm.finish_weight_update("theirs", owner=owner),
        lambda owner: llm.abort_weight_update(owner=owner),
    ):
        with pytest.raises(OwnedByAnother, match="belongs to 'trainer'"):
            call("another")
    with pytest.raises(Malformed, match="owner must be a string"):
        llm.abort_weight_update(owner=7)
    assert llm.weight_update_status()["active"]["owner"] == "trainer"
    llm.update_weights(info, owner="trainer")
    # Who names no owner is not held up: that is an operator's way in.
    assert llm.finish_weight_update("new")["weight_version"] == "new"


def test_the_staged_digest_can_be_checked_before_the_commit(
    llm: Any, new: Path
) -> None:
    path, digest = str(new), llm.update_weights_from_disk(str(new), "new")["digest"]
    llm.rollback_weights()
    with pytest.raises(WeightsMismatch, match=f"staged version has '{digest}'"):
        llm.update_weights_from_disk(path, "new", expect_digest="0" * 32)
    assert llm.get_weight_version() == "old"
    reply = llm.update_weights_from_disk(path, "new", expect_digest=digest)
    assert reply["weight_version"] == "new"


def test_a_call_in_the_wrong_phase_is_a_conflict(llm: Any, new: Path) -> None:
    llm.update_weights_from_disk(str(new), update_id="over")
    with pytest.raises(WrongPhase):
        send(llm, new)
    with pytest.raises(WrongPhase):
        llm.abort_weight_update("over")
    with pytest.raises(UnknownUpdate):
        llm.finish_weight_update(update_id="never")
    with pytest.raises(Conflict, match="draft"):
        llm.start_draft_weight_update()


def test_start_and_finish_must_agree_on_the_version(llm: Any, new: Path) -> None:
    llm.start_weight_update(weight_version="a")
    send(llm, new)
    with pytest.raises(VersionConflict):
        llm.finish_weight_update("b")
    assert llm.finish_weight_update("a")["weight_version"] == "a"


def test_an_update_based_on_another_version_is_rejected(llm: Any, new: Path) -> None:
    with pytest.raises(VersionConflict, match="base_version"):
        llm.start_weight_update(base_version="elsewhere")
    llm.start_weight_update(base_version="old")
    send(llm, new)
    with pytest.raises(VersionConflict, match="expect_version"):
        llm.finish_weight_update(expect_version="elsewhere")
    llm.finish_weight_update(expect_version="old")


def test_an_unknown_option_is_rejected_by_name(llm: Any, new: Path) -> None:
    for call in (
        lambda **slip: llm.start_weight_update(**slip),
        lambda **slip: llm.start_draft_weight_update(**slip),
        lambda **slip: llm.update_weights_from_disk(str(new), "new", **slip),
    ):
        named = r"unknown option 'base_verison' \(nearest: base_version"
        with pytest.raises(Malformed, match=named):
            call(base_verison="elsewhere")
    assert llm.weight_update_status()["active"] is None
    assert llm.weight_info()["weight_version"] == "old"


def test_the_first_write_of_an_update_ends_the_rollback_window(
    llm: Any, new: Path
) -> None:
    llm.update_weights_from_disk(str(new), "v1")
    llm.start_weight_update()
    llm.abort_weight_update()
    assert llm.weight_info()["previous"]["weight_version"] == "old"
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(new)}})
    llm.abort_weight_update()
    with pytest.raises(NothingToRollBack):
        llm.rollback_weights()


@pytest.mark.parametrize("manifest", [[1], "all", 5])
def test_a_manifest_that_is_not_an_object_is_malformed(llm: Any, manifest: Any) -> None:
    with pytest.raises(Malformed, match="manifest must be an object"):
        llm.start_weight_update(manifest=manifest)
        llm.finish_weight_update()


def test_a_bad_transport_payload_names_the_field(llm: Any) -> None:
    llm.start_weight_update()
    named = r"unknown field 'pth' of update_info \(nearest: path\).* takes path, "
    with pytest.raises(Malformed, match=named):
        llm.update_weights({"update_info": {"pth": "/"}})
    with pytest.raises(Malformed, match=r"'master_address' of init_info.* takes "):
        llm.init_weight_transfer_engine({"init_info": {"master_address": "there"}})


def test_a_name_that_is_no_dtype_is_called_so(llm: Any) -> None:
    spec = {"name": "model.norm.weight", "shape": [64], "dtype": "bf16"}
    with pytest.raises(WeightsMismatch, match="it is bf16, no dtype as 'bfloat16'"):
        llm.start_weight_update(manifest={"format": 1, "tensors": [spec]})
        llm.finish_weight_update()


def test_a_pause_that_may_not_follow_is_told_with_those_that_may(llm: Any) -> None:
    llm.pause_generation(mode="retract")
    try:
        with pytest.raises(PauseConflict, match="to retract, abort, and not to wait"):
            llm.pause_generation(mode="wait")
    finally:
        llm.continue_generation()


# ---------------------------------------------- clients of vLLM's older releases
def test_fields_of_the_format_from_older_clients_are_ignored(
    llm: Any, new: Path, fresh: Any
) -> None:
    llm.start_weight_update(True)
    llm.abort_weight_update()
    llm.start_weight_update(is_checkpoint_format=True)
    send(llm, new, is_checkpoint_format=True, update_kind="dense")
    llm.finish_weight_update("new")
    assert greedy(llm) == fresh


def test_fields_of_the_format_in_worker_calls_are_ignored(
    llm: Any, new: Path, fresh: Any
) -> None:
    llm.collective_rpc("start_weight_update", args=(True,))
    llm.abort_weight_update()
    llm.collective_rpc("start_weight_update", kwargs={"is_checkpoint_format": True})
    info = {"path": str(new), "is_checkpoint_format": True}
    llm.collective_rpc("update_weights", kwargs={"update_info": info})
    llm.collective_rpc("finish_weight_update")
    assert greedy(llm) == fresh


def test_weights_in_a_kernels_format_are_rejected_by_name(llm: Any) -> None:
    before = state(llm)
    for begin in (
        lambda: llm.start_weight_update(is_checkpoint_format=False),
        lambda: llm.collective_rpc("start_weight_update", args=(False,)),
        lambda: llm.collective_rpc(
            "start_weight_update", kwargs={"is_checkpoint_format": False}
        ),
    ):
        with pytest.raises(Malformed, match="is_checkpoint_format cannot be False"):
            begin()
        assert llm.weight_update_status()["active"] is None
    assert state(llm) == before


@pytest.mark.parametrize(
    "field, value",
    [
        ("is_checkpoint_format", False),
        ("update_kind", "sparse_flat"),
        ("packed", True),
    ],
)
def test_an_unsupported_value_of_an_older_field_is_rejected_by_name(
    llm: Any, new: Path, field: str, value: Any
) -> None:
    llm.start_weight_update()
    with pytest.raises(Malformed, match=f"{field} cannot be {value!r}"):
        send(llm, new, **{field: value})


def test_a_worker_call_with_an_unknown_argument_is_rejected_and_starts_nothing(
    llm: Any,
) -> None:
    for call in (
        lambda: llm.collective_rpc("start_weight_update", kwargs={"base_verison": "x"}),
        lambda: llm.collective_rpc("start_weight_update", args=(True, "x")),
        lambda: llm.collective_rpc("finish_weight_update", args=("label",)),
    ):
        with pytest.raises(Malformed, match="has no argument"):
            call()
    assert llm.weight_update_status()["active"] is None


@pytest.mark.parametrize("word, mode", [(True, "wait"), (False, "abort")])
def test_the_older_word_for_a_pause_that_waits(llm: Any, word: bool, mode: str) -> None:
    reply = llm.pause_generation(wait_for_inflight_requests=word, clear_cache=True)
    assert reply["mode"] == mode
    llm.continue_generation()
    with pytest.raises(Malformed, match="wait_for_inflight_requests"):
        llm.pause_generation(wait_for_inflight_requests="yes")
