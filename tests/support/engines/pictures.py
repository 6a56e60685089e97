"""What the tests ask an engine that sees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.support.engines.mixtures import mixed, part, said
from tests.support.models.seeing import SEEING
from tests.support.models.tiny_vision import make_seeing, picture

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


def commits_rollbacks_and_a_tower(
    begin: Callable[[Path], Any], root: Path, name: str
) -> tuple[Any, Path]:
    """All of a model and its tower alone, three times: what fresh engines say.

    Returns the engine and the version that it serves.
    """
    tower = SEEING[name].tower
    old, new = (make_seeing(root / str(seed), seed, name) for seed in (0, 1))
    llm = begin(new)
    fresh = said(llm), described(llm, name)
    llm = begin(mixed(old, new, tower, root / "mixed"))
    mixture = said(llm), described(llm, name)
    llm = begin(old)
    before = said(llm), described(llm, name)
    assert before[1] not in (fresh[1], mixture[1])
    assert before[0][0] == mixture[0][0]  # text is not for the tower
    some = part(new, tower, root / "part")
    for _ in range(3):
        llm.update_weights_from_disk(str(new), "new")
        assert (said(llm), described(llm, name)) == fresh
        llm.rollback_weights()
        assert (said(llm), described(llm, name)) == before
        llm.update_weights_from_disk(some, "tower", subset=tower)
        assert (said(llm), described(llm, name)) == mixture
        llm.rollback_weights()
    llm.update_weights_from_disk(str(new), "new")
    assert (said(llm), described(llm, name)) == fresh
    return llm, new
