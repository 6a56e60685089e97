"""The trainer's end of `inflight_nccl` and `inflight_gloo`, for upstream's interface.

`trainer_init` opens the group, and `send_weights` sends an update. Only rank 0 of a
trainer sends. The other ranks take part in gathering the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import Cancelled
from vllm.inflight.releases.table import adapter
from vllm.inflight.trainer.deltas.batches import WHOLE_FROM, WHOLE_FROM_OVER_NCCL
from vllm.inflight.trainer.deltas.chain import KEPT_DELTAS
from vllm.inflight.trainer.deltas.policy import DeltaPolicy
from vllm.inflight.trainer.deltas.published import SCRUB_EVERY
from vllm.inflight.trainer.deltas.ranks import TrainerRanks
from vllm.inflight.trainer.deltas.shard_updates import ShardUpdates
from vllm.inflight.trainer.deltas.updates import DeltaUpdates
from vllm.inflight.trainer.sources.stream import gathering
from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.buckets.tensor_slices import Shard
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Terms
from vllm.inflight.transport.update_calls import UpdateCalls, update_of
from vllm.inflight.transport.waiting import WaitLimit, in_background
from vllm.inflight.update import Manifest, TensorSpec


@dataclass
class GlooTrainerInitInfo(upstream.TrainerInitInfo):
    """The group to open for `inflight_gloo`; `rank` is that of the trainer process."""

    backend: ClassVar[str] = "inflight_gloo"
    wire: ClassVar[str] = "gloo"

    master_address: str
    """The address of this host at which the workers reach it."""
    master_port: int
    """The port of the rendezvous; 0 takes any free port."""
    world_size: int
    """The number of ranks: the sender and every worker of every engine."""
    bucket_bytes: int = 16 << 20
    """The largest size of a bucket, in bytes; a multiple of 256. A worker with one set
    of weights asks for 64 MiB at most, and all ranks take the smallest size."""
    num_buckets: int = 3
    """The number of buckets, in the sender and in each worker."""
    timeout_s: float = 120.0
    """Longest wait for the other ranks, and for each bucket, in seconds."""
    delta: str = "off"
    """Whether to send only the elements that have changed since the last commit: `auto`
    where that is faster, `always`, or `off`. Rank 0 keeps one more copy of the
    weights for it."""
    delta_memory: str = "device"
    """Where that copy is: `device`, or `host`, where changes are then found too."""
    delta_shards: bool = False
    """Whether each rank of the trainer keeps a copy of its own shards and looks for
    changes there, so that only changes are gathered. All ranks of torch's default group
    have to set it, and rank 0 sends."""
    delta_scrub_every: int = SCRUB_EVERY
    """After so many deltas, the kept copy is read again and compared with its digests.
    If it has changed, the next version is sent whole. 0: never."""
    delta_chain: int = KEPT_DELTAS
    """How many committed deltas are kept beside that copy, for engines that serve an
    older version. Together they have less than a quarter of the bytes of the weights.
    0: such engines get the whole version."""
    delta_whole_from: float = WHOLE_FROM
    """The share of a version's bytes from which `auto` sends it whole."""

    @property
    def device(self) -> torch.device:
        """The device on which the sender packs buckets."""
        return torch.device("cpu")


@dataclass
class NcclTrainerInitInfo(GlooTrainerInitInfo):
    """The group to open for `inflight_nccl`."""

    backend: ClassVar[str] = "inflight_nccl"
    wire: ClassVar[str] = "nccl"

    bucket_bytes: int = 256 << 20
    max_ctas: int = 8
    """Most thread blocks that NCCL may take from other work on the GPU."""
    delta_whole_from: float = WHOLE_FROM_OVER_NCCL
    """The same over NCCL. It suits GPUs of one host: between hosts with slower links, a
    larger share is worth sending."""

    @property
    def device(self) -> torch.device:
        """The current GPU."""
        return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class ShardMeta(upstream.ParamMeta):
    """One slice of a tensor in a source's `metadata`; `shape` is the slice's shape.

    The slices of a tensor must follow one another, all under the tensor's name.
    """

    shard: Shard
    """The place of the slice in its tensor."""


class BroadcastTrainer(upstream.TrainerWeightTransferEngine):
    """The trainer's end of a group. After a failure, `send_weights` connects again."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self,
        init_info: GlooTrainerInitInfo,
        *,
        client: upstream.VLLMWeightSyncClient,
        source: upstream.WeightSource,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self._info = init_info
        self._sender: Sender | None = None
        self.deltas: DeltaUpdates | ShardUpdates | None = None
        """Sends deltas; None on ranks that take no part in that."""
        if init_info.delta_shards:
            memory = init_info.delta_memory
            on_host = memory == "host" or init_info.device.type == "cpu"
            self.deltas = ShardUpdates(
                TrainerRanks(init_info.rank),
                DeltaPolicy(
                    init_info.delta, memory, client if self.is_sender else None
                ),
                torch.device("cpu") if on_host else init_info.device,
                is_pinned=on_host and init_info.device.type == "cuda",
                scrub_every=init_info.delta_scrub_every,
                chain_length=init_info.delta_chain,
                whole_from=init_info.delta_whole_from,
            )
        elif self.is_sender:
            self.deltas = DeltaUpdates(
                client,
                init_info.delta,
                init_info.delta_memory,
                init_info.device,
                self._transfer,
                init_info.delta_scrub_every,
                init_info.delta_chain,
                init_info.delta_whole_from,
            )

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: upstream.VLLMWeightSyncClient,
        source: upstream.WeightSource | None = None,
    ) -> Self:
        """Open the group and let the engines join it.

        Raises:
            ConfigError: `delta` is not possible with this client, or is none of its
                values.
            ValueError: there is no source, or the group's settings are out of range.
            TransferFault: a rank did not come in time.

        """
        if source is None:
            raise ValueError(f"{init_info.backend} needs a WeightSource")
        trainer = cls(init_info, client=client, source=source)
        if trainer.is_sender:
            trainer._connect()
        return trainer

    def send_weights(self) -> None:
        """Run one update on every engine: open it, send, commit.

        Errors of the engines are raised here too.

        Raises:
            WeightsMismatch: slices do not make up their tensor; no update was begun.
            ValueError: rank 0 does not get every tensor whole; no update was begun.

        """
        reader = adapter("weight source")
        facts = reader.facts_of(self.source)  # may be collective
        # Checked on every rank, so that all ranks raise and none waits for the others.
        tensor_list = TensorList(
            tuple(fact.name for fact in facts),
            tuple(fact.dtype for fact in facts),
            tuple(tuple(fact.shape) for fact in facts),
            tuple(getattr(fact, "shard", None) for fact in facts),
        )
        deltas = self.deltas
        if isinstance(deltas, ShardUpdates) and deltas.are_wanted(
            is_subset=getattr(self.client, "is_subset_announced", False)
        ):
            deltas.send(
                self.source,
                [spec_of(fact) for fact in facts],
                lambda: reader.tensors_of(self.source),
                partial(self._transfer, whole=tensor_list),
            )
            return
        tensors = reader.tensors_of(self.source)
        if not self.is_sender:
            join_gathering(tensors)
            return
        with gathering(tensors) as gathered:
            if isinstance(deltas, DeltaUpdates):
                if deltas.are_wanted and not any(tensor_list.shards):
                    deltas.send(gathered)
                    return
                deltas.forget()
            self._reconnect()
            with update_of(self.client) as calls:
                self._send(tensor_list, gathered, calls)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._sender is not None:
            self._sender.group.close()
            self._sender = None

    def _transfer(
        self,
        manifest: Manifest,
        pairs: Iterable[Pair],
        whole: TensorList | None = None,
    ) -> str | None:
        """One update that has a manifest; returns the digest that is served then.

        Args:
            manifest: of the update.
            pairs: what to send: a list, or all tensors while they are gathered.
            whole: lists all tensors.

        """
        self._reconnect()
        tensor_list = TensorList.of(pairs) if isinstance(pairs, list) else whole
        assert tensor_list is not None
        with update_of(self.client, manifest.to_dict()) as calls:
            self._send(tensor_list, pairs, calls)
        return calls.served

    def _reconnect(self) -> None:
        if self._sender is None or self._sender.group.ended is not None:
            self._connect()

    def _send(
        self, tensor_list: TensorList, tensors: Iterable[Pair], calls: UpdateCalls
    ) -> None:
        sender = self._sender  # another thread may shut this trainer down meanwhile
        assert sender is not None
        update_info = tensor_list.update_info
        answer = in_background(lambda: calls.update(update_info, is_last=True))

        def has_failed() -> bool:
            return answer.done() and answer.exception() is not None

        try:
            sender.send(
                tensor_list, tensors, WaitLimit(self._info.timeout_s, has_failed)
            )
        except Cancelled:
            answer.result()
            raise
        try:
            answer.result()
        except BaseException as error:
            # All was sent, but perhaps not all was received, because NCCL may let a
            # trainer go on earlier. The next update would read what is left.
            sender.group.abort(f"the engine refused the update: {error}")
            raise

    def _connect(self) -> None:
        self.shutdown()
        info = self._info
        terms = Terms(
            wire=info.wire, world_size=info.world_size, bucket_bytes=info.bucket_bytes
        )
        rendezvous = Rendezvous.host(terms, info.master_address, info.master_port)
        init_info = {
            "master_address": info.master_address,
            "master_port": rendezvous.port,
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

        def has_failed() -> bool:
            return answer.done() and answer.exception() is not None

        limit = WaitLimit(info.timeout_s, has_failed)
        try:
            group = open_group(rendezvous, info.device, limit, **options)
            self._sender = Sender(group, info.num_buckets, limit)
        except Cancelled:
            answer.result()
            raise
        try:
            answer.result()
        except BaseException:
            self.shutdown()
            raise


def spec_of(fact: upstream.ParamMeta) -> TensorSpec:
    """The tensor as a manifest describes it, without its digest."""
    dtype = str(fact.dtype).removeprefix("torch.")
    return TensorSpec(fact.name, tuple(fact.shape), dtype)


def join_gathering(source: Iterable[Pair]) -> None:
    """Gather tensors and drop them, on a trainer's other ranks while rank 0 sends."""
    for _ in source:
        pass
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


# Upstream registers its own trainers when its factory is imported. A plugin cannot
# register ours, because a trainer's process loads no plugins. But a trainer imports
# this module to make an init info.
for _info in (GlooTrainerInitInfo, NcclTrainerInitInfo):
    upstream.WeightTransferTrainerFactory.register_engine(
        _info.backend, BroadcastTrainer
    )
