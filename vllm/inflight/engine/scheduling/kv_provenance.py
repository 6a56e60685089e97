"""Provenance: which version computed the KV that a request attends to.

A request has a *trail*: the positions at which its KV began to come from another
version. Blocks remember the trail of the request that filled them, so a request that
finds them in the prefix cache takes over that part of it. Nothing is done per token:
trails grow when the version changes and when a request is admitted.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.request_state import RequestState, Trail
from vllm.inflight.engine.scheduling.step_state import StepState
from vllm.inflight.engine.scheduling.version_stamp import KV_FIELD, KV_OPTION

UNKNOWN: Trail = [(0, None)]
"""Of KV that a connector brought in."""


class KvProvenance:
    """The trails of one scheduler's requests and blocks."""

    def __init__(self, block_size: int, group: int | None) -> None:
        self._block_size = block_size
        self._group = group
        """Of several KV-cache groups the one that keeps every position.

        None where there is no KV, as in encoders.
        """
        self._of_block: dict[int, Trail] = {}
        self._stamp: str | None = None
        self._behind: set[str] = set()
        """Requests that have not been scheduled since the version changed."""

    def note(self, requests: dict[str, Any], scheduled: Any, stamp: str) -> None:
        """Note what a step, stamped `stamp`, is about to compute."""
        if self._group is None:
            return
        StepState.of(scheduled).kv_stamp = stamp
        if stamp != self._stamp:
            self._stamp = stamp
            self._behind = set(requests)
        admitted = {
            new.req_id: (new.num_computed_tokens, new.block_ids)
            for new in scheduled.scheduled_new_reqs
        }
        cached = scheduled.scheduled_cached_reqs
        for index, blocks in enumerate(cached.new_block_ids):
            if blocks is None and not self._behind:
                continue
            name, start = cached.req_ids[index], cached.num_computed_tokens[index]
            request = requests[name]
            if name in cached.resumed_req_ids:
                admitted[name] = (start, blocks)
                continue
            if name in self._behind:
                self._behind.discard(name)
                _turn(_known_trail_of(request), start, stamp)
            if blocks is not None:
                trail = _known_trail_of(request)
                for block in blocks[self._group]:
                    self._of_block[block] = trail
        if admitted:
            # In the order of scheduling: one may find blocks of the one before it.
            for name in scheduled.num_scheduled_tokens:
                if name in admitted:
                    self._admit(requests[name], *admitted[name])

    def settle(
        self, requests: dict[str, Any], scheduled: Any, ran: Any, num_sampled: int
    ) -> None:
        """Note what a step has rejected that others were scheduled behind.

        With asynchronous scheduling the next step is scheduled as if all drafts of this
        one were right. If the version changed between the two, the next one has begun
        as many positions earlier as drafts were wrong.

        Args:
            requests: those of the scheduler, by id, before they know of the step.
            scheduled: upstream's `SchedulerOutput`, after `note`.
            ran: upstream's `ModelRunnerOutput`.
            num_sampled: how many tokens a request samples besides its drafts.

        """
        stamp = StepState.of(scheduled).kv_stamp
        if self._group is None or stamp == self._stamp:
            return
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            request = requests.get(name)
            if request is None or request.num_stale_output_tokens:
                continue  # it has lost that KV
            made = len(ran.sampled_token_ids[ran.req_id_to_index[name]])
            if made:
                num_rejected = len(drafts) - max(made - num_sampled, 0)
                _come_back(trail_of(request) or [], stamp, num_rejected)

    def _admit(self, request: upstream.Request, start: int, blocks: Any) -> None:
        """A request begins, begins again or goes on, with `start` positions there."""
        assert self._group is not None
        mine = blocks[self._group]
        state = RequestState.of(request)
        if (trail := state.trail) is not None:
            num_known = start  # a session's next chunk: the KV has stayed
        else:
            trail = state.trail = []
            num_known = min(start, state.num_found)
            for index, block in enumerate(mine[: -(-start // self._block_size)]):
                first = index * self._block_size
                origin = self._of_block.get(block) if first < num_known else UNKNOWN
                _follow(trail, origin or UNKNOWN, first, first + self._block_size)
        _turn(trail, start, self._stamp)
        self._behind.discard(request.request_id)
        for block in mine[num_known // self._block_size :]:
            self._of_block[block] = trail


def trail_of(request: upstream.Request) -> Trail | None:
    """What is known of the KV of a request; None of one that has none yet."""
    state = RequestState.find(request)
    return None if state is None else state.trail


def _known_trail_of(request: upstream.Request) -> Trail:
    """The trail of a request that has been admitted."""
    trail = RequestState.of(request).trail
    assert trail is not None, f"request {request.request_id} has KV and no trail"
    return trail


def forget(request: upstream.Request) -> None:
    """`request` has lost its KV, and looks for some."""
    RequestState.of(request).trail = None


def _turn(trail: Trail, start: int, stamp: str | None) -> None:
    """From position `start` on, KV is of `stamp`: what came after it is gone."""
    while trail and trail[-1][0] >= start:
        trail.pop()
    if not trail or trail[-1][1] != stamp:
        trail.append((start, stamp))


def _come_back(trail: Trail, stamp: str | None, count: int) -> None:
    """Have what came after `stamp` begin `count` positions earlier."""
    stamps = [stamped for _, stamped in trail]
    if stamp not in stamps:
        return
    for index in range(len(trail) - 1, -1, -1):
        if stamps[index] == stamp:
            return
        start, stamped = trail[index]
        trail[index] = start - count, stamped


def _follow(trail: Trail, origin: Trail, first: int, end: int) -> None:
    """Append to `trail` what `origin` says of the positions [first, end)."""
    stamp: str | None = None
    for start, stamped in origin:
        if start >= end:
            break
        if start <= first:
            stamp = stamped
        else:
            _turn(trail, start, stamped)
            continue
        _turn(trail, first, stamp)


class ProvenanceReports:
    """Those of one scheduler.

    Args:
        hear_all: whether every request is one.

    """

    def __init__(self, *, hear_all: bool) -> None:
        self._hear_all = hear_all
        self.told: dict[str, tuple[Any, Trail]] = {}
        """By id."""

    def add(self, request: upstream.Request, known: object) -> None:
        """Note whether `request` asks; `known` is what it becomes a part of, or None.

        The next chunk of a session becomes a part of the request there is.
        """
        options = request.sampling_params and request.sampling_params.extra_args
        if self._hear_all or (options and options.get(KV_OPTION)):
            self.told.setdefault(request.request_id, (known or request, []))

    def tell(self, outputs: Any) -> None:
        """Send along the trails that have changed; the front end keeps the last."""
        for output in outputs:
            if (told := self.told.get(output.request_id)) is None:
                continue
            request, known = told
            # One that ends before it was ever scheduled has none.
            trail = list(trail_of(request) or known)
            if trail != known:
                self.told[output.request_id] = (request, trail)
                params = output.kv_transfer_params or {}
                output.kv_transfer_params = params | {KV_FIELD: trail}
            # So does every chunk of a session, which goes on.
            if output.finish_reason is not None and request.is_finished():
                del self.told[output.request_id]

    def forget(self, request: upstream.Request) -> None:
        """Tell it nothing more; it has been aborted."""
        self.told.pop(request.request_id, None)
