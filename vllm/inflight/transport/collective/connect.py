"""How a group comes to be, over the wire that all who meet have agreed on."""

from __future__ import annotations

import torch
from torch.distributed import DistError

from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.collective.gloo import GlooGroup
from vllm.inflight.transport.collective.nccl import NcclGroup
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Group
from vllm.inflight.transport.waiting import WaitLimit


def open_group(
    meeting: Rendezvous,
    device: torch.device,
    watch: WaitLimit,
    *,
    max_ctas: int | None = 8,
) -> Group:
    """The group of all who come to the meeting; every rank calls it.

    Args:
        meeting: hosted or joined; used up by this.
        device: where the buffers of this rank are.
        watch: bounds each of the steps.
        max_ctas: most thread blocks that NCCL may take from other work on the GPU.

    Raises:
        Malformed: there is no such wire.
        TransferFault: somebody did not come, or it does not work.

    """
    wire = meeting.terms.wire
    try:
        meeting.gather(watch)
        if wire == "gloo":
            return GlooGroup(meeting, device, watch)
        if wire == "nccl":
            return NcclGroup(meeting, device, watch, max_ctas=max_ctas)
        raise Malformed(f"there is no wire {wire!r}, only 'nccl' and 'gloo'")
    except BaseException as error:
        meeting.end(f"could not open the group: {error}")
        if isinstance(error, DistError | OSError):
            raise TransferFault(f"the trainer was lost: {error}") from error
        raise
