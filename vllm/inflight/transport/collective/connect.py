"""Opening a group, once its ranks have met at a rendezvous."""

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
    rendezvous: Rendezvous,
    device: torch.device,
    limit: WaitLimit,
    *,
    max_ctas: int | None = 8,
) -> Group:
    """Open the group of a rendezvous; every rank must call this.

    Args:
        rendezvous: hosted or joined; it cannot be used for another group.
        device: the device of this rank's buffers.
        limit: bounds each step.
        max_ctas: most thread blocks that NCCL may take from other work on the GPU.

    Raises:
        Malformed: the terms name an unknown library.
        TransferFault: a rank did not come, or could not connect.

    """
    wire = rendezvous.terms.wire
    try:
        rendezvous.gather(limit)
        if wire == "gloo":
            return GlooGroup(rendezvous, device, limit)
        if wire == "nccl":
            return NcclGroup(rendezvous, device, limit, max_ctas=max_ctas)
        raise Malformed(f"there is no wire {wire!r}, only 'nccl' and 'gloo'")
    except BaseException as error:
        rendezvous.end(f"could not open the group: {error}")
        if isinstance(error, DistError | OSError):
            raise TransferFault(f"the trainer was lost: {error}") from error
        raise
