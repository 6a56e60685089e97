"""Parallelism: the ways to divide weights and steps that updates have been tested with.

vLLM's `ParallelConfig` has a field for each way, and every release has new ones. So the
fields that may differ from their defaults are listed here. Any other field rules
updates out, until a test has shown that they work with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vllm.inflight import upstream

TESTED = frozenset(
    {
        *("tensor_parallel_size", "pipeline_parallel_size", "world_size", "rank"),
        *("data_parallel_size", "data_parallel_size_local", "data_parallel_index"),
        *("data_parallel_rank", "data_parallel_rank_local", "dp_sync_interval"),
        "enable_expert_parallel",
    }
)
"""Fields that divide weights or steps, and that updates have been tested with."""

INDIFFERENT = frozenset(
    {
        # Where processes are, how they find each other, and for how long they wait.
        *("data_parallel_master_ip", "data_parallel_rpc_port", "master_addr"),
        *("data_parallel_master_port", "_data_parallel_master_port_list"),
        *("master_port", "_coord_store_port", "node_rank", "nnodes"),
        *("data_parallel_external_lb", "data_parallel_hybrid_lb"),
        *("_api_process_count", "_api_process_rank"),
        *("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
        # Which class or library starts them, and on what. An executor has rules of its
        # own (engine/executors.py).
        *("distributed_executor_backend", "data_parallel_backend", "worker_cls"),
        *("worker_extension_cls", "placement_group", "ray_runtime_env"),
        *("ray_workers_use_nsight", "assigned_physical_gpu_ids"),
        *("numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
        # How a checkpoint is read at the start; how ranks exchange activations.
        *("max_parallel_loading_workers", "enable_ep_weight_filter"),
        *("disable_custom_all_reduce", "disable_nccl_for_dp_synchronization"),
        "enable_shm_tensor_arena",
        # What the model is.
        "is_moe_model",
        # Settings of parallelism that is rejected by another field.
        *("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"),
        *("dcp_comm_backend", "dcp_q_replicate"),
        "_allow_auto_resolve_cp_interleave_size",
        *("dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        *("eplb_config", "elastic_ep_max_dp_size", "fault_tolerance_config"),
    }
)
"""Fields that divide neither weights nor steps."""

OF_EXPERTS = ("expert_placement_strategy", "all2all_backend")
"""Fields without effect unless experts are shared out over the ranks."""


def parallelism_obstacle(parallel: upstream.ParallelConfig) -> str | None:
    """Why an engine with this parallelism is not updated; None if it is.

    Args:
        parallel: vLLM's `ParallelConfig`.

    """
    if parallel.enable_eplb:
        return "expert load balancing is enabled (--enable-eplb)"
    if untested := list(_untested(parallel)):
        return (
            "updates have not been tested with this parallelism of its configuration: "
            f"{', '.join(untested)}"
        )
    return None


def _untested(parallel: upstream.ParallelConfig) -> Iterator[str]:
    default = upstream.ParallelConfig()
    for field in dataclasses.fields(default):
        name = field.name
        if name in TESTED or name in INDIFFERENT:
            continue
        if name in OF_EXPERTS and not getattr(parallel, "enable_expert_parallel", True):
            continue
        usual = getattr(default, name)
        # Unset and switched off are the same.
        if (found := getattr(parallel, name, usual)) != usual and (found or usual):
            yield f"{name}={found!r}"
