"""What an engine with a drafter says, and what was drafted for it."""

from typing import Any

from tests.engine.probe import greedy

Drafted = tuple[list[list[int]], list[list[list[int]]]]
"""Tokens of each request; drafts of each step, by request."""


def drafted(llm: Any) -> Drafted:
    """`greedy`, and all drafts that were verified meanwhile."""
    llm.reset_prefix_cache()
    core = llm.llm_engine.engine_core.engine_core
    scheduler, worker = core.scheduler, core.model_executor.driver_worker.worker
    schedule, drafts = scheduler.schedule, []
    # On a GPU the scheduler has -1 for each draft; what is verified is the worker's.
    states = getattr(worker.model_runner, "req_states", None)

    def recording(*args: Any) -> Any:
        output = schedule(*args)
        planned = output.scheduled_spec_decode_tokens
        if states is not None:
            places = ((states.req_id_to_index[r], len(d)) for r, d in planned.items())
            planned = {n: states.draft_tokens[n, :k].tolist() for n, k in places}
        drafts.append(list(planned.values()))
        return output

    scheduler.schedule = recording
    try:
        return greedy(llm), drafts
    finally:
        del scheduler.schedule
