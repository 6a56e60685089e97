"""Drafts of speculative decoding under pauses and updates, run as a script.

In a process of its own: no other engine starts in one where numba, which drafts are
compiled with, has been at work.

Usage: python -m tests.support.engines.drafts OLD NEW
"""

import os
import sys
from typing import Any

from vllm import LLM, SamplingParams

from tests.e2e.test_pause_features import GREEDY, MODES, lived, pause, tokens
from tests.support.engines.script import OPTIONS, tell


def scheduled_drafts(llm: Any, params: SamplingParams) -> int:
    """How many drafts were verified while two requests ran."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, num_drafts = scheduler.schedule, 0

    def counting(*args: Any) -> Any:
        nonlocal num_drafts
        output = schedule(*args)
        num_drafts += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    scheduler.schedule = counting
    lived(llm, params)
    return num_drafts


def main(old: str, new: str) -> None:
    drafting = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
    }
    llm = LLM(
        old,
        dtype="float32",
        speculative_config=drafting,
        **OPTIONS,
    )
    params = SamplingParams(**GREEDY | {"max_tokens": 150})
    seen: dict[str, Any] = {"alone": tokens(lived(llm, params))}
    for mode in MODES:
        seen[mode] = tokens(lived(llm, params, pause(llm, mode)))
    through = lived(llm, params, lambda: llm.update_weights_from_disk(new, "new"))
    seen["spans"] = [
        [(span.version, span.start, span.end) for span in choice.weight_versions]
        for choice in through
    ]
    seen["new"] = tokens(lived(llm, params))
    llm.rollback_weights()
    seen["back"] = tokens(lived(llm, params))
    seen["drafts"] = scheduled_drafts(llm, params)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], sys.argv[2])
