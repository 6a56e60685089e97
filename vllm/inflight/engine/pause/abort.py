"""Abort requests between two steps, and send the last output of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext

RANDOM = re.compile(r"-[0-9a-f]{8}$")
"""The random suffix that vLLM adds to a user's request id."""


CHOICE = re.compile(r"^\d+_")
"""The prefix that vLLM adds for each of several choices."""


OF_ROUTES = (
    re.compile(r"cmpl-(.+)-\d+"),
    re.compile(r"(?:chatcmpl|generate-tokens)-(.+)"),
    re.compile(r"(resp_.+)_\d+"),
)
"""How vLLM's routes build an engine's request id from the user's id."""


def abort_requests(
    controller: EngineContext, ids: list[str] | None = None
) -> dict[str, Any]:
    """Finish requests now, with the tokens that they have; returns `num_aborted`.

    Args:
        controller: of the engine.
        ids: the users' request ids, or None for every request.

    """
    scheduler = controller.core.scheduler
    chosen = None if ids is None else matching(scheduler.requests, ids)
    if chosen is not None and not chosen:
        return {"num_aborted": 0}
    aborted = scheduler.finish_requests(chosen, upstream.RequestStatus.FINISHED_ABORTED)
    tell_aborted(controller, aborted)
    return {"num_aborted": len(aborted)}


def matching(known: Iterable[str], ids: Iterable[str]) -> list[str]:
    """The engine's request ids that belong to one of the users' `ids`."""
    wanted = frozenset(ids)
    return [each for each in known if not wanted.isdisjoint(_names_of(each))]


def _names_of(request_id: str) -> set[str]:
    """The ids that a user may have given a request; `a` and `a-1` differ."""
    given = RANDOM.sub("", request_id)
    names = {given, CHOICE.sub("", given)}
    found = (route.fullmatch(name) for route in OF_ROUTES for name in names)
    return {request_id} | names | {match[1] for match in found if match}


def tell_aborted(controller: EngineContext, aborted: Iterable[Any]) -> None:
    """Send the last output of aborted requests to their clients.

    Args:
        controller: of the engine.
        aborted: the requests that the scheduler has finished.

    """
    if controller.in_process:
        reason = upstream.FinishReason.ABORT
        controller.undelivered_outputs += [
            _last(each.request_id, reason) for each in aborted
        ]
    else:
        controller.core._send_abort_outputs(aborted)
        controller.wake()


def end_with_error(
    controller: EngineContext, request: upstream.Request, why: str
) -> None:
    """End a request with an error, before it is added to the scheduler.

    Args:
        controller: the controller of the request's engine core.
        request: the request, in the scheduler's form.
        why: the error, which becomes its `stop_reason`.

    """
    last = _last(request.request_id, upstream.FinishReason.ERROR, why)
    if controller.in_process:
        controller.undelivered_outputs.append(last)
        return
    core = controller.core
    outputs = upstream.EngineCoreOutputs(
        engine_index=core.engine_index,
        outputs=[last],
        finished_requests={request.request_id},
    )
    core.output_queue.put_nowait((request.client_index, outputs))


def _last(request_id: str, reason: object, why: str | None = None) -> Any:
    return upstream.EngineCoreOutput(
        request_id, [], finish_reason=reason, stop_reason=why
    )
