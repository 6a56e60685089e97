"""Joining a group that a trainer has opened with `torch.distributed` alone.

The trainers of some frameworks (SGLang's clients, PipelineRL) open such groups. They
have neither terms nor liveness connections: rank 0 hosts a `TCPStore`, all ranks meet
there under the group's name, and the trainer calls `torch.distributed.broadcast`.

A `TorchRendezvous` meets such a trainer, as torch itself would. Torch's backends meet
under the first device that they serve, and torch's NCCL leaves the communicator's id
under the key of its first communicator. Then one of our groups takes over, because our
groups can be aborted and all their waits end.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed
from torch.distributed import DistError

from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.collective.environment import unpinned
from vllm.inflight.transport.collective.gloo import GlooGroup
from vllm.inflight.transport.collective.nccl import NcclGroup
from vllm.inflight.transport.collective.rendezvous import KNOCK_S, is_answered
from vllm.inflight.transport.group import Group, Terms
from vllm.inflight.transport.liveness import CONNECT_S, Liveness
from vllm.inflight.transport.waiting import LONGEST_S, WaitLimit, in_background

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Backend -> the device under which torch opens a group of that backend."""

ANY_BUCKET_BYTES = 256
"""`Terms` need a number; these groups have no buckets."""


class TorchRendezvous:
    """Implements `Member` for one worker in a group that torch opened."""

    def __init__(self, terms: Terms, rank: int, address: str, port: int) -> None:
        self.terms = terms
        self.rank = rank
        self.address = address
        self.port = port
        self.liveness = Liveness()
        """Has no connections, because torch opens none. Only a timeout shows that a
        peer died."""
        self.store: Any = None

    @classmethod
    def join(
        cls,
        backend: str,
        init_method: str,
        rank: int,
        world_size: int,
        group_name: str,
        limit: WaitLimit,
    ) -> TorchRendezvous:
        """Find the trainer's store and wait for all ranks.

        Raises:
            Malformed: the backend, the address or the rank is not valid.
            TransferFault: the trainer does not answer, or a rank is missing.

        """
        if backend not in DEVICES:
            raise Malformed(f"backend must be one of {', '.join(DEVICES)}")
        if not 0 < rank < world_size:
            raise Malformed(
                f"this worker is rank {rank} of the group, whose world_size is "
                f"{world_size}; count the trainer and every worker"
            )
        address, port = _address(init_method)
        terms = Terms(
            wire=backend, world_size=world_size, bucket_bytes=ANY_BUCKET_BYTES
        )
        rendezvous = cls(terms, rank, address, port)
        trainer = f"a trainer at {address}:{port}"
        limit.until(lambda: is_answered(address, port), trainer, longest_nap_s=KNOCK_S)
        connecting = in_background(lambda: _store(address, port, world_size, limit))
        try:
            store = limit.result(connecting, f"{trainer} and all {world_size} ranks")
        except DistError as error:
            raise TransferFault(f"{trainer} does not answer: {error}") from error
        # The trainer adds the first prefix, and torch adds the others.
        for prefix in (group_name, f"{group_name}/", f"{DEVICES[backend]}/"):
            store = torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        rendezvous.store = store
        return rendezvous

    def own_address(self) -> str:
        """The address of this host on the interface that reaches the trainer."""
        with socket.create_connection((self.address, self.port), CONNECT_S) as line:
            return str(line.getsockname()[0])

    def end(self, reason: str) -> None:
        """Leave; there is no connection to send the reason on."""
        del reason
        self.store = None


def _address(init_method: str) -> tuple[str, int]:
    try:
        parsed = urlparse(init_method)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host = port = None
    if not host or not port or parsed.scheme != "tcp":
        raise Malformed(
            f"init_method must be tcp://host:port, got {init_method!r:.300}"
        )
    return host, port


def _store(address: str, port: int, world_size: int, limit: WaitLimit) -> Any:
    # The trainer waits in torch's constructor until all ranks have connected.
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        world_size,
        is_master=False,
        timeout=timedelta(seconds=limit.timeout_s),
    )


FIRST_COMMUNICATOR = "0"
"""The key under which torch's NCCL backend leaves the id of its first communicator."""


def join_torch_group(
    rendezvous: TorchRendezvous, device: torch.device, limit: WaitLimit
) -> Group:
    """Open the group of a rendezvous; with NCCL, at the trainer's first broadcast.

    Args:
        rendezvous: joined; it cannot be used for another group.
        device: the device of this rank's buffers.
        limit: bounds each step, except the wait for the trainer's first broadcast.

    Raises:
        TransferFault: a rank did not connect, or the trainer is gone.

    """
    try:
        if rendezvous.terms.wire == "nccl":
            # All ranks must have the same bound on thread blocks: NCCL cannot connect
            # ranks with different numbers of channels. Torch sets no bound.
            return _PlainNccl(rendezvous, device, limit, max_ctas=None)
        return GlooGroup(rendezvous, device, limit)
    except (DistError, OSError) as error:
        raise TransferFault(f"the trainer was lost: {error}") from error


class _PlainNccl(NcclGroup):
    """A communicator whose id torch has left in the store."""

    def _agree(self, limit: WaitLimit) -> bytes:
        store = self._rendezvous.store
        # The first broadcast may be hours away, and every check wakes a thread that
        # decoding competes with. So checks are rare.
        limit.lasting(LONGEST_S).until(
            lambda: store.check([FIRST_COMMUNICATOR]),
            "the trainer's first broadcast",
            longest_nap_s=KNOCK_S,
        )
        name: bytes = store.get(FIRST_COMMUNICATOR)
        return name

    def _environment(self) -> AbstractContextManager[None]:
        return unpinned()
