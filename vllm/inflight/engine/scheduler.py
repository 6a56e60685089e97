"""What the scheduler gains: stamped steps, salted requests, retraction.

A mixin in front of whichever scheduler class vLLM chose, so that the sync, the
async and a user's own scheduler all have it.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.inflight.engine import cache
from vllm.inflight.engine.stamp import Stamp
from vllm.inflight.update import Version


class InflightSchedulerMixin:
    """Scheduler methods around and beside upstream's."""

    inflight_version = Version()
    """Labels the steps scheduled from now on."""
    inflight_cache_epoch = 0
    """Epoch of the KV that a request admitted now may read; stays 0 if shared."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Stamp the step when it is scheduled: its tokens may be read much later."""
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        version = self.inflight_version
        output.inflight_stamp = Stamp(version.label, version.epoch).encode()
        return output

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        """Hand the stamp of a step to what comes out of it."""
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for output in outputs.values():
            output.weight_version = scheduler_output.inflight_stamp
        return outputs

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        """Salt a request at the moment it looks for KV.

        This is the one place where a request that holds no KV asks for some:
        new, hashed before a commit and admitted after it, waiting during one,
        preempted or retracted. So a commit costs nothing per waiting request.
        """
        cache.resalt(request, self.inflight_cache_epoch)
        return super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]

    def inflight_retract(self) -> int:
        """Send every running request back to the front of the queue, in order.

        Tokens already sampled are kept; prompt and output are prefilled again
        under the weights then live. Returns how many were retracted.
        """
        num_retracted = len(self.running)  # type: ignore[attr-defined]
        timestamp = time.monotonic()
        while self.running:  # type: ignore[attr-defined]
            # The last first: each goes to the front of the waiting queue.
            request = self.running.pop()  # type: ignore[attr-defined]
            self._preempt_request(  # type: ignore[attr-defined]
                request, timestamp, drop_stale_output=False
            )
        # A request retracted and resumed within one step is not "still running".
        self.prev_step_scheduled_req_ids.clear()  # type: ignore[attr-defined]
        return num_retracted


def inflight_scheduler(scheduler: type) -> type:
    """`scheduler` with the mixin in front of it."""
    return type(
        f"Inflight{scheduler.__name__}",
        (InflightSchedulerMixin, scheduler),
        {"__module__": __name__},
    )
