"""What the tests ask an engine that sees."""

from typing import Any

from vllm import SamplingParams

from tests.seeing import SEEING
from tests.tiny_vision import picture

SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def described(llm: Any, name: str = "blip2") -> list[list[int]]:
    """What is said of three pictures, the same every time."""
    seeing = SEEING[name]
    prompts = [
        {
            "prompt": seeing.prompt,
            "multi_modal_data": {"image": picture(n, seeing.side)},
        }
        for n in range(3)
    ]
    outputs = llm.generate(prompts, SAMPLING, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
