"""KV provenance: which version computed the KV that a request attends to.

Each request has a list of positions at which its KV begins to come from another
version. Each block refers to the list of the request that filled it. A request that
finds the block in the prefix cache copies that part of the list. There is no work per
token: lists grow when the version changes and when a request is admitted.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.request_state import RequestState, Trail
from vllm.inflight.engine.scheduling.step_state import StepState
from vllm.inflight.engine.scheduling.version_stamp import KV_FIELD, KV_OPTION

UNKNOWN: Trail = [(0, None)]
"""The provenance of KV that a connector has loaded."""


class KvProvenance:
    """The KV provenance of one scheduler's requests and blocks."""

    def __init__(self, block_size: int, group: int | None) -> None:
        self._block_size = block_size
        self._group = group
        """The KV-cache group that keeps every position.

        None for models without KV, such as encoders.
        """
        self._of_block: dict[int, Trail] = {}
        self._stamp: str | None = None
        self._behind: set[str] = set()
        """Requests that have not been scheduled since the version changed."""

    def note(self, requests: dict[str, Any], scheduled: Any, stamp: str) -> None:
        """Note the blocks that a step with version stamp `stamp` computes."""
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
            # In scheduling order, since a request may find blocks of the one before.
            for name in scheduled.num_scheduled_tokens:
                if name in admitted:
                    self._admit(requests[name], *admitted[name])

    def settle(
        self, requests: dict[str, Any], scheduled: Any, ran: Any, num_sampled: int
    ) -> None:
        """Correct positions after a step has rejected draft tokens.

        Asynchronous scheduling assumes that all drafts of a step are accepted. If the
        version changed after that step, the next version begins earlier. The shift is
        the number of rejected drafts.

        Args:
            requests: the scheduler's requests by id, before they are updated.
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
                continue  # the request has lost that KV
            made = len(ran.sampled_token_ids[ran.req_id_to_index[name]])
            if made:
                num_rejected = len(drafts) - max(made - num_sampled, 0)
                _come_back(trail_of(request) or [], stamp, num_rejected)

    def _admit(self, request: upstream.Request, start: int, blocks: Any) -> None:
        """Note that a request is admitted, with KV for `start` positions."""
        assert self._group is not None
        mine = blocks[self._group]
        state = RequestState.of(request)
        if (trail := state.trail) is not None:
            num_known = start  # the next chunk of a session, which keeps its KV
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
    """The KV provenance of a request; None before it has KV."""
    state = RequestState.find(request)
    return None if state is None else state.trail


def _known_trail_of(request: upstream.Request) -> Trail:
    """The trail of a request that has been admitted."""
    trail = RequestState.of(request).trail
    assert trail is not None, f"request {request.request_id} has KV and no trail"
    return trail


def forget(request: upstream.Request) -> None:
    """Forget the provenance of `request`, which has lost its KV."""
    RequestState.of(request).trail = None


def _turn(trail: Trail, start: int, stamp: str | None) -> None:
    """Note that KV from position `start` on is of `stamp`; drop later entries."""
    while trail and trail[-1][0] >= start:
        trail.pop()
    if not trail or trail[-1][1] != stamp:
        trail.append((start, stamp))


def _come_back(trail: Trail, stamp: str | None, count: int) -> None:
    """Let the entries after `stamp` begin `count` positions earlier."""
    stamps = [stamped for _, stamped in trail]
    if stamp not in stamps:
        return
    for index in range(len(trail) - 1, -1, -1):
        if stamps[index] == stamp:
            return
        start, stamped = trail[index]
        trail[index] = start - count, stamped


def _follow(trail: Trail, origin: Trail, first: int, end: int) -> None:
    """Append the part of `origin` for positions [first, end) to `trail`."""
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
    """The requests of one scheduler that get reports of their KV provenance.

    Args:
        hear_all: whether every request gets reports.

    """

    def __init__(self, *, hear_all: bool) -> None:
        self._hear_all = hear_all
        self.told: dict[str, tuple[Any, Trail]] = {}
        """Request and last report, by request id."""

    def add(self, request: upstream.Request, known: object) -> None:
        """Note whether `request` asks for reports.

        The next chunk of a session becomes part of the request `known`.
        """
        options = request.sampling_params and request.sampling_params.extra_args
        if self._hear_all or (options and options.get(KV_OPTION)):
            self.told.setdefault(request.request_id, (known or request, []))

    def tell(self, outputs: Any) -> None:
        """Add changed provenance to `outputs`; the front end keeps the last one."""
        for output in outputs:
            if (told := self.told.get(output.request_id)) is None:
                continue
            request, known = told
            # A request that ends before it was scheduled has no provenance.
            trail = list(trail_of(request) or known)
            if trail != known:
                self.told[output.request_id] = (request, trail)
                params = output.kv_transfer_params or {}
                output.kv_transfer_params = params | {KV_FIELD: trail}
            # Chunks of a session have a finish reason too, and the session goes on.
            if output.finish_reason is not None and request.is_finished():
                del self.told[output.request_id]

    def forget(self, request: upstream.Request) -> None:
        """Send no more reports to `request`, which was aborted."""
        self.told.pop(request.request_id, None)
