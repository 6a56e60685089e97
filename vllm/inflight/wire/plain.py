"""Our end of a group that a trainer has opened with `torch.distributed` alone.

What torch's backends say to each other while they connect is said here too: both meet
under the first device that they serve, and NCCL finds the communicator's name there
under the key of the first one. After that our own groups take over, whose waits all
end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.distributed import DistError

from vllm.inflight.errors import TransferFault
from vllm.inflight.wire.environment import unpinned
from vllm.inflight.wire.gloo import GlooGroup
from vllm.inflight.wire.group import Group
from vllm.inflight.wire.meeting import KNOCK_S
from vllm.inflight.wire.nccl import NcclGroup
from vllm.inflight.wire.rendezvous import Rendezvous
from vllm.inflight.wire.watch import LONGEST_S, Watch

FIRST_COMMUNICATOR = "0"
"""Under which torch's NCCL backend leaves the name of its first communicator."""


def open_plain(meeting: Rendezvous, device: torch.device, watch: Watch) -> Group:
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

    def _agree(self, watch: Watch) -> bytes:
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
