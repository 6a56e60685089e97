"""What the scheduler gains: stamped steps, rooted requests, retraction.

A mixin in front of whichever scheduler class vLLM chose, so that the sync, the
async and a user's own scheduler all have it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.scheduling import encoder_cache, kv_provenance, prefix_cache
from vllm.inflight.engine.scheduling.aborted_sessions import AbortedSessions
from vllm.inflight.engine.scheduling.kv_connectors import nonce_for
from vllm.inflight.engine.scheduling.kv_provenance import ProvenanceReports
from vllm.inflight.engine.scheduling.lora import Adapters
from vllm.inflight.engine.scheduling.request_state import RequestState
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.engine.scheduling.step_state import StepState
from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.update import Version


class ServingState(SchedulerState):
    """Our side of one scheduler.

    Args:
        scheduler: of upstream, which has been made.
        vllm_config: of the engine.

    """

    def __init__(
        self, scheduler: upstream.Scheduler, vllm_config: upstream.VllmConfig
    ) -> None:
        self._scheduler = scheduler
        config = InflightConfig.of(vllm_config)
        self.policy = prefix_cache.NamespacePolicy.parse(
            config.prefix_cache,
            nonce_for(scheduler.connector),
            config.prefix_cache_drift,
        )
        lora = vllm_config.lora_config
        self.adapters = Adapters(
            scheduler.requests, num_idle=0 if lora is None else lora.max_cpu_loras
        )
        self.cache_epoch = 0
        self.last_change = 0
        """Nothing under its root is of other weights: the root of retracted ones."""
        self._version = Stamp("default", 0)
        self._restamp()
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        full = (i for i, m in enumerate(managers) if _keeps_all(m))
        group = next(full, 0) if managers else None
        size = 1 if group is None else managers[group].block_size
        self.provenance = kv_provenance.KvProvenance(size, group)
        self.reports = ProvenanceReports(hear_all=config.kv_versions == "on")
        self.aborted = AbortedSessions()
        self.late: list[upstream.Request] = []
        """Retracted requests that tokens are still on their way to."""

    def serve(self, version: Version, cache_epoch: int, last_change: int) -> None:
        """Stamp the steps from the next one on with `version`."""
        self._version = Stamp(version.label, version.epoch)
        self._restamp()
        if self.cache_epoch != cache_epoch:
            self._drop_media()
        self.cache_epoch = cache_epoch
        self.last_change = last_change

    def _drop_media(self) -> None:
        """Forget what idle encoder outputs there are, unless KV is shared as well."""
        if self.policy.oldest is not None:
            encoder_cache.drop_idle(self._scheduler.encoder_cache_manager)

    def _restamp(self) -> None:
        """Make the stamps: of steps, which tell of adapters, and of KV."""
        self._stamped = self.adapters.replaced
        self._stamp = self._version.encode()
        self._step_stamp = replace(self._version, adapters=self._stamped).encode()

    def stamp(self, output: upstream.SchedulerOutput) -> None:
        """Stamp a step that was scheduled now."""
        if self._stamped is not self.adapters.replaced:
            self._restamp()
        StepState.of(output).stamp = self._step_stamp
        requests = self._scheduler.requests
        encoder_cache.tell(requests, output)
        self.provenance.note(requests, output, self._stamp)

    # ------------------------------------------------- what a `wait` waits for
    def sent_back(self) -> list[upstream.Request]:
        """Requests that have run and lie in the queue, as they had to give KV up."""
        return [each for each in self._scheduler.waiting if _is_sent_back(each)]

    def active(self) -> list[upstream.Request]:
        """Requests that hold KV and go on by themselves."""
        idle = upstream.RequestStatus.WAITING_FOR_STREAMING_REQ
        waiting = self._scheduler.kv_holding_waiting
        return [*self._scheduler.running, *(r for r in waiting if r.status != idle)]

    def is_busy(self) -> bool:
        """Whether a `wait` has somebody to wait for."""
        is_frozen = self._scheduler.pause_state == upstream.PauseState.PAUSED_ALL
        sent_back = [] if is_frozen else self.sent_back()
        return bool(sent_back or self.active())

    @contextmanager
    def sent_back_first(self) -> Iterator[None]:
        """Around a step: while new requests wait, let those go on that were sent back.

        Upstream takes them for new ones then. Whoever waits for the running requests
        would have them go on afterwards, maybe under other weights.
        """
        waiting = self._scheduler.waiting
        admitted = self._scheduler.kv_holding_waiting
        sent_back = []
        if self._scheduler.pause_state == upstream.PauseState.PAUSED_NEW:
            sent_back = self.sent_back()
        if not sent_back:
            yield
            return
        waiting.remove_requests(sent_back)
        for request in sent_back:
            admitted.add_request(request)
        try:
            yield
        finally:
            left = self.sent_back()  # sent back now, or passed over
            left += [r for r in sent_back if r in admitted and _is_sent_back(r)]
            admitted.remove_requests(left)
            waiting.remove_requests(left)
            waiting.prepend_requests(reversed(left))

    # -------------------------------------------------------------- retraction
    def retract(self, only: Collection[str] | None = None) -> int:
        """Send every request that holds KV back to the front of the queue, in order."""
        scheduler = self._scheduler
        running = scheduler.running
        names = {r.request_id for r in running} if only is None else only
        chosen = [r for r in running if r.request_id in names]
        running[:] = [r for r in running if r.request_id not in names]
        num_retracted = len(chosen)
        if only is None:
            num_retracted += self._retract_loaded()
        timestamp = time.monotonic()
        while chosen:
            # The last first: each goes to the front of the waiting queue.
            request = chosen.pop()
            scheduler._preempt_request(request, timestamp, drop_stale_output=False)
            if _is_late(request):
                self.late.append(request)
        # Those that an earlier retraction or a full cache sent back are no different.
        for request in scheduler.waiting:
            if request.num_preemptions:
                RequestState.of(request).is_retracted = True
        self._drop_media()
        # A request retracted and resumed within one step is not "still running".
        scheduler.prev_step_scheduled_req_ids.difference_update(names)
        return num_retracted

    def _retract_loaded(self) -> int:
        """Have those begin again whose KV has come from elsewhere, but no turn yet.

        For want of blocks, say. They come behind the running ones, and most of them
        no worker knows: they are not preempted. Returns how many there were.
        """
        scheduler = self._scheduler
        waiting = scheduler.kv_holding_waiting
        loaded = [request for request in waiting if _is_loaded(request)]
        waiting.remove_requests(loaded)
        for request in reversed(loaded):
            scheduler._free_request_blocks(request)
            scheduler._inflight_prefills.discard(request)
            request.num_computed_tokens = 0
            RequestState.of(request).is_retracted = True
            scheduler.waiting.prepend_request(request)
        return len(loaded)


class InflightSchedulerMixin:
    """Scheduler methods around upstream's; what they keep is in `ServingState`."""

    def __init__(
        self, vllm_config: upstream.VllmConfig, *args: object, **kwargs: object
    ) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        ServingState(self, vllm_config).attach(self)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Stamp the step when it is scheduled: its tokens may be read much later."""
        state = ServingState.of(self)
        if state.late:
            state.late = [r for r in state.late if _is_late(r)]
        with state.sent_back_first():
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
        state.stamp(output)
        return output

    def update_from_output(
        self,
        scheduler_output: upstream.SchedulerOutput,
        model_runner_output: upstream.ModelRunnerOutput,
    ) -> Any:
        """Hand the stamp of a step to what comes out of it."""
        state = ServingState.of(self)
        state.provenance.settle(
            self.requests,  # type: ignore[attr-defined]
            scheduler_output,
            model_runner_output,
            self.num_sampled_tokens_per_step,  # type: ignore[attr-defined]
        )
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        stamp = StepState.of(scheduler_output).stamp
        for output in outputs.values():
            output.weight_version = stamp
            if state.reports.told:
                state.reports.tell(output.outputs)
        return outputs

    def add_request(self, request: upstream.Request) -> None:
        """Note whether the request wants to know whose KV it reads."""
        state = ServingState.of(self)
        if state.aborted.is_late(request):
            return
        known = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        state.reports.add(request, known)
        super().add_request(request)  # type: ignore[misc]
        if not request.resumable:
            # Where it has ended a session, upstream has called that an abort.
            state.aborted.forget(request)

    def _free_request(self, request: upstream.Request, **kwargs: object) -> Any:
        if request.status == upstream.RequestStatus.FINISHED_ABORTED:
            state = ServingState.of(self)
            state.reports.forget(request)
            if request.streaming_queue is not None:
                state.aborted.add(request)
        return super()._free_request(request, **kwargs)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """While new requests wait, those sent back are not finished either."""
        count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        if self.pause_state == upstream.PauseState.PAUSED_NEW:  # type: ignore[attr-defined]
            count += len(ServingState.of(self).sent_back())
        return count

    def _get_local_prefix_cache_hit(self, request: upstream.Request) -> Any:
        """Root a request at the moment it looks for KV.

        This is the one place where a request that holds no KV asks for some:
        new, hashed before a commit and admitted after it, waiting during one,
        preempted or retracted. So a commit costs nothing per waiting request, nor
        does loading an adapter.
        """
        ours, state = ServingState.of(self), RequestState.of(request)
        kv_provenance.forget(request)
        if request.lora_request is not None:
            ours.adapters.load(request.lora_request)
        roots = ours.policy.roots(
            ours.last_change if state.is_retracted else ours.cache_epoch,
            ours.adapters.load_of(request.lora_request),
            is_retracted=state.is_retracted,
        )
        prefix_cache.forget(request, roots)
        best, best_root = None, roots[0]
        for root in roots:
            ours.policy.plant(request, root)
            found = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
            if best is None or found[1] > best[1]:
                best, best_root = found, root
        ours.policy.plant(request, best_root)
        assert best is not None
        state.num_found = best[1]
        return best

    def _handle_blocked_waiting_request(self, request: upstream.Request) -> bool:
        """Let nobody overtake a retracted request whose last tokens are on their way.

        Upstream would pass over it for that step and admit those behind it.
        """
        late = ServingState.of(self).late
        if late and request not in late:
            return False
        return bool(super()._handle_blocked_waiting_request(request))  # type: ignore[misc]


def _is_late(request: upstream.Request) -> bool:
    return bool(request.num_stale_output_tokens) and not request.is_finished()


def _is_sent_back(request: upstream.Request) -> bool:
    return bool(request.status == upstream.RequestStatus.PREEMPTED)


def _is_loaded(request: upstream.Request) -> bool:
    """Of those that hold KV without running: whether none of it is on its way."""
    statuses = upstream.RequestStatus
    return request.status in (statuses.WAITING, statuses.PREEMPTED)


def _keeps_all(manager: Any) -> bool:
    return bool(upstream.is_full_attention_spec(manager.kv_cache_spec))


def inflight_scheduler(scheduler: type) -> type:
    """`scheduler` with the mixin in front of it."""
    return type(
        f"Inflight{scheduler.__name__}",
        (InflightSchedulerMixin, scheduler),
        {"__module__": __name__},
    )
