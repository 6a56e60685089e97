"""Delta staging on a GPU, under CUDA graphs: one set of weights, swapped where it lies.

The tests of tests/e2e/test_delta_staging.py, in an engine that replays graphs; and that
no step is torn, and what the log takes of the memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_delta_staging import (  # noqa: F401 (tests, run here on a GPU)
    FOR_ONE,
    OVERFLOWING,
    delta_engine,
    on_old,
    sent,
    shadow_of,
    test_a_call_of_the_workers_that_writes_ends_the_update_and_the_next_one_is_whole,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_delta_from_another_version_is_rejected_at_once,
    test_a_delta_is_committed_while_requests_run,
    test_a_delta_of_tensors_that_are_converted_names_both_dtypes,
    test_a_delta_that_does_not_fit_what_is_served_is_followed_by_the_whole,
    test_a_delta_whose_proof_fails_keeps_the_way_back,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_end_changes_nothing,
    test_a_lost_part_changes_nothing,
    test_a_rollback_after_an_abort_in_the_middle_of_a_move_meets_the_way_back,
    test_a_scrub_after_deltas_names_the_tensor_with_a_changed_bit,
    test_a_subset_leaves_the_rest_as_it_is_served,
    test_a_tensor_that_comes_twice_is_rejected_and_changes_nothing,
    test_a_trainer_in_float32_sends_what_changes_of_what_is_served,
    test_a_version_without_a_change_is_a_version,
    test_a_version_without_one_tensor_is_rejected_and_changes_nothing,
    test_after_another_trainers_version_the_whole_one_is_sent,
    test_an_aborted_update_changes_nothing,
    test_an_element_that_others_wrote_stops_the_commit_and_leaves_no_version,
    test_an_update_that_ends_before_it_is_staged_keeps_the_way_back,
    test_an_update_that_is_staged_and_not_committed_keeps_the_way_back,
    test_nan_is_rejected_and_changes_nothing,
    test_one_tensor_of_a_fused_parameter_may_change_alone,
    test_only_what_differs_from_the_live_weights_enters_the_log,
    test_parts_that_come_together_lead_to_the_same_version,
    test_small_deltas_keep_the_namespace_of_kv_and_a_large_one_begins_another,
    test_tensors_in_float32_are_served_as_a_fresh_engine_casts_them,
    test_there_is_one_set_of_weights_and_it_stays_where_it_is,
    test_weights_that_a_failed_call_has_lost_are_filled_by_the_next_version,
    test_when_most_has_changed_the_whole_version_is_sent,
    test_whole_versions_and_rollbacks_equal_a_fresh_engine,
    the_way_back_moves,
    tokens,
    updates_go_on_in_host_memory,
    weights,
    where_both_find_no_room,
    worker_of,
)
from tests.e2e.test_delta_staging_families import (
    test_a_family_equals_a_fresh_engine as of_family,
)
from tests.e2e.test_tearing import mismatches, stream_under_commits
from tests.gpu.test_tearing import NOISE
from tests.support.engines.probe import greedy, spread
from tests.support.engines.reference import Reference
from tests.support.gpu.exact import exact_products  # noqa: F401 (a fixture)
from vllm.inflight.errors import ChangeLogFull
from vllm.inflight.trainer import Publisher
from vllm.inflight.worker.delta import dense
from vllm.inflight.worker.memory import placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Inductor would have float32 be less than that.
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]


FAMILIES = (
    *("llama", "gemma3", "gpt2", "phi3", "mixtral", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "falcon_h1", "llama4"),
)
"""Three have latent attention. The loaders of the last two compute."""


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[list[int]]:
    """What an engine started on the new weights says, under graphs."""
    return greedy(start(new, enforce_eager=False))


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: list[list[int]], old: Path) -> Any:
    return delta_engine(start, old, enforce_eager=False)


def test_the_memory_beside_the_live_weights_is_the_log(llm) -> None:
    shadow, worker = shadow_of(llm), worker_of(llm)
    assert shadow.arenas == ()
    assert shadow.copied_bytes == shadow.log.allocated_bytes > shadow.log.capacity
    # vLLM's budget for the KV cache counts it, and the buckets of a transport.
    buckets = worker.vllm_inflight.stager.bucket_bytes
    live = sum(p.nbytes for p in worker.model_runner.get_model().parameters())
    counted = live + shadow.copied_bytes + buckets
    assert worker.model_runner.model_memory_usage >= counted
    assert buckets == 96 << 20  # two of 48 MiB, the least


def test_every_tensor_is_logged_by_the_kernel_and_none_by_its_loader(llm) -> None:
    plan = shadow_of(llm).plan
    assert plan.num_proved == len(plan) > 0
    assert not plan.is_replayed


def test_whole_tensors_are_compared_by_kernels_and_not_by_torch(
    llm, old, new, fresh, monkeypatch
) -> None:
    compared: list[int] = []

    def count(log: Any, known: dense.KnownTable) -> None:
        compared.append(len(known.params))
        compare(log, known)

    compare = dense.compare_on_device
    llm.update_weights_from_disk(str(old), "old")
    monkeypatch.setattr(dense, "compare_on_device", count)
    monkeypatch.setattr(dense, "log_differences", None)  # of torch
    llm.update_weights_from_disk(str(new), "new")
    assert sum(compared) >= len(shadow_of(llm).plan)
    assert greedy(llm) == fresh


def test_auto_takes_a_log_where_two_sets_leave_no_room(
    start: Callable[..., Any], old: Path, new: Path, fresh: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(placement, "_lack_of_room", lambda *_: "there is no room")
    options = {"enforce_eager": False, "inflight": {"delta_gib": 0.01}}
    llm = delta_engine(start, old, **options)
    shadow = shadow_of(llm)
    assert shadow.log is not None and shadow.arenas == ()
    first = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == first


def test_an_update_larger_than_the_log_goes_on_in_host_memory(
    start,
    old,
    new,
    fresh,
    weights,  # noqa: F811 (the fixture)
    tmp_path,
) -> None:
    llm = delta_engine(start, old, inflight=OVERFLOWING, enforce_eager=False)
    updates_go_on_in_host_memory(llm, old, new, fresh, weights, tmp_path)


def test_where_both_logs_find_no_room_the_way_back_moves_into_page_locked_memory(
    start,
    old,
    weights,  # noqa: F811 (the fixture)
    tmp_path,
) -> None:
    llm = delta_engine(start, old, inflight=FOR_ONE, enforce_eager=False)
    the_way_back_moves(llm, weights, tmp_path)
    blocks = shadow_of(llm).log._blocks
    assert blocks and all(block.memory.is_pinned() for block in blocks)


def test_the_way_back_is_lost_where_both_logs_find_no_room_and_the_reply_says_so(
    start, old, new, fresh
) -> None:
    where_both_find_no_room(start, old, new, fresh, enforce_eager=False)


def test_a_small_log_takes_small_changes_alone(start, old, new) -> None:
    llm = delta_engine(start, old, inflight={"staging": "delta"}, enforce_eager=False)
    before = tokens(llm)
    with pytest.raises(ChangeLogFull):
        llm.update_weights_from_disk(str(new))
    assert tokens(llm) == before
    bits = load_file(old / "model.safetensors")
    with Publisher(llm, bits) as to:
        to.publish("same bytes")
        flat = bits["model.layers.0.self_attn.o_proj.weight"].view(-1)
        flat[11:900:7] *= 1.5
        assert to.publish("small").is_delta
        digest = llm.weight_info()["digest"]
        flat[:] += 1
        for tensor in bits.values():
            tensor *= 1.25
        with pytest.raises(ChangeLogFull):
            to.publish("large")
    assert llm.weight_info()["digest"] == digest
    assert llm.verify_weights()["result"] == "equal"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_a_fresh_engine_or_is_refused(
    start, checkpoint, family
) -> None:
    of_family(start, checkpoint, family)


@pytest.mark.usefixtures("exact_products")
def test_every_step_of_300_commits_under_load_is_of_one_version(
    start: Callable[..., Any], versions: dict[str, Path], reference: Reference
) -> None:
    llm = delta_engine(
        start,
        versions["a"],
        dtype="float32",
        enforce_eager=False,
        inflight={"staging": "delta", "delta_gib": 0.05},
    )
    outputs = stream_under_commits(llm, versions, 300)
    assert llm.weight_info()["epoch"] >= 300
    assert sum(len(o.outputs[0].weight_versions) > 1 for o in outputs) > 10
    # The reference runs on the CPU, and is what takes the time.
    assert mismatches(spread(outputs, 32), reference, "a", NOISE) == []
