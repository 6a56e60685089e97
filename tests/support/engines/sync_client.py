"""What upstream's trainers call of an engine, on an `LLM` of the same process."""

from typing import Any

from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.support.transports.peers import HOST
from vllm.inflight.transport.collective.trainer_engine import GlooTrainerInitInfo


class Client:
    """The four calls of upstream's trainers."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._llm.finish_weight_update()


def gloo_trainer(
    llm: Any, source: WeightSource, num_ranks: int = 1, bucket_bytes: int = 1 << 16
) -> Any:
    """Upstream's trainer of the backend `inflight_gloo`, joined with that engine."""
    info = GlooTrainerInitInfo(
        rank=0,
        master_address=HOST,
        master_port=0,
        world_size=1 + num_ranks,
        bucket_bytes=bucket_bytes,
        timeout_s=30.0,
    )
    return WeightTransferTrainerFactory.trainer_init(
        info, client=Client(llm), source=source
    )
