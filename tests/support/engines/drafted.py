"""What an engine with a drafter says, and what was drafted for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.engines.probe import greedy
from tests.support.models.quantised import quantise
from tests.support.models.tiny_drafters import drafting, make_drafter

ONLINE = "fp8_per"
"""So begins what is not of a checkpoint: bf16 that is quantised at every update."""

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
    start: Callable[..., Any],
    versions: tuple[Path, Path],
    root: Path,
    kind: str,
    method: str,
    **options: Any,
) -> None:
    """Change a quantised model, its drafter, and both; each time as fresh engines are.

    Args:
        start: an engine with such options; the one before it ends.
        versions: of the model, in bf16.
        root: where others are written.
        kind: of `quantise`, or what an engine makes of bf16 by itself.
        method: of drafting.
        **options: of all engines.

    """
    folders = dict(zip(("old", "new"), versions, strict=True))
    drafters = {
        name: make_drafter(root / f"drafter-{name}", seed, versions[0], method)
        for seed, name in enumerate(folders, start=5)
    }
    if kind.startswith(ONLINE):
        options["quantization"] = kind
    else:
        folders = {n: quantise(p, root / n, kind) for n, p in folders.items()}

    def begin(model: str, drafter: str) -> Any:
        config = drafting(method, drafters[drafter])
        return start(folders[model], speculative_config=config, **options)

    fresh = {(m, d): drafted(begin(m, d)) for m in folders for d in drafters}
    assert len({str(drafts) for _, drafts in fresh.values()}) == len(fresh)
    served = "old", "old"
    llm = begin(*served)
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
