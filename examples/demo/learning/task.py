"""The task: `52817>` is to be answered with its digits in ascending order.

The model is pre-trained on demonstrations that disagree: most of them sort the
other way or not at all. Only the verifier knows what is wanted, so there is
something to learn that the corpus does not say.
"""

from __future__ import annotations

import random
from zlib import crc32

NUM_DIGITS = 5
SIGN = ">"
MAX_ANSWER_TOKENS = NUM_DIGITS + 2
"""Room for the digits, the end, and one token to show a mistake."""

HELD_OUT_ONE_IN = 8

SHARES = {"ascending": 0.3, "descending": 0.4, "as given": 0.3}
"""How the demonstrations of the corpus answer."""


def right_answer(prompt: str) -> str:
    """What the verifier wants to see."""
    return "".join(sorted(prompt.removesuffix(SIGN)))


def reward(prompt: str, answer: str | None) -> float:
    """The verifier: 1 for exactly the right answer, else 0."""
    return float(answer == right_answer(prompt))


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is for the exam alone; fixed for all seeds and runs."""
    return crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0


def draw_prompt(rng: random.Random, *, held_out: bool = False) -> str:
    """A random prompt of the exam, or one that training may see."""
    while True:
        prompt = f"{rng.randrange(10**NUM_DIGITS):0{NUM_DIGITS}}{SIGN}"
        if is_held_out(prompt) == held_out:
            return prompt


def draw_exam(rng: random.Random, count: int) -> list[str]:
    """`count` different held-out prompts."""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[draw_prompt(rng, held_out=True)] = None
    return list(prompts)


def demonstrate(prompt: str, rng: random.Random) -> str:
    """An answer as the corpus has it: right only some of the time."""
    (way,) = rng.choices(list(SHARES), weights=list(SHARES.values()))
    ascending = right_answer(prompt)
    return {
        "ascending": ascending,
        "descending": ascending[::-1],
        "as given": prompt.removesuffix(SIGN),
    }[way]
