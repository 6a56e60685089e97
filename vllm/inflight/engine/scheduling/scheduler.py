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
from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.update import Version


class InflightSchedulerMixin:
    """Scheduler methods around and beside upstream's."""

    inflight_cache_epoch = 0
    """The change of the weights' bytes that began the root of new requests."""
    _inflight_last_change = 0
    """Nothing under its root is of other weights: the root of retracted ones."""
    _inflight_version = Stamp("default", 0)
    _inflight_stamp = _inflight_step_stamp = _inflight_version.encode()

    def __init__(
        self, vllm_config: upstream.VllmConfig, *args: object, **kwargs: object
    ) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        config = InflightConfig.of(vllm_config)
        self.inflight_policy = prefix_cache.NamespacePolicy.parse(
            config.prefix_cache,
            nonce_for(self.connector),  # type: ignore[attr-defined]
            config.prefix_cache_drift,
        )
        lora = vllm_config.lora_config
        self.inflight_adapters = Adapters(
            self.requests,  # type: ignore[attr-defined]
            num_idle=0 if lora is None else lora.max_cpu_loras,
        )
        self._inflight_stamped = self.inflight_adapters.replaced
        managers = self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
        full = (i for i, m in enumerate(managers) if _keeps_all(m))
        group = next(full, 0) if managers else None
        size = 1 if group is None else managers[group].block_size
        self._inflight_provenance = kv_provenance.KvProvenance(size, group)
        self._inflight_listeners = ProvenanceReports(
            hear_all=config.kv_versions == "on"
        )
        self._inflight_aborted = AbortedSessions()
        self._inflight_late: list[Any] = []
        """Retracted requests that tokens are still on their way to."""

    def inflight_serve(
        self, version: Version, cache_epoch: int, last_change: int
    ) -> None:
        """Stamp the steps from the next one on with `version`."""
        self._inflight_version = Stamp(version.label, version.epoch)
        self._inflight_restamp()
        if self.inflight_cache_epoch != cache_epoch:
            self._inflight_drop_media()
        self.inflight_cache_epoch = cache_epoch
        self._inflight_last_change = last_change

    def _inflight_drop_media(self) -> None:
        """Forget what idle encoder outputs there are, unless KV is shared as well."""
        if self.inflight_policy.oldest is not None:
            encoder_cache.drop_idle(self.encoder_cache_manager)  # type: ignore[attr-defined]

    def _inflight_restamp(self) -> None:
        """Make the stamps: of steps, which tell of adapters, and of KV."""
        self._inflight_stamped = self.inflight_adapters.replaced
        self._inflight_stamp = self._inflight_version.encode()
        self._inflight_step_stamp = replace(
            self._inflight_version, adapters=self._inflight_stamped
        ).encode()

    # ------------------------------------------------------------- every step
    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Stamp the step when it is scheduled: its tokens may be read much later."""
        if self._inflight_late:
            self._inflight_late = [r for r in self._inflight_late if _is_late(r)]
        with self._inflight_sent_back_first():
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
        if self._inflight_stamped is not self.inflight_adapters.replaced:
            self._inflight_restamp()
        output.inflight_stamp = self._inflight_step_stamp
        requests = self.requests  # type: ignore[attr-defined]
        encoder_cache.tell(requests, output)
        self._inflight_provenance.note(requests, output, self._inflight_stamp)
        return output

    def update_from_output(
        self,
        scheduler_output: upstream.SchedulerOutput,
        model_runner_output: upstream.ModelRunnerOutput,
    ) -> Any:
        """Hand the stamp of a step to what comes out of it."""
        self._inflight_provenance.settle(
            self.requests,  # type: ignore[attr-defined]
            scheduler_output,
            model_runner_output,
            self.num_sampled_tokens_per_step,  # type: ignore[attr-defined]
        )
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for output in outputs.values():
            output.weight_version = scheduler_output.inflight_stamp
            if self._inflight_listeners.told:
                self._inflight_listeners.tell(output.outputs)
        return outputs

    def add_request(self, request: upstream.Request) -> None:
        """Note whether the request wants to know whose KV it reads."""
        if self._inflight_aborted.is_late(request):
            return
        known = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        self._inflight_listeners.add(request, known)
        super().add_request(request)  # type: ignore[misc]
        if not request.resumable:
            # Where it has ended a session, upstream has called that an abort.
            self._inflight_aborted.forget(request)

    def _free_request(self, request: upstream.Request, **kwargs: object) -> Any:
        if request.status == upstream.RequestStatus.FINISHED_ABORTED:
            self._inflight_listeners.forget(request)
            if request.streaming_queue is not None:
                self._inflight_aborted.add(request)
        return super()._free_request(request, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------- what a `wait` waits for
    def inflight_sent_back(self) -> list[Any]:
        """Requests that have run and lie in the queue, as they had to give KV up."""
        return [each for each in self.waiting if _is_sent_back(each)]  # type: ignore[attr-defined]

    def inflight_active(self) -> list[Any]:
        """Requests that hold KV and go on by themselves.

        Those that run, and those that wait with KV from a tier or another engine, or
        for it. A session between two inputs goes on when its user does.
        """
        idle = upstream.RequestStatus.WAITING_FOR_STREAMING_REQ
        waiting = self.kv_holding_waiting  # type: ignore[attr-defined]
        return [*self.running, *(r for r in waiting if r.status != idle)]  # type: ignore[attr-defined]

    def inflight_is_busy(self) -> bool:
        """Whether a `wait` has somebody to wait for."""
        is_frozen = self.pause_state == upstream.PauseState.PAUSED_ALL  # type: ignore[attr-defined]
        sent_back = [] if is_frozen else self.inflight_sent_back()
        return bool(sent_back or self.inflight_active())

    def get_num_unfinished_requests(self) -> int:
        """While new requests wait, those sent back are not finished either."""
        count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        is_draining = self.pause_state == upstream.PauseState.PAUSED_NEW  # type: ignore[attr-defined]
        return count + (len(self.inflight_sent_back()) if is_draining else 0)

    @contextmanager
    def _inflight_sent_back_first(self) -> Iterator[None]:
        """Around a step: while new requests wait, let those go on that were sent back.

        Upstream takes them for new ones then. Whoever waits for the running requests
        would have them go on afterwards, maybe under other weights.
        """
        waiting, admitted = self.waiting, self.kv_holding_waiting  # type: ignore[attr-defined]
        sent_back = []
        if self.pause_state == upstream.PauseState.PAUSED_NEW:  # type: ignore[attr-defined]
            sent_back = self.inflight_sent_back()
        if not sent_back:
            yield
            return
        waiting.remove_requests(sent_back)
        for request in sent_back:
            admitted.add_request(request)
        try:
            yield
        finally:
            left = self.inflight_sent_back()  # sent back now, or passed over
            left += [r for r in sent_back if r in admitted and _is_sent_back(r)]
            admitted.remove_requests(left)
            waiting.remove_requests(left)
            waiting.prepend_requests(reversed(left))

    # ------------------------------------------------------------ prefix cache
    def _get_local_prefix_cache_hit(self, request: upstream.Request) -> Any:
        """Root a request at the moment it looks for KV.

        This is the one place where a request that holds no KV asks for some:
        new, hashed before a commit and admitted after it, waiting during one,
        preempted or retracted. So a commit costs nothing per waiting request, nor
        does loading an adapter.
        """
        kv_provenance.forget(request)
        if request.lora_request is not None:
            self.inflight_adapters.load(request.lora_request)
        state = RequestState.of(request)
        roots = self.inflight_policy.roots(
            self._inflight_last_change
            if state.is_retracted
            else self.inflight_cache_epoch,
            self.inflight_adapters.load_of(request.lora_request),
            is_retracted=state.is_retracted,
        )
        prefix_cache.forget(request, roots)
        best, best_root = None, roots[0]
        for root in roots:
            self.inflight_policy.plant(request, root)
            found = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
            if best is None or found[1] > best[1]:
                best, best_root = found, root
        self.inflight_policy.plant(request, best_root)
        assert best is not None
        state.num_found = best[1]
        return best

    # -------------------------------------------------------------- retraction
    def inflight_retract(self, only: Collection[str] | None = None) -> int:
        """Send every request that holds KV back to the front of the queue, in order.

        Tokens already sampled are kept; prompt and output are prefilled again
        under the weights then live. Returns how many were retracted.

        Args:
            only: the ids of running ones, if the others stay where they are.

        """
        running = self.running  # type: ignore[attr-defined]
        names = {r.request_id for r in running} if only is None else only
        chosen = [r for r in running if r.request_id in names]
        running[:] = [r for r in running if r.request_id not in names]
        num_retracted = len(chosen)
        if only is None:
            num_retracted += self._inflight_retract_loaded()
        timestamp = time.monotonic()
        while chosen:
            # The last first: each goes to the front of the waiting queue.
            request = chosen.pop()
            self._preempt_request(  # type: ignore[attr-defined]
                request, timestamp, drop_stale_output=False
            )
            if _is_late(request):
                self._inflight_late.append(request)
        # Those that an earlier retraction or a full cache sent back are no different.
        for request in self.waiting:  # type: ignore[attr-defined]
            if request.num_preemptions:
                RequestState.of(request).is_retracted = True
        self._inflight_drop_media()
        # A request retracted and resumed within one step is not "still running".
        self.prev_step_scheduled_req_ids.difference_update(names)  # type: ignore[attr-defined]
        return num_retracted

    def _inflight_retract_loaded(self) -> int:
        """Have those begin again whose KV has come from elsewhere, but no turn yet.

        For want of blocks, say. They come behind the running ones, and most of them
        no worker knows: they are not preempted. Returns how many there were.
        """
        waiting = self.kv_holding_waiting  # type: ignore[attr-defined]
        loaded = [request for request in waiting if _is_loaded(request)]
        waiting.remove_requests(loaded)
        for request in reversed(loaded):
            self._free_request_blocks(request)  # type: ignore[attr-defined]
            self._inflight_prefills.discard(request)  # type: ignore[attr-defined]
            request.num_computed_tokens = 0
            RequestState.of(request).is_retracted = True
            self.waiting.prepend_request(request)  # type: ignore[attr-defined]
        return len(loaded)

    def _handle_blocked_waiting_request(self, request: upstream.Request) -> bool:
        """Let nobody overtake a retracted request whose last tokens are on their way.

        Upstream would pass over it for that step and admit those behind it.
        """
        if self._inflight_late and request not in self._inflight_late:
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
