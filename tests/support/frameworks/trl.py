"""What TRL's own files do, in a process of their own.

Usage: python -m tests.support.frameworks.trl sampled

The package is in build/frameworks (`make test-frameworks`), without what it depends on.
`sampled` prints the prompts of one batch as TRL's sampler orders them.
"""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import tell


def sampled() -> None:
    """A batch of two prompts with two generations each, as `GRPOTrainer` gets it."""
    prompts = ["hello", "you"]
    sampler = import_module("trl.trainer.utils").RepeatSampler(
        prompts, mini_repeat_count=2, batch_size=2, repeat_count=1, shuffle=False
    )
    tell({"prompts": [prompts[number] for number in sampler]})


if __name__ == "__main__":
    OWN["trl"].use()
    {"sampled": sampled}[sys.argv[1]](*sys.argv[2:])
