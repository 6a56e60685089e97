"""The scheduler mixin: version stamps, prefix-cache namespaces and retraction.

The mixin is put in front of the scheduler class that vLLM chooses. So the synchronous,
the asynchronous and a user's own scheduler all have it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import nullcontext
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
from vllm.inflight.engine.scheduling.waiting import WaitingRequests
from vllm.inflight.releases.table import adapter
from vllm.inflight.update import Version


class ServingState(SchedulerState):
    """What we keep of one scheduler, and what we do to its requests.

    Args:
        scheduler: upstream's scheduler, after its constructor.
        vllm_config: the configuration of the engine.

    """

    policy: prefix_cache.NamespacePolicy
    adapters: Adapters

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
        """The cache epoch of retracted requests: all its KV is of the live weights."""
        self._version = Stamp("default", 0)
        self._restamp()
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        full = (i for i, m in enumerate(managers) if _keeps_all(m))
        group = next(full, 0) if managers else None
        size = 1 if group is None else managers[group].block_size
        self.provenance = kv_provenance.KvProvenance(size, group)
        self.reports = ProvenanceReports(hear_all=config.kv_versions == "on")
        self.aborted = AbortedSessions()
        self.waiting: WaitingRequests = adapter("waiting requests")(scheduler)
        self.stamps = adapter("stamps")()
        self.late = []
        self.is_scheduling = False

    def serve(self, version: Version, cache_epoch: int, last_change: int) -> None:
        """Stamp the next steps with `version`."""
        self._version = Stamp(version.label, version.epoch)
        self._restamp()
        if self.cache_epoch != cache_epoch:
            self._drop_media()
        self.cache_epoch = cache_epoch
        self.last_change = last_change

    def _drop_media(self) -> None:
        """Drop idle encoder outputs, unless the policy is `shared`."""
        if self.policy.oldest is not None:
            encoder_cache.drop_idle(self._scheduler.encoder_cache_manager)

    def _restamp(self) -> None:
        """Make the stamps of steps, with adapters, and of KV, without adapters."""
        self._stamped = self.adapters.replaced
        self._stamp = self._version.encode()
        self._step_stamp = replace(self._version, adapters=self._stamped).encode()

    def stamp(self, output: upstream.SchedulerOutput) -> None:
        """Stamp a step that has just been scheduled."""
        if self._stamped is not self.adapters.replaced:
            self._restamp()
        StepState.of(output).stamp = self._step_stamp
        requests = self._scheduler.requests
        encoder_cache.tell(requests, output)
        self.provenance.note(requests, output, self._stamp)

    # ------------------------------------------------- what a `wait` waits for
    def sent_back(self) -> list[upstream.Request]:
        """Requests that have run, and wait in the queue after they lost their KV."""
        return self.waiting.sent_back()

    def active(self) -> list[upstream.Request]:
        """Requests that hold KV and finish without further input."""
        idle = upstream.RequestStatus.WAITING_FOR_STREAMING_REQ
        waiting = self.waiting.holding_kv()
        return [*self._scheduler.running, *(r for r in waiting if r.status != idle)]

    def is_busy(self) -> bool:
        """Whether mode `wait` has to wait for requests."""
        is_frozen = self._scheduler.pause_state == upstream.PauseState.PAUSED_ALL
        sent_back = [] if is_frozen else self.sent_back()
        return bool(sent_back or self.active())

    # -------------------------------------------------------------- retraction
    def retract(
        self, only: Collection[str] | None = None, *, besides: Collection[str] = ()
    ) -> int:
        """Send every request that holds KV back to the front of the queue, in order."""
        scheduler = self._scheduler
        running = scheduler.running
        names = {r.request_id for r in running} if only is None else set(only)
        names = names.difference(besides)
        chosen = [r for r in running if r.request_id in names]
        running[:] = [r for r in running if r.request_id not in names]
        num_retracted = len(chosen)
        if only is None:
            num_retracted += self._retract_loaded(besides)
        timestamp = time.monotonic()
        while chosen:
            # The last request first, since each goes to the front of the queue.
            request = chosen.pop()
            scheduler._preempt_request(request, timestamp, drop_stale_output=False)
            if _is_late(request):
                self.late.append(request)
        # The same holds for requests that were preempted before.
        for request in self.waiting.all():
            if request.num_preemptions:
                RequestState.of(request).is_retracted = True
        self._drop_media()
        # A request retracted and resumed within one step is not "still running".
        scheduler.prev_step_scheduled_req_ids.difference_update(names)
        return num_retracted

    def _retract_loaded(self, besides: Collection[str]) -> int:
        """Retract requests with KV from a connector that have not run since.

        They queue behind the retracted running requests. Most of them are unknown to
        the workers, so they are not preempted. Returns their number.
        """
        scheduler = self._scheduler
        waiting = self.waiting.holding_kv()
        loaded = [r for r in waiting if _is_loaded(r) and r.request_id not in besides]
        self.waiting.drop_kv(loaded)
        experts = getattr(scheduler, "aux_output_connector", None)
        for request in loaded:
            if experts is not None:
                experts.request_finished(request)
            scheduler._free_request_blocks(request)
            scheduler._inflight_prefills.discard(request)
            request.num_computed_tokens = 0
            RequestState.of(request).is_retracted = True
        return len(loaded)


class InflightSchedulerMixin:
    """Overrides of upstream's scheduler methods; `ServingState` has their state."""

    def __init__(
        self, vllm_config: upstream.VllmConfig, *args: object, **kwargs: object
    ) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        ServingState(self, vllm_config).attach(self)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Stamp the step when it is scheduled, since its tokens are read later."""
        state = ServingState.of(self)
        if state.late:
            state.late = [r for r in state.late if _is_late(r)]
        is_held_back = self.pause_state == upstream.PauseState.PAUSED_NEW  # type: ignore[attr-defined]
        state.is_scheduling = True
        try:
            with state.waiting.sent_back_first() if is_held_back else nullcontext():
                output = super().schedule(throttle_prefills)  # type: ignore[misc]
        finally:
            state.is_scheduling = False
        state.stamp(output)
        return output

    def update_from_output(
        self,
        scheduler_output: upstream.SchedulerOutput,
        model_runner_output: upstream.ModelRunnerOutput,
    ) -> Any:
        """Copy the stamp of a step to its outputs."""
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
            state.stamps.tell(output, stamp)
            if state.reports.told:
                state.reports.tell(output.outputs)
        return outputs

    def add_request(self, request: upstream.Request) -> None:
        """Add a request, and note whether it asks for its KV provenance."""
        state = ServingState.of(self)
        if state.aborted.is_late(request):
            return
        known = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        state.reports.add(request, known)
        super().add_request(request)  # type: ignore[misc]
        if not request.resumable:
            # If it ended a session, upstream has treated that as an abort.
            state.aborted.forget(request)

    def _free_request(self, request: upstream.Request, **kwargs: object) -> Any:
        state = ServingState.of(self)
        state.stamps.forget(request.request_id)
        if request.status == upstream.RequestStatus.FINISHED_ABORTED:
            state.reports.forget(request)
            if request.streaming_queue is not None:
                state.aborted.add(request)
        return super()._free_request(request, **kwargs)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """Count preempted requests, too, while new requests are held back."""
        count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        if self.pause_state == upstream.PauseState.PAUSED_NEW:  # type: ignore[attr-defined]
            count += len(ServingState.of(self).waiting.uncounted())
        return count

    def _get_local_prefix_cache_hit(
        self, request: upstream.Request, *caps: int | None
    ) -> Any:
        """Choose the prefix-cache namespace of a request when it looks for cached KV.

        Every request without KV gets here: new, waiting, preempted or retracted. So a
        commit or a load of an adapter needs no work per waiting request.

        Args:
            request: the request.
            caps: from vLLM 0.33 on, the longest hit whose experts are known; None if
                requests do not ask for experts. It was read in the namespace before.

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
            known = [
                None if cap is None else self._known_experts(request) for cap in caps
            ]
            found = super()._get_local_prefix_cache_hit(request, *known)  # type: ignore[misc]
            if best is None or found[1] > best[1]:
                best, best_root = found, root
        ours.policy.plant(request, best_root)
        assert best is not None
        state.num_found = best[1]
        return best

    def _known_experts(self, request: upstream.Request) -> int:
        """The number of leading tokens whose experts are known in its namespace."""
        known: int = self.aux_output_connector.max_cache_hit(request)  # type: ignore[attr-defined]
        return known


def _is_late(request: upstream.Request) -> bool:
    return bool(request.num_stale_output_tokens) and not request.is_finished()


def _is_loaded(request: upstream.Request) -> bool:
    """Whether a request that holds KV without running has all of that KV."""
    statuses = upstream.RequestStatus
    return request.status in (statuses.WAITING, statuses.PREEMPTED)


def _keeps_all(manager: Any) -> bool:
    return bool(upstream.is_full_attention_spec(manager.kv_cache_spec))


def inflight_scheduler(scheduler: type) -> type:
    """`scheduler` with the mixin in front of it."""
    return type(
        f"Inflight{scheduler.__name__}",
        (InflightSchedulerMixin, adapter("order of waiting requests"), scheduler),
        {"__module__": __name__},
    )
