"""Drafts of speculative decoding under a pause, run as a script.

In a process of its own: no other engine starts in one where numba, which drafts are
compiled with, has been at work.

Usage: python -m tests.engine.drafts FOLDER
"""

import os
import sys
from typing import Any

from vllm import LLM, SamplingParams

from tests.engine.script import OPTIONS, tell
from tests.engine.test_pause_features import GREEDY, MODES, lived, pause, tokens


def main(folder: str) -> None:
    drafting = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
    }
    llm = LLM(
        folder,
        dtype="float32",
        speculative_config=drafting,
        **OPTIONS,
    )
    params = SamplingParams(**GREEDY | {"max_tokens": 150})
    seen: dict[str, Any] = {"alone": tokens(lived(llm, params))}
    for mode in MODES:
        seen[mode] = tokens(lived(llm, params, pause(llm, mode)))
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1])
