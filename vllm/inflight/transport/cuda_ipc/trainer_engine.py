"""The trainer's end of `inflight_ipc`, for upstream's interface.

`trainer_init` prepares the engines, and `send_weights` runs an update. Rank 0 lends the
tensors. The other ranks of a trainer take part in gathering them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.releases.table import adapter
from vllm.inflight.trainer.deltas.batches import WHOLE_FROM_OVER_IPC
from vllm.inflight.trainer.deltas.chain import KEPT_DELTAS
from vllm.inflight.trainer.deltas.policy import DeltaPolicy
from vllm.inflight.trainer.deltas.published import SCRUB_EVERY
from vllm.inflight.trainer.deltas.ranks import TrainerRanks
from vllm.inflight.trainer.deltas.shard_updates import ShardUpdates
from vllm.inflight.trainer.deltas.updates import DeltaUpdates
from vllm.inflight.trainer.sources.stream import gathering
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.collective.trainer_engine import (
    join_gathering,
    spec_of,
)
from vllm.inflight.transport.cuda_ipc.driver import CudaMemory, SharedMemory
from vllm.inflight.transport.cuda_ipc.handles import Exporter
from vllm.inflight.transport.update_calls import update_of
from vllm.inflight.update import Manifest


@dataclass
class IpcTrainerInitInfo(upstream.TrainerInitInfo):
    """How much is lent at once; `rank` is that of the trainer process."""

    backend: ClassVar[str] = "inflight_ipc"

    chunk_bytes: int = 4 << 30
    """The bytes of tensors that are lent in one call. The trainer holds the tensors of
    a call together. A source that keeps all its tensors anyway can lend all at once."""
    bucket_bytes: int = 256 << 20
    """The size of a bucket in a worker; a multiple of 256."""
    num_buckets: int = 3
    """The number of buckets in a worker."""
    timeout_s: float = 120.0
    """Longest wait of a worker for each bucket, in seconds."""
    delta: str = "off"
    """Whether to send only the elements that have changed since the last commit: `auto`
    where that is faster, `always`, or `off`. Rank 0 keeps one more copy of the
    weights on its GPU for it."""
    delta_shards: bool = False
    """Whether each rank of the trainer keeps a copy of its own shards and looks for
    changes there, so that only changes are gathered. All ranks of torch's default group
    have to set it, and rank 0 lends."""
    delta_scrub_every: int = SCRUB_EVERY
    """After so many deltas, the kept copy is read again and compared with its digests.
    If it has changed, the next version is sent whole. 0: never."""
    delta_chain: int = KEPT_DELTAS
    """How many committed deltas are kept beside that copy, for engines that serve an
    older version. Together they have less than a quarter of the bytes of the weights.
    0: such engines get the whole version."""
    delta_whole_from: float = WHOLE_FROM_OVER_IPC
    """The share of a version's bytes from which `auto` sends it whole."""


class IpcTrainer(upstream.TrainerWeightTransferEngine):
    """The trainer's end. Every rank takes part in gathering; rank 0 lends.

    A tensor must not change while the source yields the next ones, up to `chunk_bytes`.
    A source that reuses one buffer needs `chunk_bytes=1`.
    """

    init_info_cls = IpcTrainerInitInfo

    def __init__(
        self,
        init_info: IpcTrainerInitInfo,
        *,
        client: upstream.VLLMWeightSyncClient,
        source: upstream.WeightSource,
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self._info = init_info
        self._memory = memory or CudaMemory()
        self._exporter = Exporter(self._memory)
        self.deltas: DeltaUpdates | ShardUpdates | None = None
        """Sends deltas; None on ranks that take no part in that."""
        # Lent memory is a GPU's, so the last version is kept there alone.
        self._device = torch.device(self._memory.device_type)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        scrub_every = init_info.delta_scrub_every
        if init_info.delta_shards:
            asked = client if self.is_sender else None
            self.deltas = ShardUpdates(
                TrainerRanks(init_info.rank),
                DeltaPolicy(init_info.delta, "device", asked),
                self._device,
                is_pinned=False,
                scrub_every=scrub_every,
                chain_length=init_info.delta_chain,
                whole_from=init_info.delta_whole_from,
            )
        elif self.is_sender:
            self.deltas = DeltaUpdates(
                client,
                init_info.delta,
                "device",
                self._device,
                self._transfer,
                scrub_every,
                init_info.delta_chain,
                init_info.delta_whole_from,
            )

    @classmethod
    def trainer_init(
        cls,
        init_info: IpcTrainerInitInfo,
        *,
        client: upstream.VLLMWeightSyncClient,
        source: upstream.WeightSource | None = None,
    ) -> Self:
        """Let the engines prepare their buckets.

        Raises:
            ConfigError: `delta` is not possible with this client, or is none of its
                values.
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
        """Run one update on every engine: open it, lend every chunk, commit.

        Errors of the engines are raised here too.

        Raises:
            ValueError: a tensor is not on a GPU, or in memory that cannot be lent, or
                rank 0 does not get every tensor whole.

        """
        reader = adapter("weight source")
        deltas = self.deltas
        if isinstance(deltas, ShardUpdates) and deltas.are_wanted(
            is_subset=getattr(self.client, "is_subset_announced", False)
        ):
            deltas.send(
                self.source,
                [spec_of(fact) for fact in reader.facts_of(self.source)],
                lambda: reader.tensors_of(self.source),
                self._transfer,
            )
            return
        tensors = reader.tensors_of(self.source)
        if not self.is_sender:
            join_gathering(tensors)
            return
        with gathering(tensors) as gathered:
            if isinstance(deltas, DeltaUpdates):
                if deltas.are_wanted:
                    deltas.send(gathered)
                    return
                deltas.forget()
            self._lend(gathered)

    def shutdown(self) -> None:
        """Do nothing: no state is kept between two updates."""

    def _transfer(self, manifest: Manifest, pairs: Iterable[Pair]) -> str | None:
        """One update that has a manifest; returns the digest that is served then.

        Args:
            manifest: of the update.
            pairs: what to lend: a list, or all tensors while they are gathered.

        """
        if not isinstance(pairs, list):
            return self._lend(iter(pairs), manifest)
        # The tables of a delta are made on the host.
        on_device = ((name, t.to(self._device)) for name, t in pairs)
        chunks = list(self._chunks(on_device))  # all tensors are in memory anyway
        with update_of(self.client, manifest.to_dict()) as calls:
            for number, (update_info, _) in enumerate(map(self._lendable, chunks), 1):
                calls.update(update_info, is_last=number == len(chunks))
        return calls.served

    def _lend(
        self, gathered: Iterator[Pair], manifest: Manifest | None = None
    ) -> str | None:
        """One update with tensors that are lent while they are gathered."""
        # The first chunk is gathered before the update starts.
        lendable = map(self._lendable, self._chunks(gathered))
        ready = next(lendable, None)
        opening = None if manifest is None else manifest.to_dict()
        with update_of(self.client, opening) as calls:
            while ready is not None:
                # Which chunk is the last is known when the next one is gathered.
                calls.update(ready[0], is_last=False)
                ready = None  # frees its tensors before the next ones are gathered
                ready = next(lendable, None)
        return calls.served

    def _lendable(self, chunk: list[Pair]) -> tuple[dict[str, Any], list[Pair]]:
        """The `update_info` of a chunk, and the chunk, which must outlive the call."""
        update_info = TensorList.of(chunk).update_info
        lent = self._exporter.export([tensor for _, tensor in chunk])
        # The work that produces the tensors must end before a worker reads them.
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


# Registered at import; see collective/trainer_engine.py.
upstream.WeightTransferTrainerFactory.register_engine(
    IpcTrainerInitInfo.backend, IpcTrainer
)
