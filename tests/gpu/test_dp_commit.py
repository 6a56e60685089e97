"""Data-parallel engines that share experts: no step of theirs is of two versions.

Each engine holds half of the experts, so one that switched a step earlier than the
other would change the other's tokens to what no version makes.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.test_tearing import mismatches
from tests.gpu.test_tearing import NOISE
from tests.support.engines.reference import Reference
from tests.support.engines.script import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

COMMITS = 60
LOOKED_AT = 48
"""Of the last streams; the reference runs on the CPU."""


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {
        label: checkpoint(seed, family="mixtral_unrouted")
        for seed, label in enumerate("ab")
    }


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Reference:
    return Reference(folders, torch.float32)


def streams(way: str, folders: dict[str, Path]) -> list[Any]:
    """What two engines make under commits, as requests' outputs have it."""
    seen = run_script(
        "two_engines",
        way,
        folders["a"],
        folders["b"],
        COMMITS,
        room="tests.support.gpu",
    )
    print(seen["replies"])
    return [output_of(stream) for stream in seen["streams"][-LOOKED_AT:]]


def output_of(stream: dict[str, Any]) -> Any:
    steps = zip(stream["tokens"], stream["logprobs"], strict=True)
    completion = SimpleNamespace(
        token_ids=stream["tokens"],
        logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in steps],
        weight_versions=[
            SimpleNamespace(version=version, start=start, end=end)
            for version, start, end in stream["spans"]
        ],
    )
    return SimpleNamespace(prompt_token_ids=stream["prompt"], outputs=[completion])


def test_every_step_of_two_engines_is_of_one_version(
    folders: dict[str, Path], reference: Reference
) -> None:
    outputs = streams("together", folders)
    assert sum(len(o.outputs[0].weight_versions) > 1 for o in outputs) > 10
    assert mismatches(outputs, reference, "a", NOISE) == []


def test_engines_that_switch_apart_are_found_by_the_test_above(
    folders: dict[str, Path], reference: Reference
) -> None:
    assert len(mismatches(streams("apart", folders), reference, "a", NOISE)) > 3
