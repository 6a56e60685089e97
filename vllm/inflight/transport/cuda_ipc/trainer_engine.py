"""Upstream's trainer side of `inflight_ipc`: `trainer_init`, then `send_weights`.

When this module is imported, it enters it in upstream's register of trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.inflight import upstream
from vllm.inflight.errors import InflightError
from vllm.inflight.trainer.sources.stream import gathering
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.collective.trainer_engine import join_gathering
from vllm.inflight.transport.cuda_ipc.driver import CudaMemory, SharedMemory
from vllm.inflight.transport.cuda_ipc.handles import Exports


@dataclass
class IpcTrainerInitInfo(upstream.TrainerInitInfo):
    """How much is lent at once; `rank` is this trainer process's."""

    backend: ClassVar[str] = "inflight_ipc"

    chunk_bytes: int = 4 << 30
    """Tensors are held until so many bytes of them are together, and then lent in one
    call. A source that keeps all of its tensors anyway can be lent at once."""
    bucket_bytes: int = 256 << 20
    num_buckets: int = 3
    timeout_s: float = 120.0


class IpcTrainer(upstream.TrainerWeightTransferEngine):
    """The trainer's end. Every rank takes part in gathering; rank 0 lends.

    A tensor must stay as it is while others are asked for, up to `chunk_bytes` of them:
    a source that writes into one buffer over and over needs `chunk_bytes=1`.
    """

    init_info_cls = IpcTrainerInitInfo

    def __init__(
        self,
        init_info: IpcTrainerInitInfo,
        *,
        client: Any,
        source: Any,
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._memory = memory or CudaMemory()

    @classmethod
    def trainer_init(
        cls, init_info: IpcTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Have the engines prepare.

        Raises:
            ValueError: there is no source.

        """
        if source is None:
            raise ValueError(f"{init_info.backend} needs a WeightSource")
        trainer = cls(init_info, client=client, source=source)
        if trainer.is_sender:
            client.init_weight_transfer_engine(
                {
                    "bucket_bytes": init_info.bucket_bytes,
                    "num_buckets": init_info.num_buckets,
                    "timeout_s": init_info.timeout_s,
                }
            )
        return trainer

    def send_weights(self) -> None:
        """One update, from start to finish, on every engine; raises what they raise.

        Raises:
            ValueError: a tensor is not on a GPU, or in memory that cannot be lent.

        """
        if not self.is_sender:
            join_gathering(self.source)
            return
        with gathering(self.source) as gathered:
            self._lend(gathered)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Nothing is kept between two updates."""

    def _lend(self, gathered: Iterator[Pair]) -> None:
        # The first is ready before anybody waits for it.
        lendable = map(self._lendable, self._chunks(gathered))
        ready = next(lendable, None)
        self.client.start_weight_update()
        try:
            while ready is not None:
                self.client.update_weights(ready[0])
                ready = None  # its tensors may go before the next ones come
                ready = next(lendable, None)
        except BaseException:
            # Nobody else would notice, and the next start would find it open. Clients
            # that have only upstream's four calls leave it to the update's deadline.
            with suppress(InflightError):  # what failed says more
                getattr(self.client, "abort_weight_update", lambda: None)()
            raise

    def _lendable(self, chunk: list[Pair]) -> tuple[dict[str, Any], list[Pair]]:
        """What to say of a chunk, which has to live until it has been read."""
        update_info = TensorList.of(chunk).update_info
        lent = Exports.of([tensor for _, tensor in chunk], self._memory)
        # What made them has to be over before somebody else reads them.
        self._memory.settle({tensor.device for _, tensor in chunk})
        return {**update_info, "exports": lent.plain}, chunk

    def _chunks(self, gathered: Iterator[Pair]) -> Iterator[list[Pair]]:
        chunk: list[Pair] = []
        num_bytes = 0
        for name, tensor in gathered:
            if tensor.device.type != self._memory.device_type:
                raise ValueError(
                    f"{name!r} is on {tensor.device}; inflight_ipc lends GPU memory, "
                    "other tensors travel with inflight_nccl"
                )
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            chunk.append((name, plain))
            num_bytes += plain.nbytes
            if num_bytes >= self._info.chunk_bytes:
                yield chunk
                chunk, num_bytes = [], 0
        if chunk:
            yield chunk


upstream.WeightTransferTrainerFactory.register_engine(
    IpcTrainerInitInfo.backend, IpcTrainer
)
