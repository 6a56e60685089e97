"""Farewells: the last output of a request that ends outside of any step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.inflight import upstream


def abort(gate: Any, aborted: Iterable[Any]) -> None:
    """Tell whoever waits for these requests that they were aborted.

    Args:
        gate: of the engine.
        aborted: what the scheduler has finished.

    """
    if gate.in_process:
        reason = upstream.FinishReason.ABORT
        gate.farewells += [_last(each.request_id, reason) for each in aborted]
    else:
        gate._core._send_abort_outputs(aborted)
        gate.rouse()


def refuse(core: Any, request: Any, why: str) -> None:
    """End a request with an error, before the scheduler has heard of it.

    Args:
        core: that it came to.
        request: one of the scheduler's kind.
        why: told as its `stop_reason`.

    """
    last = _last(request.request_id, upstream.FinishReason.ERROR, why)
    gate = core.inflight_gate
    if gate.in_process:
        gate.farewells.append(last)
        return
    outputs = upstream.EngineCoreOutputs(
        engine_index=core.engine_index,
        outputs=[last],
        finished_requests={request.request_id},
    )
    core.output_queue.put_nowait((request.client_index, outputs))


def _last(request_id: str, reason: Any, why: str | None = None) -> Any:
    return upstream.EngineCoreOutput(
        request_id, [], finish_reason=reason, stop_reason=why
    )
