"""A simulated worker that carries blocks to a tier of host memory and back.

The scheduler's half of upstream's `OffloadingConnector` is the real one; so is what it
orders, and what it is told when that is done.
"""

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.support.simulated.worker import BLOCK, SimulatedExecutor


class Tiered(SimulatedExecutor):
    """With blocks on the host as well."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.tier: dict[int, list[Any]] = {}
        self.num_loaded = 0

    def _forward(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        orders = scheduled.kv_connector_metadata
        slots = self.memories[0].slots
        for job in orders.load_jobs.values():
            for host, block in _pairs(job.src_spec, job.dst_spec):
                for offset, slot in enumerate(self.tier[host]):
                    slots[block, offset] = slot
                self.num_loaded += 1
        result = super()._forward(scheduled)
        for job in orders.store_jobs.values():
            for block, host in _pairs(job.src_spec, job.dst_spec):
                self.tier[host] = [slots[block, n] for n in range(BLOCK)]
        jobs = [*orders.load_jobs, *orders.store_jobs]
        result.kv_connector_output = KVConnectorOutput(
            finished_recving={job.req_id for job in orders.load_jobs.values()},
            kv_connector_worker_meta=OffloadingWorkerMetadata(dict.fromkeys(jobs, 1)),
        )
        return result


def offloading() -> KVTransferConfig:
    """Upstream's connector to a tier of host memory."""
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 22},
    )


def _pairs(source: Any, target: Any) -> list[tuple[int, int]]:
    ids = source.block_ids.tolist(), target.block_ids.tolist()
    return list(zip(*ids, strict=True))
