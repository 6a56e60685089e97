"""What we keep of one worker: what stages, watches and remembers on its rank.

The parts of `worker/` make these objects. This file names their classes for mypy alone,
so every part can reach what another has made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.inflight.attached import AttachedOnDemand
from vllm.inflight.errors import WrongPhase

if TYPE_CHECKING:
    from vllm.inflight.worker.integrity.tripwire import Tripwire
    from vllm.inflight.worker.lora import AdapterProposal
    from vllm.inflight.worker.shadow.shadow_model import ShadowModel
    from vllm.inflight.worker.staging.worker import StagingWorker


@dataclass(slots=True)
class WorkerState(AttachedOnDemand):
    """The objects of one rank; they end with its worker."""

    shadow: ShadowModel | None = None
    """The shadow model of its model; None until the model is loaded."""
    stager: StagingWorker | None = None
    """None until the model is loaded, and with `--inflight-staging off`."""
    tripwire: Tripwire | None = None
    """None if its models were not loaded by upstream's loader."""
    proposal: AdapterProposal | None = None
    """The adapter that is being loaded; None if none is."""

    def require_stager(self) -> StagingWorker:
        """The staging worker.

        Raises:
            WrongPhase: there is none.

        """
        if self.stager is None:
            raise WrongPhase(
                "this rank stages no updates; start the engine without "
                "--inflight-staging off"
            )
        return self.stager
