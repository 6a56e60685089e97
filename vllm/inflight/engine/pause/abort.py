"""Abort requests between two steps, and send the last output of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.scheduling import request_checks

logger = upstream.init_logger(__name__)

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


def abort_stuck(
    controller: EngineContext, stuck: request_checks.Groups, why: str
) -> dict[str, Any]:
    """Finish requests that cannot be computed again; returns `num_aborted`.

    For what cannot be rejected any more: the KV of all requests has lost its meaning
    already. The others can be retracted afterwards.

    Args:
        controller: of the engine.
        stuck: the ids of the requests, by what keeps them from being retracted.
        why: what has happened, as a clause.

    """
    if not stuck:
        return {"num_aborted": 0}
    named = request_checks.joined(stuck)
    logger.warning("%s, and these cannot be computed again: %s", why, named)
    ids = [name for names in stuck.values() for name in names]
    aborted = controller.core.scheduler.finish_requests(
        ids, upstream.RequestStatus.FINISHED_ABORTED
    )
    for kind, names in stuck.items():
        tell_aborted(
            controller,
            [each for each in aborted if each.request_id in names],
            f"{why}, and a request {kind} cannot be computed again",
        )
    return {"num_aborted": len(aborted)}


def tell_aborted(
    controller: EngineContext, aborted: Iterable[Any], why: str | None = None
) -> None:
    """Send the last output of aborted requests to their clients.

    Args:
        controller: of the engine.
        aborted: the requests that the scheduler has finished.
        why: the reason, which becomes their `stop_reason`.

    """
    _send_last(controller, aborted, upstream.FinishReason.ABORT, why)
    if not controller.in_process:
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
    _send_last(controller, [request], upstream.FinishReason.ERROR, why)


def _send_last(
    controller: EngineContext, requests: Iterable[Any], reason: Any, why: str | None
) -> None:
    """Send the last output of each request to the client that has sent it."""
    by_client = defaultdict[int, list[Any]](list)
    for each in requests:
        by_client[each.client_index].append(
            upstream.EngineCoreOutput(
                each.request_id, [], finish_reason=reason, stop_reason=why
            )
        )
    for client, outputs in by_client.items():
        if controller.in_process:
            controller.undelivered_outputs += outputs
            continue
        core = controller.core
        last = upstream.EngineCoreOutputs(
            engine_index=core.engine_index,
            outputs=outputs,
            finished_requests={each.request_id for each in outputs},
        )
        core.output_queue.put_nowait((client, last))
