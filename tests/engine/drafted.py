"""What an engine with a drafter says, and what was drafted for it."""

from typing import Any

from tests.engine.probe import greedy

Drafted = tuple[list[list[int]], list[list[list[int]]]]
"""Tokens of each request; drafts of each step, by request."""


def drafted(llm: Any) -> Drafted:
    """`greedy`, and all drafts that were verified meanwhile."""
    llm.reset_prefix_cache()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, drafts = scheduler.schedule, []

    def recording(*args: Any) -> Any:
        output = schedule(*args)
        drafts.append(list(output.scheduled_spec_decode_tokens.values()))
        return output

    scheduler.schedule = recording
    try:
        return greedy(llm), drafts
    finally:
        del scheduler.schedule
