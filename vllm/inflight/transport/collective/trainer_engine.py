"""Upstream's trainer side of both backends: `trainer_init`, then `send_weights`.

When this module is imported, it enters both in upstream's register of trainers, as
upstream's own module does with upstream's backends. Who makes one of the init infos has
imported it. A plugin could not do it: a trainer's process loads none. Only rank 0 of a
trainer sends; the others take part in gathering the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import Cancelled
from vllm.inflight.trainer.sources.stream import gathering
from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.buckets.tensor_slices import Shard
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Terms
from vllm.inflight.transport.waiting import WaitLimit, in_background


@dataclass
class GlooTrainerInitInfo(upstream.TrainerInitInfo):
    """The group to open for `inflight_gloo`; `rank` is this trainer process's."""

    backend: ClassVar[str] = "inflight_gloo"
    wire: ClassVar[str] = "gloo"

    master_address: str
    """Of this host, as the workers reach it."""
    master_port: int
    """0: any that is free."""
    world_size: int
    """The sender and every worker of every engine."""
    bucket_bytes: int = 16 << 20
    num_buckets: int = 3
    timeout_s: float = 120.0

    @property
    def device(self) -> torch.device:
        """Where the sender packs."""
        return torch.device("cpu")


@dataclass
class NcclTrainerInitInfo(GlooTrainerInitInfo):
    """The group to open for `inflight_nccl`."""

    backend: ClassVar[str] = "inflight_nccl"
    wire: ClassVar[str] = "nccl"

    bucket_bytes: int = 256 << 20
    max_ctas: int = 8

    @property
    def device(self) -> torch.device:
        """The current one."""
        return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class ShardMeta(upstream.ParamMeta):
    """What a source's `metadata` has of a slice; `shape` is the slice's.

    The slices of a tensor follow one another, all under its name.
    """

    shard: Shard


class BroadcastTrainer(upstream.TrainerWeightTransferEngine):
    """The trainer's end; one that failed connects again at the next `send_weights`."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self, init_info: GlooTrainerInitInfo, *, client: Any, source: Any
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._sender: Sender | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Open the group and have the engines join it.

        Raises:
            ValueError: there is no source, or no such group.
            TransferFault: not everybody came.

        """
        if source is None:
            raise ValueError(f"{init_info.backend} needs a WeightSource")
        trainer = cls(init_info, client=client, source=source)
        if trainer.is_sender:
            trainer._connect()
        return trainer

    def send_weights(self) -> None:
        """One update, from start to finish, on every engine; raises what they raise.

        Raises:
            WeightsMismatch: slices do not make their tensor; nothing was begun.

        """
        facts = self.source.metadata()  # may be collective
        # On every rank, so that one which is refused leaves no other waiting for it.
        announced = TensorList(
            tuple(fact.name for fact in facts),
            tuple(fact.dtype for fact in facts),
            tuple(tuple(fact.shape) for fact in facts),
            tuple(getattr(fact, "shard", None) for fact in facts),
        )
        if not self.is_sender:
            join_gathering(self.source)
            return
        with gathering(self.source) as gathered:
            if self._sender is None or self._sender.group.ended is not None:
                self._connect()
            self.client.start_weight_update()
            self._send(announced, gathered)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group."""
        if self._sender is not None:
            self._sender.group.close()
            self._sender = None

    def _send(self, announced: TensorList, tensors: Iterable[Any]) -> None:
        assert self._sender is not None
        update_info = announced.update_info
        answer = in_background(lambda: self.client.update_weights(update_info))

        def refused() -> bool:
            return answer.done() and answer.exception() is not None

        try:
            self._sender.send(
                announced, tensors, WaitLimit(self._info.timeout_s, refused)
            )
        except Cancelled:
            answer.result()
            raise
        try:
            answer.result()
        except BaseException as error:
            # All was sent, but not all need have been received: NCCL lets a trainer go
            # on before, and what is left in there would be read as the next update.
            self._sender.group.abort(f"the engine refused the update: {error}")
            raise

    def _connect(self) -> None:
        self.shutdown()
        info = self._info
        terms = Terms(
            wire=info.wire, world_size=info.world_size, bucket_bytes=info.bucket_bytes
        )
        meeting = Rendezvous.host(terms, info.master_address, info.master_port)
        init_info = {
            "master_address": info.master_address,
            "master_port": meeting.port,
            "rank_offset": 1,
            "world_size": info.world_size,
            "bucket_bytes": info.bucket_bytes,
            "num_buckets": info.num_buckets,
            "timeout_s": info.timeout_s,
        }
        options = {}
        if isinstance(info, NcclTrainerInitInfo):
            options["max_ctas"] = init_info["max_ctas"] = info.max_ctas
        answer = in_background(
            lambda: self.client.init_weight_transfer_engine(init_info)
        )

        def refused() -> bool:
            return answer.done() and answer.exception() is not None

        watch = WaitLimit(info.timeout_s, refused)
        try:
            group = open_group(meeting, info.device, watch, **options)
            self._sender = Sender(group, info.num_buckets, watch)
        except Cancelled:
            answer.result()
            raise
        try:
            answer.result()
        except BaseException:
            self.shutdown()
            raise


def join_gathering(source: Iterable[Any]) -> None:
    """What the other ranks of a trainer do while rank 0 sends: gather, and let go."""
    for _ in source:
        pass
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


for _info in (GlooTrainerInitInfo, NcclTrainerInitInfo):
    upstream.WeightTransferTrainerFactory.register_engine(
        _info.backend, BroadcastTrainer
    )
