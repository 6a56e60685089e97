"""Parallelism that updates were not tested with is rejected by name."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig

from vllm.inflight.worker.model import parallelism

UNTRIED = {
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "enable_dbo",
    "ubatch_size",
    "enable_hc_sp",
    "enable_batch_sharded_sampling",
    "enable_eplb",
    "expert_placement_strategy",
    "all2all_backend",
    "enable_elastic_ep",
    "enable_fault_tolerance",
}
"""Fields that divide weights or steps, and that no test has."""


def configured(**fields: Any) -> Any:
    """As vLLM configures an engine, with these fields instead of its own."""
    default = ParallelConfig()
    own = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    assert own.keys() >= fields.keys()
    return SimpleNamespace(**own | fields)


def test_every_parallelism_field_of_vllm_is_tested_harmless_or_rejected():
    """A field of a new release stands in no list: it is refused, and noticed here."""
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    assert parallelism.TESTED.isdisjoint(parallelism.INDIFFERENT)
    assert fields - parallelism.TESTED - parallelism.INDIFFERENT == UNTRIED


def test_an_engine_of_one_rank_and_engines_of_several_are_updated():
    assert parallelism.parallelism_obstacle(ParallelConfig()) is None
    shared = {"data_parallel_size": 2, "enable_expert_parallel": True}
    for fields in (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "world_size": 4},
        shared,
        {"nnodes": 2, "numa_bind": True, "disable_custom_all_reduce": True},
        # vLLM fills these in by itself.
        {"is_moe_model": False, "enable_batch_sharded_sampling": False},
        {"dcp_comm_backend": "ag_rs", "dcp_q_replicate": False},
    ):
        assert parallelism.parallelism_obstacle(configured(**fields)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_context_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"enable_dbo": True},
        {"ubatch_size": 4},
        {"enable_batch_sharded_sampling": True},
        {"enable_elastic_ep": True},
        {"enable_fault_tolerance": True},
        {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
        {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"},
    ],
)
def test_parallelism_that_was_not_tested_is_rejected_by_name(fields):
    reason = parallelism.parallelism_obstacle(configured(**fields))
    name, value = list(fields.items())[-1]
    assert reason is not None
    assert reason.endswith(f"configuration: {name}={value!r}")


def test_options_for_sharing_out_experts_do_not_block_models_without_experts():
    fields = {"expert_placement_strategy": "round_robin", "all2all_backend": "nixl_ep"}
    assert parallelism.parallelism_obstacle(configured(**fields)) is None


def test_expert_load_balancing_is_rejected_by_its_flag():
    reason = parallelism.parallelism_obstacle(configured(enable_eplb=True))
    assert reason == "expert load balancing is enabled (--enable-eplb)"
