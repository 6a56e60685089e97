"""What an engine with a drafter says, and what was drafted for it."""

from collections.abc import Callable
from pathlib import Path
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


def either_or_both(
    begin: Callable[..., Any], folders: dict[str, Path], drafters: dict[str, Path]
) -> None:
    """Change a model, its drafter, and both; each time it is as fresh engines are.

    Args:
        begin: of a folder and a drafter's, an engine on them; the last one is served.
        folders: of the model, `old` and `new`.
        drafters: of its drafter.

    """
    fresh = {
        (model, drafter): drafted(begin(folders[model], drafters[drafter]))
        for model in folders
        for drafter in drafters
    }
    assert len({str(drafts) for _, drafts in fresh.values()}) == len(fresh)
    served = "old", "old"
    llm = begin(folders["old"], drafters["old"])
    assert drafted(llm) == fresh[served]
    for model, drafter in (
        *(("new", None), (None, "new"), ("old", "old")),
        *(("new", "new"), (None, "old")),
    ):
        llm.update_weights_from_disk(
            model and str(folders[model]),
            "next",
            draft_path=drafter and str(drafters[drafter]),
        )
        before, served = served, (model or served[0], drafter or served[1])
        assert drafted(llm) == fresh[served]
        llm.rollback_weights()
        assert drafted(llm) == fresh[before]
        llm.rollback_weights()
        assert drafted(llm) == fresh[served]
