"""The scheduler mixin: version stamps, prefix-cache namespaces and retraction.

The mixin is put in front of the scheduler class that vLLM chooses. So the synchronous,
the asynchronous and a user's own scheduler all have it.
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
from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.update import Version


class InflightSchedulerMixin:
    """Overrides of upstream's scheduler methods, and additional methods."""

    inflight_cache_epoch = 0
    """The cache epoch of new requests."""
    _inflight_last_change = 0
    """The cache epoch of retracted requests, which has KV of the live weights only."""
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
        """Retracted requests whose last tokens have not arrived yet."""

    def inflight_serve(
        self, version: Version, cache_epoch: int, last_change: int
    ) -> None:
        """Stamp the next steps with `version`."""
        self._inflight_version = Stamp(version.label, version.epoch)
        self._inflight_restamp()
        if self.inflight_cache_epoch != cache_epoch:
            self._inflight_drop_media()
        self.inflight_cache_epoch = cache_epoch
        self._inflight_last_change = last_change

    def _inflight_drop_media(self) -> None:
        """Drop idle encoder outputs, unless the policy is `shared`."""
        if self.inflight_policy.oldest is not None:
            encoder_cache.drop_idle(self.encoder_cache_manager)  # type: ignore[attr-defined]

    def _inflight_restamp(self) -> None:
        """Make the stamps of steps, with adapters, and of KV, without adapters."""
        self._inflight_stamped = self.inflight_adapters.replaced
        self._inflight_stamp = self._inflight_version.encode()
        self._inflight_step_stamp = replace(
            self._inflight_version, adapters=self._inflight_stamped
        ).encode()

    # ------------------------------------------------------------- every step
    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Stamp the step when it is scheduled, since its tokens are read later."""
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
        """Copy the stamp of a step to its outputs."""
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
        """Add a request, and note whether it asks for its KV provenance."""
        if self._inflight_aborted.is_late(request):
            return
        known = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        self._inflight_listeners.add(request, known)
        super().add_request(request)  # type: ignore[misc]
        if not request.resumable:
            # If it ended a session, upstream has treated that as an abort.
            self._inflight_aborted.forget(request)

    def _free_request(self, request: upstream.Request, **kwargs: object) -> Any:
        if request.status == upstream.RequestStatus.FINISHED_ABORTED:
            self._inflight_listeners.forget(request)
            if request.streaming_queue is not None:
                self._inflight_aborted.add(request)
        return super()._free_request(request, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------- what a `wait` waits for
    def inflight_sent_back(self) -> list[Any]:
        """Requests that have run, and wait in the queue after they lost their KV."""
        return [each for each in self.waiting if _is_sent_back(each)]  # type: ignore[attr-defined]

    def inflight_active(self) -> list[Any]:
        """Requests that hold KV and finish without further input.

        These are running requests, and waiting requests that get KV from a connector. A
        session between two inputs does not count.
        """
        idle = upstream.RequestStatus.WAITING_FOR_STREAMING_REQ
        waiting = self.kv_holding_waiting  # type: ignore[attr-defined]
        return [*self.running, *(r for r in waiting if r.status != idle)]  # type: ignore[attr-defined]

    def inflight_is_busy(self) -> bool:
        """Whether mode `wait` has to wait for requests."""
        is_frozen = self.pause_state == upstream.PauseState.PAUSED_ALL  # type: ignore[attr-defined]
        sent_back = [] if is_frozen else self.inflight_sent_back()
        return bool(sent_back or self.inflight_active())

    def get_num_unfinished_requests(self) -> int:
        """Count preempted requests, too, while new requests are held back."""
        count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        is_draining = self.pause_state == upstream.PauseState.PAUSED_NEW  # type: ignore[attr-defined]
        return count + (len(self.inflight_sent_back()) if is_draining else 0)

    @contextmanager
    def _inflight_sent_back_first(self) -> Iterator[None]:
        """During a step, schedule preempted requests while new requests are held back.

        Upstream would hold them back like new requests. Then mode `wait` would not wait
        for them, and they could go on under other weights.
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
            left = self.inflight_sent_back()  # preempted in this step, or skipped
            left += [r for r in sent_back if r in admitted and _is_sent_back(r)]
            admitted.remove_requests(left)
            waiting.remove_requests(left)
            waiting.prepend_requests(reversed(left))

    # ------------------------------------------------------------ prefix cache
    def _get_local_prefix_cache_hit(self, request: upstream.Request) -> Any:
        """Choose the prefix-cache namespace of a request when it looks for cached KV.

        Every request without KV gets here: new, waiting, preempted or retracted. So a
        commit or a load of an adapter needs no work per waiting request.
        """
        kv_provenance.forget(request)
        if request.lora_request is not None:
            self.inflight_adapters.load(request.lora_request)
        is_retracted = vars(request).get("inflight_is_retracted", False)
        roots = self.inflight_policy.roots(
            self._inflight_last_change if is_retracted else self.inflight_cache_epoch,
            self.inflight_adapters.load_of(request.lora_request),
            is_retracted=is_retracted,
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
        request.inflight_num_found = best[1]
        return best

    # -------------------------------------------------------------- retraction
    def inflight_retract(self, only: Collection[str] | None = None) -> int:
        """Send every request that holds KV back to the front of the queue, in order.

        Sampled tokens are kept. Prompt and output are prefilled again with the weights
        that are live then. Returns the number of retracted requests.

        Args:
            only: the ids of the running requests to retract; None for all requests.

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
            # The last request first, since each goes to the front of the queue.
            request = chosen.pop()
            self._preempt_request(  # type: ignore[attr-defined]
                request, timestamp, drop_stale_output=False
            )
            if _is_late(request):
                self._inflight_late.append(request)
        # The same holds for requests that were preempted before.
        for request in self.waiting:  # type: ignore[attr-defined]
            if request.num_preemptions:
                request.inflight_is_retracted = True
        self._inflight_drop_media()
        # A request retracted and resumed within one step is not "still running".
        self.prev_step_scheduled_req_ids.difference_update(names)  # type: ignore[attr-defined]
        return num_retracted

    def _inflight_retract_loaded(self) -> int:
        """Retract requests with KV from a connector that have not run since.

        They queue behind the retracted running requests. Most of them are unknown to
        the workers, so they are not preempted. Returns their number.
        """
        waiting = self.kv_holding_waiting  # type: ignore[attr-defined]
        loaded = [request for request in waiting if _is_loaded(request)]
        waiting.remove_requests(loaded)
        for request in reversed(loaded):
            self._free_request_blocks(request)  # type: ignore[attr-defined]
            self._inflight_prefills.discard(request)  # type: ignore[attr-defined]
            request.num_computed_tokens = 0
            request.inflight_is_retracted = True
            self.waiting.prepend_request(request)  # type: ignore[attr-defined]
        return len(loaded)

    def _handle_blocked_waiting_request(self, request: upstream.Request) -> bool:
        """Keep the order behind a retracted request whose last tokens are pending.

        Upstream would skip that request for the step and admit the next ones.
        """
        if self._inflight_late and request not in self._inflight_late:
            return False
        return bool(super()._handle_blocked_waiting_request(request))  # type: ignore[misc]


def _is_late(request: upstream.Request) -> bool:
    return bool(request.num_stale_output_tokens) and not request.is_finished()


def _is_sent_back(request: upstream.Request) -> bool:
    return bool(request.status == upstream.RequestStatus.PREEMPTED)


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
        (InflightSchedulerMixin, scheduler),
        {"__module__": __name__},
    )
