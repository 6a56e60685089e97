"""Delta staging in a real engine: one set of weights, and a log of what changes.

The CPU build packs the matrices of linear layers, and a packed element has no place. So
the engines here are started without packing, as a GPU never packs.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm._custom_ops as custom_ops
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.e2e.test_adapters import ADAPTERS, said
from tests.e2e.test_deltas import (  # noqa: F401 (tests, run here with delta staging)
    Sent,
    expected,
    sent,
    step,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_delta_from_another_version_is_rejected_at_once,
    test_a_delta_is_committed_while_requests_run,
    test_a_delta_that_does_not_fit_what_is_served_is_followed_by_the_whole,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_end_changes_nothing,
    test_a_lost_part_changes_nothing,
    test_a_scrub_after_deltas_names_the_tensor_with_a_changed_bit,
    test_a_trainer_in_float32_sends_what_changes_of_what_is_served,
    test_a_version_without_a_change_is_a_version,
    test_after_another_trainers_version_the_whole_one_is_sent,
    test_one_tensor_of_a_fused_parameter_may_change_alone,
    test_parts_that_come_together_lead_to_the_same_version,
    test_small_deltas_keep_the_namespace_of_kv_and_a_large_one_begins_another,
    test_when_most_has_changed_the_whole_version_is_sent,
    tokens,
)
from tests.support.deltas import stepped
from tests.support.engines.adapters import make_adapter
from tests.support.engines.probe import greedy
from tests.support.engines.script import run_script
from tests.support.engines.unpacked import CAN_UNPACK_EXPERTS, unpacked
from tests.support.models.families import cpu_options
from vllm.inflight.engine.update.live_version import LiveVersion
from vllm.inflight.errors import (
    ChangeLogFull,
    ConfigError,
    EngineFault,
    InflightError,
    NothingToRollBack,
    StagingUnavailable,
    UpdateBusy,
    VersionConflict,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher
from vllm.inflight.transport.buckets.buffers import LEAST_BYTES
from vllm.inflight.worker.delta import dense
from vllm.inflight.worker.memory.placement import Placement
from vllm.inflight.worker.shadow import shadow_model
from vllm.inflight.worker.staging import destination_table
from vllm.inflight.worker.staging.thread import StagingThread
from vllm.inflight.worker.staging.worker import StagingWorker

pytestmark = pytest.mark.engine

ROOM = {"staging": "delta", "delta_gib": 0.01}
"""A log for any version of the tiny model."""


def delta_engine(start: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """An engine with delta staging; `inflight` are fields of its configuration."""
    options.setdefault("weight_transfer_config", WeightTransferConfig(backend="local"))
    inflight = options.pop("inflight", ROOM)
    return start(folder, additional_config={"inflight": inflight}, **options)


@pytest.fixture(scope="module", autouse=True)
def without_packing() -> Iterator[None]:
    with unpacked():
        yield


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: list[list[int]], old: Path) -> Any:
    return delta_engine(start, old)


@pytest.fixture
def on_old(llm: Any, old: Path) -> Any:
    """The engine, on the old weights."""
    llm.update_weights_from_disk(str(old), "old")
    return llm


@pytest.fixture
def weights(old: Path) -> dict[str, torch.Tensor]:
    return load_file(old / "model.safetensors")


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def shadow_of(llm: Any) -> Any:
    return worker_of(llm).vllm_inflight.stager.shadow


def live_of(llm: Any) -> dict[str, torch.Tensor]:
    return dict(worker_of(llm).model_runner.get_model().named_parameters())


def test_whole_versions_and_rollbacks_equal_a_fresh_engine(on_old, fresh, old, new):
    first = greedy(on_old)
    assert first != fresh
    for _ in range(2):
        on_old.update_weights_from_disk(str(new), "new")
        assert greedy(on_old) == fresh
        on_old.rollback_weights()
        assert greedy(on_old) == first
        on_old.rollback_weights()
        assert greedy(on_old) == fresh
        on_old.update_weights_from_disk(str(old), "old")
        assert greedy(on_old) == first
    assert on_old.verify_weights()["result"] == "equal"


def test_a_transport_has_few_buckets_and_the_kv_cache_leaves_room_for_them(
    start, old, new, fresh, monkeypatch
) -> None:
    beside = property(lambda self: 5 << 20)
    monkeypatch.setattr(StagingWorker, "bucket_bytes", beside)
    runner = CPUModelRunner
    monkeypatch.setattr(runner, "model_memory_usage", 1 << 20, raising=False)
    llm = delta_engine(start, old)
    worker = worker_of(llm)
    assert worker.model_runner.model_memory_usage == 6 << 20
    assert llm.weight_info()["staging"]["bucket_bytes"] == 5 << 20
    llm.update_weights_from_disk(str(new), "new")
    assert worker.weight_transfer_engine.most_bucket_bytes == LEAST_BYTES
    assert greedy(llm) == fresh


def test_there_is_one_set_of_weights_and_it_stays_where_it_is(on_old, old, new):
    shadow = shadow_of(on_old)
    assert all(param.is_meta for param in shadow.module.parameters())
    addresses = {name: p.data_ptr() for name, p in live_of(on_old).items()}
    for folder in (new, old):
        on_old.update_weights_from_disk(str(folder))
        found = {name: p.data_ptr() for name, p in live_of(on_old).items()}
        assert found == addresses


def test_only_what_differs_from_the_live_weights_enters_the_log(
    on_old, weights, tmp_path
):
    new = stepped(weights, 1, share=0.01)
    save_file(new, tmp_path / "model.safetensors")
    on_old.update_weights_from_disk(str(tmp_path), "stepped")
    log = shadow_of(on_old).log
    num = sum(int((new[n] != weights[n]).sum()) for n in new)
    total = sum(tensor.numel() for tensor in new.values())
    assert log.num_elements == num < total / 50
    on_old.update_weights_from_disk(str(tmp_path), "the same again")
    assert log.num_elements == 0
    assert on_old.get_weight_version() == "the same again"


def test_kernels_of_a_gpu_would_follow_every_tensor_with_its_padding(
    on_old, new, monkeypatch
):
    followed: dict[str, bool] = {}
    compare = dense.Comparison.log_differences

    def look(self: dense.Comparison, batch: Iterable[dense.Came]) -> None:
        batch = list(batch)
        for name, entry, tensor in batch:
            places = self._known.find(name, entry)
            followed[name] = places is not None and self._can_follow(places, tensor)
        compare(self, batch)

    monkeypatch.setattr(dense.Comparison, "log_differences", look)
    on_old.update_weights_from_disk(str(new), "new")
    plan = shadow_of(on_old).plan
    assert len(followed) == len(plan) and all(followed.values())
    assert any(entry.zeros for _, entry in plan.items())


def test_a_subset_leaves_the_rest_as_it_is_served(on_old, weights, tmp_path):
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    part = stepped({name: weights[name] for name in names}, 3, share=0.5)
    with Publisher(on_old, lambda: part) as to:
        to.publish("subset", subset=names)
    found = tokens(on_old)
    weights |= part
    assert tokens_after_whole(on_old, weights, tmp_path) == found


def tokens_after_whole(llm: Any, weights: Any, folder: Path) -> list[int]:
    return expected(llm, weights, folder / "whole")[1]


def test_tensors_in_float32_are_served_as_a_fresh_engine_casts_them(
    on_old, weights, tmp_path
):
    full = {name: t.float() * 1.01 for name, t in weights.items()}
    cast = {name: t.to(torch.bfloat16) for name, t in full.items()}
    sent_in_turn = [
        expected(on_old, version, tmp_path / str(number))
        for number, version in enumerate((full, cast, full))
    ]
    assert sent_in_turn[0] == sent_in_turn[2]
    assert sent_in_turn[0][1] == sent_in_turn[1][1]


def test_a_delta_of_tensors_that_are_converted_names_both_dtypes(
    on_old, weights, caplog
):
    masters = {name: tensor.float() for name, tensor in weights.items()}
    with Publisher(on_old, masters, dtype=torch.float32) as to:
        to.publish()
        masters["model.norm.weight"][3] += 1
        assert not to.publish().is_delta
    assert "comes as float32 and is served as bfloat16" in caplog.text


def test_an_aborted_update_changes_nothing(on_old, new):
    before = on_old.weight_info()["digest"], tokens(on_old)
    update_id = on_old.start_weight_update()["update_id"]
    on_old.update_weights({"path": str(new)}, update_id=update_id)
    on_old.abort_weight_update(update_id=update_id)
    assert (on_old.weight_info()["digest"], tokens(on_old)) == before
    on_old.update_weights_from_disk(str(new), "new")
    assert tokens(on_old) != before[1]


def test_an_update_that_ends_before_it_is_staged_keeps_the_way_back(
    on_old, old, new, fresh, weights, tmp_path
):
    """With a second set its first byte takes the way back."""
    first = greedy(on_old)
    on_old.update_weights_from_disk(str(new), "new")
    for seed in range(2):
        update_id = on_old.start_weight_update()["update_id"]
        on_old.update_weights({"path": str(old)}, update_id=update_id)
        on_old.abort_weight_update(update_id=update_id)
        bits = stepped(weights, seed)
        bits["model.norm.weight"][3] = torch.nan
        save_file(bits, tmp_path / "model.safetensors")
        with pytest.raises(WeightsMismatch, match="NaN"):
            on_old.update_weights_from_disk(str(tmp_path))
        for expected_tokens, label in ((first, "old"), (fresh, "new")):
            assert on_old.rollback_weights()["weight_version"] == label
            assert greedy(on_old) == expected_tokens
    assert on_old.verify_weights()["result"] == "equal"


def aborted(llm: Any, update_id: str) -> None:
    llm.prepare_weight_update(update_id=update_id)


def refused(llm: Any, update_id: str) -> None:
    """By the engine core: the caller expects another version."""
    with pytest.raises(VersionConflict):
        llm.finish_weight_update("again", update_id=update_id, expect_version="another")


def taken_back(llm: Any, update_id: str) -> None:
    """By the engine core, after the ranks have flipped."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LiveVersion, "_age_cache", lambda *_: pytest.fail("no"))
        with pytest.raises(pytest.fail.Exception, match="no"):
            llm.finish_weight_update("again", update_id=update_id)


@pytest.mark.parametrize("ended", [aborted, refused, taken_back])
def test_an_update_that_is_staged_and_not_committed_keeps_the_way_back(
    on_old, new, fresh, weights, tmp_path, ended
):
    first = greedy(on_old)
    on_old.update_weights_from_disk(str(new), "new")
    save_file(stepped(weights, 1), tmp_path / "model.safetensors")
    for _ in range(2):
        update_id = stage(on_old, tmp_path)
        ended(on_old, update_id)
        told = on_old.abort_weight_update(update_id=update_id)
        assert "rollback_target" not in told
        for expected_tokens, label in ((first, "old"), (fresh, "new")):
            assert on_old.weight_info()["previous"]["weight_version"] == label
            assert on_old.rollback_weights()["weight_version"] == label
            assert greedy(on_old) == expected_tokens
    assert on_old.verify_weights()["result"] == "equal"
    on_old.update_weights_from_disk(str(tmp_path), "stepped")
    on_old.rollback_weights()
    assert greedy(on_old) == fresh
    assert on_old.verify_weights()["result"] == "equal"


def test_an_element_that_others_wrote_stops_the_commit_and_leaves_no_version(
    on_old, new, fresh, weights, tmp_path
):
    """Nobody knows what else was written, so no rollback may claim a digest."""
    on_old.update_weights_from_disk(str(new), "new")
    save_file(stepped(weights, 1), tmp_path / "model.safetensors")
    flip, param = StagingWorker.flip, live_of(on_old)["model.norm.weight"]

    def written_before(self: StagingWorker, *args: Any) -> float:
        param.data[3] += 1
        settle()
        return flip(self, *args)

    update_id = stage(on_old, tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StagingWorker, "flip", written_before)
        with pytest.raises(EngineFault, match="other bits than were staged"):
            on_old.finish_weight_update("again", update_id=update_id)
    on_old.abort_weight_update(update_id=update_id)
    told = on_old.weight_info()
    assert told["digest"] is None and told["previous"] is None
    with pytest.raises(NothingToRollBack):
        on_old.rollback_weights()
    on_old.update_weights_from_disk(str(new), "new")
    assert greedy(on_old) == fresh
    assert on_old.verify_weights()["result"] == "equal"


def test_a_delta_whose_proof_fails_keeps_the_way_back(on_old, weights, tmp_path):
    before = tokens(on_old)
    with Publisher(on_old, weights) as to:
        to.publish("whole")
        step(weights, 1)
        assert to.publish("delta").is_delta
    after = tokens(on_old)
    damaged = Sent(on_old, weights, tmp_path)
    damaged.manifest["tensors"][1]["digest"] = 32 * "0"
    with pytest.raises(WeightsMismatch, match="other weights than are served"):
        damaged.send(damaged.pairs())
    for expected_tokens in (before, after):
        on_old.rollback_weights()
        assert tokens(on_old) == expected_tokens
    assert on_old.verify_weights()["result"] == "equal"


def test_a_version_without_one_tensor_is_rejected_and_changes_nothing(
    on_old, weights, tmp_path
):
    before = tokens(on_old)
    new = stepped(weights, 5, share=0.5)
    del new["model.layers.0.mlp.up_proj.weight"]
    save_file(new, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match="up_proj"):
        on_old.update_weights_from_disk(str(tmp_path))
    assert tokens(on_old) == before


def test_a_tensor_that_comes_twice_is_rejected_and_changes_nothing(
    on_old, new, fresh, weights, tmp_path
):
    """A place that the log has twice would not come back at a rollback."""
    before, name = tokens(on_old), "model.norm.weight"
    for twice in (weights[name] + 1, weights[name] + 2):
        save_file(stepped(weights, 1), tmp_path / "whole.safetensors")
        save_file({name: twice}, tmp_path / "again.safetensors")
        update_id = on_old.start_weight_update()["update_id"]
        with pytest.raises(WeightsMismatch, match=f"{name}.*sent twice"):
            for file in ("whole", "again"):
                path = {"path": str(tmp_path / f"{file}.safetensors")}
                on_old.update_weights(path, update_id=update_id)
            on_old.finish_weight_update(update_id=update_id)
        assert tokens(on_old) == before
    on_old.update_weights_from_disk(str(new), "new")
    assert greedy(on_old) == fresh
    on_old.rollback_weights()
    assert tokens(on_old) == before


def test_nan_is_rejected_and_changes_nothing(on_old, weights, tmp_path):
    before = tokens(on_old)
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match="NaN"):
        on_old.update_weights_from_disk(str(tmp_path))
    assert tokens(on_old) == before


def stage(llm: Any, folder: Path) -> str:
    """Bring a version to the vote, and no further."""
    update_id: str = llm.start_weight_update()["update_id"]
    llm.update_weights({"path": str(folder)}, update_id=update_id)
    return update_id


def settle() -> None:
    """Wait for what was written past everything that has an order of its own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def test_a_parameter_that_others_wrote_beside_the_log_stops_the_commit(
    on_old, weights, tmp_path
):
    """The swap would not touch it, and the version would have a false digest."""
    new = dict(weights)
    new["model.layers.0.mlp.down_proj.weight"] = weights[
        "model.layers.0.mlp.down_proj.weight"
    ].clone()
    new["model.layers.0.mlp.down_proj.weight"].view(-1)[:5] += 1
    save_file(new, tmp_path / "model.safetensors")
    update_id = stage(on_old, tmp_path)
    param = live_of(on_old)["model.norm.weight"]
    before = param.data.clone()
    param.data.mul_(-3)
    settle()
    with pytest.raises(UpdateBusy, match="has written into the live weights"):
        on_old.finish_weight_update("new", update_id=update_id)
    on_old.abort_weight_update(update_id=update_id)
    param.data.copy_(before)
    settle()


def moved(llm: Any) -> None:
    """A parameter gets other memory, with the same bits in it."""
    param = live_of(llm)["model.layers.0.mlp.down_proj.weight"]
    param.data = param.data.clone()


def test_a_parameter_that_moved_while_an_update_is_staged_stops_the_commit(
    on_old, new, fresh
):
    first = greedy(on_old)
    update_id = stage(on_old, new)
    moved(on_old)
    with pytest.raises(UpdateBusy, match="has written into the live weights"):
        on_old.finish_weight_update("new", update_id=update_id)
    on_old.abort_weight_update(update_id=update_id)
    assert greedy(on_old) == first
    assert on_old.weight_info()["digest"] is None
    on_old.update_weights_from_disk(str(new), "new")
    assert greedy(on_old) == fresh
    on_old.rollback_weights()
    assert greedy(on_old) == first


def test_a_parameter_that_moved_between_updates_is_found_where_it_lies(
    on_old, old, new, fresh, weights, tmp_path
):
    first = greedy(on_old)
    on_old.update_weights_from_disk(str(new), "new")
    moved(on_old)
    with pytest.raises(NothingToRollBack):  # its swap would write into other memory
        on_old.rollback_weights()
    assert on_old.weight_info()["digest"] is None
    assert greedy(on_old) == fresh
    on_old.update_weights_from_disk(str(old), "old")
    assert greedy(on_old) == first
    with Publisher(on_old, weights) as to:
        to.publish("base")
        moved(on_old)
        step(weights, 1)
        assert not to.publish("whole").is_delta
        between = tokens(on_old)
        step(weights, 2)
        assert to.publish("delta").is_delta
        to.rollback()
        assert tokens(on_old) == between
        to.rollback()
    assert tokens_after_whole(on_old, weights, tmp_path) == tokens(on_old)
    assert on_old.verify_weights()["result"] == "equal"


def add_one(worker: Any) -> None:
    worker.model_runner.get_model().model.norm.weight.data[3:9].add_(1)


def test_a_call_of_the_workers_that_writes_ends_the_update_and_the_next_one_is_whole(
    on_old, new, fresh
):
    update_id = stage(on_old, new)
    on_old.collective_rpc(add_one)
    with pytest.raises(InflightError, match="written"):
        on_old.finish_weight_update("new", update_id=update_id)
    assert on_old.weight_info()["digest"] is None
    on_old.update_weights_from_disk(str(new), "new")
    assert greedy(on_old) == fresh
    assert on_old.verify_weights()["result"] == "equal"


def fail_as_it_writes(worker: Any) -> None:
    for param in list(worker.model_runner.get_model().parameters())[::2]:
        param.data.fill_(7.0)
    raise RuntimeError("it broke off")


def test_weights_that_a_failed_call_has_lost_are_filled_by_the_next_version(
    on_old, new, fresh, tmp_path
):
    with pytest.raises(RuntimeError, match="it broke off"):
        on_old.collective_rpc(fail_as_it_writes)
    assert on_old.weight_info()["weights"] == "gone"
    bits = load_file(new / "model.safetensors")
    bits["model.norm.weight"][3] = torch.nan
    save_file(bits, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match="NaN"):
        on_old.update_weights_from_disk(str(tmp_path))
    assert on_old.weight_info()["weights"] == "gone"
    on_old.update_weights_from_disk(str(new), "new")
    assert greedy(on_old) == fresh
    assert on_old.verify_weights()["result"] == "equal"


def test_a_log_that_is_too_small_rejects_the_update_with_the_numbers(
    start, old, new, weights, tmp_path
):
    llm = delta_engine(start, old, inflight={"staging": "delta"})
    before = tokens(llm)
    with pytest.raises(ChangeLogFull, match=r"--inflight-delta-gib 0\.00") as full:
        llm.update_weights_from_disk(str(new))
    assert full.value.missing_bytes > 0
    assert tokens(llm) == before
    with Publisher(llm, weights) as to:
        to.publish("same bytes")  # of the start weights: nothing enters the log
        step(weights, 1, share=0.005)
        assert to.publish("small").is_delta
        step(weights, 2, share=0.2)
        with pytest.raises(ChangeLogFull):
            to.publish("large")
        assert llm.get_weight_version() == "small"
    weights = load_file(old / "model.safetensors")
    step(weights, 1, share=0.005)
    assert tokens_after_whole(llm, weights, tmp_path) == tokens(llm)


OVERFLOWING = {"staging": "delta", "delta_gib": 0.0001, "delta_host_gib": 0.01}
"""A log that goes on in host memory at nearly every update of the tiny model."""


def test_an_update_larger_than_the_log_goes_on_in_host_memory(
    start, old, new, fresh, weights, tmp_path
):
    llm = delta_engine(start, old, inflight=OVERFLOWING)
    updates_go_on_in_host_memory(llm, old, new, fresh, weights, tmp_path)


def updates_go_on_in_host_memory(llm, old, new, fresh, weights, tmp_path) -> None:
    """Whole versions, rollbacks and deltas of an engine with a small log."""
    log, first = shadow_of(llm).log, greedy(llm)
    assert log.host_bytes == 0
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert 0 < log.capacity < log.num_bytes <= log.capacity + log.host_bytes
        assert greedy(llm) == fresh
        llm.rollback_weights()
        assert greedy(llm) == first
        llm.rollback_weights()
        llm.update_weights_from_disk(str(old), "old")
        assert greedy(llm) == first
    update_id = stage(llm, new)
    llm.prepare_weight_update(update_id=update_id)
    assert "rollback_target" not in llm.abort_weight_update(update_id=update_id)
    for expected_tokens in (fresh, first):
        llm.rollback_weights()
        assert greedy(llm) == expected_tokens
    with Publisher(llm, weights) as to:
        to.publish("same bytes")
        assert log.num_bytes == 0
        step(weights, 1, share=0.06)
        assert to.publish("a delta").is_delta
        assert log.num_bytes > log.capacity
        to.rollback()
        assert greedy(llm) == first
        to.rollback()
    assert tokens_after_whole(llm, weights, tmp_path) == tokens(llm)
    assert llm.verify_weights()["result"] == "equal"


FOR_ONE = {"staging": "delta", "delta_gib": 0.0002, "delta_host_gib": 0.01}
"""A log with room beside the weights for one of `versions_for_one`, and not for two."""


def versions_for_one(weights, num: int) -> Iterator[dict[str, torch.Tensor]]:
    """Versions, each a step away from the one before."""
    for seed in range(1, num + 1):
        weights = stepped(weights, seed, share=0.06)
        yield weights


def are_beside(llm: Any, memory: Any) -> set[bool]:
    """Whether tensors lie in the log's memory beside the weights."""
    return {shadow_of(llm).log._memory.has(tensor) for tensor in memory}


def way_back_of(llm: Any) -> Any:
    """The memory from which a rollback takes what it swaps."""
    return worker_of(llm).vllm_inflight.stager.versions.before.flip._held


def said_of(llm: Any) -> tuple[str, list[int]]:
    return llm.weight_info()["digest"], tokens(llm)


def goes_back_and_forth(llm: Any, before: Any, now: Any) -> None:
    for expected_now in (before, now):
        llm.rollback_weights()
        assert said_of(llm) == expected_now


def test_where_both_logs_find_no_room_the_way_back_moves_into_host_memory(
    start, old, weights, tmp_path
):
    llm = delta_engine(start, old, inflight=FOR_ONE)
    the_way_back_moves(llm, weights, tmp_path)


def the_way_back_moves(llm, weights, tmp_path) -> None:
    """Updates, deltas and whole ones, that have no room beside the one before."""
    log = shadow_of(llm).log
    files: list[Path] = []
    for number, version in enumerate(versions_for_one(weights, 4)):
        files.append(tmp_path / str(number) / "model.safetensors")
        files[-1].parent.mkdir()
        save_file(version, files[-1])
    seen = [said_of(llm)]
    for file in files[:3]:
        llm.update_weights_from_disk(str(file), file.parent.name)
        assert log.capacity / 2 < log.num_bytes <= log.capacity
        assert are_beside(llm, log.entries.memory) == {True}
        seen.append(said_of(llm))
        assert are_beside(llm, way_back_of(llm)) == {True}
        goes_back_and_forth(llm, *seen[-2:])
    assert len({digest for digest, _ in seen[1:]}) == 3
    for ended in (aborted, taken_back):
        update_id = stage(llm, files[3].parent)
        ended(llm, update_id)
        assert "rollback_target" not in llm.abort_weight_update(update_id=update_id)
        assert are_beside(llm, log.entries.memory) == {True}
        assert are_beside(llm, way_back_of(llm)) == {True, False}
        goes_back_and_forth(llm, *seen[-2:])
    assert log.host_bytes <= log.host_capacity
    bits = load_file(files[2])
    with Publisher(llm, bits) as to:
        to.publish("same bytes")
        before = said_of(llm)
        for number, version in enumerate(versions_for_one(bits, 3)):
            for name, tensor in version.items():
                bits[name].copy_(tensor)
            assert to.publish(f"delta {number}").is_delta
            assert are_beside(llm, log.entries.memory) == {True}
            now = said_of(llm)
            goes_back_and_forth(llm, before, now)
            before = now
    assert tokens_after_whole(llm, bits, tmp_path) == now[1]
    assert llm.verify_weights()["result"] == "equal"


@pytest.mark.parametrize(
    ("owner", "point"),
    [(StagingThread, "_between_moves"), (StagingWorker, "move_way_back")],
    ids=["while it is copied", "when all of it is copied"],
)
def test_a_rollback_after_an_abort_in_the_middle_of_a_move_meets_the_way_back(
    start, old, weights, tmp_path, monkeypatch, owner, point
):
    """What was copied is not what the log holds any more, and is never swapped in."""
    llm = delta_engine(start, old, inflight=FOR_ONE)
    first, seen = said_of(llm), []
    for number, version in enumerate(versions_for_one(weights, 2)):
        (tmp_path / str(number)).mkdir()
        save_file(version, tmp_path / str(number) / "model.safetensors")
    llm.update_weights_from_disk(str(tmp_path / "0"), "one")
    now = said_of(llm)
    reached, goes_on = threading.Event(), threading.Event()
    original = getattr(owner, point)

    def stopped(self: Any, *args: Any) -> Any:
        seen.append(threading.current_thread())
        reached.set()
        assert goes_on.wait(60)
        return original(self, *args)

    update_id = llm.start_weight_update()["update_id"]
    with monkeypatch.context() as patched:
        patched.setattr(owner, point, stopped)
        request = {"path": str(tmp_path / "1")}
        sender = threading.Thread(
            target=update_in_vain, args=(llm, request, update_id), daemon=True
        )
        sender.start()
        assert reached.wait(60)
        with pytest.raises(InflightError):  # an update is under way
            llm.rollback_weights()
        llm.abort_weight_update(update_id=update_id)
        llm.rollback_weights()
        assert said_of(llm) == first
        goes_on.set()
        seen[0].join(60)
        sender.join(60)
    assert len(seen) == 1 and not seen[0].is_alive()
    assert are_beside(llm, way_back_of(llm)) == {True}
    goes_back_and_forth(llm, now, first)
    llm.rollback_weights()
    llm.update_weights_from_disk(str(tmp_path / "1"), "two")
    last = said_of(llm)
    goes_back_and_forth(llm, now, last)
    assert llm.verify_weights()["result"] == "equal"


def update_in_vain(llm: Any, request: dict[str, str], update_id: str) -> None:
    with pytest.raises(InflightError):
        llm.update_weights(request, update_id=update_id)


def test_the_way_back_is_lost_where_both_logs_find_no_room_and_the_reply_says_so(
    start, old, new, fresh
):
    where_both_find_no_room(start, old, new, fresh)


def where_both_find_no_room(start, old, new, fresh, **options) -> None:
    """Updates that are aborted after they have taken the room of the way back."""
    tight = OVERFLOWING | {"delta_host_gib": 0.003}
    llm = delta_engine(start, old, inflight=tight, **options)
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert llm.weight_info()["previous"] is not None
        update_id = stage(llm, old)
        told = llm.abort_weight_update(update_id=update_id)
        assert told["rollback_target"] == "lost"
        status = llm.weight_update_status(update_id)
        assert status["rollback_target"] == "lost"
        assert llm.weight_info()["previous"] is None
        with pytest.raises(NothingToRollBack):
            llm.rollback_weights()
        assert greedy(llm) == fresh
        llm.update_weights_from_disk(str(old), "old")
    assert llm.verify_weights()["result"] == "equal"


def test_an_engine_that_started_without_a_checkpoint_learns_at_its_first_update(
    start, old, new, fresh, tmp_path
):
    for file in old.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    llm = delta_engine(start, tmp_path, load_format="dummy")
    assert len(shadow_of(llm).plan) == 0
    for folder in (new, old, new):
        llm.update_weights_from_disk(str(folder))
    assert shadow_of(llm).plan.num_proved == len(shadow_of(llm).plan) > 0
    assert greedy(llm) == fresh
    assert llm.verify_weights()["result"] == "equal"


def test_an_adapter_stays_loaded_over_an_update(start, old, new, tmp_path):
    adapter = make_adapter(old, tmp_path)
    expected = said(start(new, **ADAPTERS), adapter)
    llm = delta_engine(start, old, **ADAPTERS)
    before = said(llm, adapter)
    llm.update_weights_from_disk(str(new), "new")
    assert said(llm, adapter) == expected
    llm.rollback_weights()
    assert said(llm, adapter) == before


def test_deltas_reach_the_layers_of_adapters(start, old, weights, tmp_path):
    llm = delta_engine(start, old, **ADAPTERS)
    adapter, told = make_adapter(old, tmp_path), []
    served = ADAPTERS["dtype"]
    with Publisher(llm, weights, dtype=getattr(torch, served)) as to:
        to.publish()
        for seed in range(2):
            step(weights, seed)
            assert to.publish().is_delta
            told.append(said(llm, adapter))
        assert told[0][0] != told[0][1] != told[1][1]
        to.rollback()
        assert said(llm, adapter) == told[0]
    with Publisher(llm, weights, dtype=getattr(torch, served), delta="off") as to:
        to.publish()
    assert said(llm, adapter) == told[1]


def test_a_tied_head_changes_with_its_embedding(start, checkpoint, tmp_path):
    versions = [checkpoint(seed, tied=True) for seed in range(2)]
    fresh = greedy(start(versions[1]))
    llm = delta_engine(start, versions[0])
    llm.update_weights_from_disk(str(versions[1]), "new")
    assert greedy(llm) == fresh


@pytest.mark.parametrize(
    ("parallel", "family"),
    [
        ("tensor", None),
        ("pipeline", None),
        # Two of them hold each of its KV heads.
        pytest.param("four", None, marks=pytest.mark.slow),
        ("expert", "qwen3_moe"),
        pytest.param("expert", "mixtral", marks=pytest.mark.slow),
        pytest.param("expert", "deepseek_v3", marks=pytest.mark.slow),
        pytest.param("tensor", "deepseek_v2", marks=pytest.mark.slow),
        pytest.param("tensor", "mixtral", marks=pytest.mark.slow),
        pytest.param("pipeline", "mixtral", marks=pytest.mark.slow),
        pytest.param("tensor", "falcon_h1", marks=pytest.mark.slow),
        pytest.param("pipeline", "falcon_h1", marks=pytest.mark.slow),
    ],
)
def test_ranks_serve_what_deltas_and_whole_versions_lead_to(
    old, checkpoint, parallel, family
):
    if family is not None and not CAN_UNPACK_EXPERTS:
        pytest.skip("experts are packed")
    num_ranks = 4 if parallel == "four" else 2
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join("0101"[:num_ranks])}
    folder = old if family is None else checkpoint(0, family=family)
    options = json.dumps(cpu_options(family) if family else {})
    seen = run_script("delta_ranks", folder, parallel, "delta", options, env=bind)
    wholes = seen["wholes"]
    # Both ranks have all of Mamba's groups, and a half of its heads each.
    is_delta = (parallel, family) != ("tensor", "falcon_h1")
    assert seen["deltas"] == [[is_delta, *whole] for whole in wholes[:-1]]
    assert seen["rolled back"] == wholes[-3]
    # Those of versions that followed each other both times.
    assert all(seen["drifts"][1:])
    assert seen["drifts"][1:] == seen["drifts of wholes"][1:-1]
    assert seen["after that"] == [is_delta, *wholes[-1]]
    assert seen["scrubbed"] == "equal"
    assert "swap of this rank alone" in seen["refusal"]
    # On both ranks, although the other one had flipped.
    assert seen["back after it"] == [seen["deltas"][-1][1:], wholes[-1]]
    assert (seen["lost"], seen["filled"]) == ("gone", wholes[-1])
    reasons = REASONS.get(parallel, []) if is_delta else []
    _refused_deltas_that_reach_ranks_altered(seen["altered"], reasons)
    recovered_from_other_bits(seen["other bits"], is_delta=is_delta)
    assert parallel != "expert" or seen["fresh"] == wholes[-1][1]


REASONS = {
    "tensor": [
        "cut over the ranks are not the announced ones",
        "model.norm.weight: with these changes.*told by rank 1 of 2",
    ],
    "four": ["ranks 0, 1 hold the same parts"],
}


def _refused_deltas_that_reach_ranks_altered(
    altered: list[Any], reasons: list[str]
) -> None:
    """They change nothing on any rank, and work when they come as they should."""
    for each, reason in zip(altered, reasons, strict=True):
        code, message = each["refusal"]
        assert code == "weights_mismatch" and re.search(reason, message), message
        assert each["before"] == each["after"] == each["back"] != each["then"]


def recovered_from_other_bits(seen: dict[str, Any], *, is_delta: bool = True) -> None:
    """No rank has what the swap of one of them could not prove."""
    code, message = seen["refusal"]
    assert code == "engine_fault"
    assert "the flip failed on rank 1" in message and "other bits" in message
    assert seen["after"] == seen["before"] and seen["digest"] is None
    assert seen["are deltas"] == [False, is_delta, is_delta]
    assert seen["deltas"] == seen["whole"] != seen["before"]


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that two sets of weights do not fit."""
    home = Placement(None, "two sets do not fit", is_short=True)
    monkeypatch.setattr(shadow_model, "placement_of", lambda tree: home)


def test_auto_takes_a_log_where_two_sets_do_not_fit(
    start, old, new, fresh, short_of_memory
):
    llm = delta_engine(start, old, inflight={"staging": "auto", "delta_gib": 0.01})
    assert shadow_of(llm).log is not None
    first = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == first
    with pytest.raises(RuntimeError, match="it broke off"):
        llm.collective_rpc(fail_as_it_writes)
    llm.update_weights_from_disk(str(new), "new")  # it fills lost weights in place
    assert greedy(llm) == fresh


def test_the_first_update_proves_the_places_that_the_start_had_no_time_for(
    start, old, new, fresh, monkeypatch
):
    monkeypatch.setattr(destination_table, "MOST_PROOF_S", 0)
    llm = delta_engine(start, old)
    plan = shadow_of(llm).plan
    assert plan.num_proved == 0
    assert llm.weight_info()["staging"]["unproved"] == len(plan) > 0
    first = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    assert plan.num_proved == len(plan)
    assert llm.weight_info()["staging"]["unproved"] == 0
    llm.rollback_weights()
    assert greedy(llm) == first


def test_auto_is_as_it_was_where_one_set_is_not_possible(
    start, old, new, fresh, short_of_memory, monkeypatch
):
    monkeypatch.setattr(shadow_model, "one_set_obstacle", lambda *_: "it has experts")
    llm = delta_engine(start, old, inflight={"staging": "auto"})
    assert shadow_of(llm).log is None
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


def test_auto_serves_without_updates_where_the_loader_computes(
    start, old, new, short_of_memory, monkeypatch
):
    table = "vllm.inflight.worker.staging.destination_table.fill_table"
    monkeypatch.setattr(table, lambda shadow: "its loader does not only copy")
    llm = delta_engine(start, old, inflight={"staging": "auto"})
    assert shadow_of(llm).log is None
    with pytest.raises(StagingUnavailable, match="does not only copy"):
        llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU packs nothing")
def test_an_engine_that_packs_its_matrices_does_not_start(start, old, monkeypatch):
    monkeypatch.setattr(custom_ops, "_supports_onednn", True)
    with pytest.raises(ConfigError, match="is packed for the GEMM of the CPU build"):
        # In bf16 oneDNN packs nothing on a CPU with AVX2 alone.
        start(
            old, dtype="float32", additional_config={"inflight": {"staging": "delta"}}
        )
