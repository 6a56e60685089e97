"""A group as `torch.distributed` opens it, joined without a word about ours.

Frameworks whose trainers open a group of their own (SGLang's clients, PipelineRL) know
nothing of terms and lifelines: rank 0 has a `TCPStore`, everybody meets there under
the group's name, and the trainer calls `torch.distributed.broadcast`. A
`TorchRendezvous` is such a meeting in the form of ours, so that our groups, which can
be aborted, do the rest.
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
"""Backend → the device under which torch opens a group of it."""

ANY_BUCKET_BYTES = 256
"""Nothing is agreed on here; `Terms` want a number."""


class TorchRendezvous:
    """One worker's place in a group of torch's, with what our groups ask of it."""

    def __init__(self, terms: Terms, rank: int, address: str, port: int) -> None:
        self.terms = terms
        self.rank = rank
        self.address = address
        self.port = port
        self.lifeline = Liveness()
        """Holds nothing: torch's groups have none, so only time tells of a death."""
        self.store: Any = None

    @classmethod
    def join(
        cls,
        backend: str,
        init_method: str,
        rank: int,
        world_size: int,
        group_name: str,
        watch: WaitLimit,
    ) -> TorchRendezvous:
        """Find the trainer's store.

        Raises:
            Malformed: there is no such backend, address or rank.
            TransferFault: the trainer is not there.

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
        meeting = cls(terms, rank, address, port)
        trainer = f"a trainer at {address}:{port}"
        watch.until(lambda: is_answered(address, port), trainer, longest_nap_s=KNOCK_S)
        connecting = in_background(lambda: _store(address, port, world_size, watch))
        try:
            store = watch.result(connecting, f"{trainer} and all {world_size} ranks")
        except DistError as error:
            raise TransferFault(f"{trainer} does not answer: {error}") from error
        # The first by the group's maker, the others by torch itself.
        for prefix in (group_name, f"{group_name}/", f"{DEVICES[backend]}/"):
            store = torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        meeting.store = store
        return meeting

    def own_address(self) -> str:
        """The address of this host by which the trainer's host reaches it."""
        with socket.create_connection((self.address, self.port), CONNECT_S) as line:
            return str(line.getsockname()[0])

    def end(self, reason: str) -> None:
        """Leave; there is nobody to tell."""
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


def _store(address: str, port: int, world_size: int, watch: WaitLimit) -> Any:
    # Torch's trainer waits in its constructor until all ranks have been here.
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        world_size,
        is_master=False,
        timeout=timedelta(seconds=watch.timeout_s),
    )


FIRST_COMMUNICATOR = "0"
"""Under which torch's NCCL backend leaves the name of its first communicator."""


def join_torch_group(
    meeting: TorchRendezvous, device: torch.device, watch: WaitLimit
) -> Group:
    """The group of all who have come; with NCCL, when the trainer first broadcasts.

    Args:
        meeting: joined; used up by this.
        device: where the buffers of this rank are.
        watch: bounds each of the steps, but for the wait for that broadcast.

    Raises:
        TransferFault: somebody did not connect, or the trainer is gone.

    """
    try:
        if meeting.terms.wire == "nccl":
            # How many thread blocks it takes is for all ranks to agree on: torch
            # bounds nothing, and NCCL cannot connect ranks that count their channels
            # otherwise.
            return _PlainNccl(meeting, device, watch, max_ctas=None)
        return GlooGroup(meeting, device, watch)
    except (DistError, OSError) as error:
        raise TransferFault(f"the trainer was lost: {error}") from error


class _PlainNccl(NcclGroup):
    """A communicator that torch has named."""

    def _agree(self, watch: WaitLimit) -> bytes:
        store = self._meeting.store
        # That may be hours away, and every look wakes a thread beside decoding.
        watch.lasting(LONGEST_S).until(
            lambda: store.check([FIRST_COMMUNICATOR]),
            "the trainer's first broadcast",
            longest_nap_s=KNOCK_S,
        )
        name: bytes = store.get(FIRST_COMMUNICATOR)
        return name

    def _environment(self) -> AbstractContextManager[None]:
        return unpinned()
