"""What the tests ask of an engine: prompts, greedy tokens, a version sent."""

from pathlib import Path
from typing import Any

from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(count: int) -> list[dict[str, Any]]:
    """Different prompts of different lengths, as token ids."""
    return [
        {"prompt_token_ids": [(7 * i + 3 * j) % 250 for j in range(20 + i)]}
        for i in range(count)
    ]


def greedy(llm: Any) -> list[list[int]]:
    """What the weights served now make of eight prompts."""
    outputs = llm.generate(prompts(8), GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def state(llm: Any) -> tuple[list[list[int]], str]:
    """Tokens and label: all that a failed update must leave alone."""
    return greedy(llm), llm.get_weight_version()


def send(llm: Any, path: Path, **faults: Any) -> None:
    """Have the transport "other" receive a checkpoint, with faults if any."""
    llm.update_weights({"update_info": {"path": str(path), **faults}})
