"""Changes in the processes that upstream starts: each ends with its parent process.

A process watches its parent from its first line on. A start may take minutes, or hang:
a worker loads the model, compiles, and meets the other ranks. An engine core whose
front end was killed meanwhile would keep its GPU memory until the start is over.

Upstream's worker sees that its engine core is gone, but only after it has started, and
only while it waits for its next step. If the core is killed between its calls to two
ranks, one rank waits inside the step for the other for ever.
"""

from __future__ import annotations

from functools import partial

from _vllm_inflight_boot import ChildMain
from vllm.inflight.patch.records.record import Patch

_TARGETS = {
    "vllm.v1.engine.core:EngineCoreProc.run_engine_core": (
        ("args", "dp_rank", "local_dp_rank", "kwargs"),
        "an engine core whose front end was killed ends, even while it starts",
    ),
    "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main": (
        ("args", "kwargs"),
        "a worker whose engine core was killed ends, even if it waits for a rank",
    ),
    "vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator": (
        (
            "engine_count",
            "front_publish_address",
            "back_output_address",
            "back_publish_address",
            "zmq_addr_pipe",
            "min_stats_update_interval_ms",
            "enable_wave_coordination",
            "logging_config",
        ),
        "a coordinator of data-parallel engines ends with the front end",
    ),
    "vllm.v1.utils:run_api_server_worker_proc": (
        ("listen_address", "sock", "args", "client_config", "uvicorn_kwargs"),
        "an API server whose `vllm serve` was killed gives its port back",
    ),
    "vllm.entrypoints.launchers.dp_supervisor:_run_vllm_dp_server": (
        ("child_args",),
        "a server whose supervisor was killed gives its GPU and its port back",
    ),
}
"""Main function of a process → its parameters, and why it watches its parent."""

PATCHES = [
    Patch(
        target=target,
        expects=expects,
        why=why,
        remove_when="upstream's processes watch their parent from their start on",
        around=partial(ChildMain, target),
    )
    for target, (expects, why) in _TARGETS.items()
]
