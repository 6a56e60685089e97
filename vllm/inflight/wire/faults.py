"""What can go wrong on a wire, besides being asked for something impossible."""

from __future__ import annotations

from typing import ClassVar

from vllm.inflight.errors import EngineFault, InflightError


class TransferFault(EngineFault):
    """The bytes stopped coming: a peer died, stalled, left or was never there."""

    code: ClassVar[str] = "transfer_fault"
    remedy: ClassVar[str] = (
        "Call init_weight_transfer_engine again; the weights served are unchanged."
    )


class Cancelled(InflightError):
    """Whoever waited for the bytes does not want them any more."""

    code: ClassVar[str] = "cancelled"
    remedy: ClassVar[str] = "Call init_weight_transfer_engine before the next update."
