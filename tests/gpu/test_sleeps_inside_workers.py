"""Sleeps that a worker extension makes through vLLM's own allocator on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.support.engines.script import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("staging", ["device", "host"])
def test_what_sleeps_is_not_served_and_what_is_lost_is_filled_again(
    staging: str, old: Path, new: Path
) -> None:
    room = "tests.support.gpu"
    seen = run_script("pools", staging, old, new, room=room, spawned=True)["seen"]
    wrong = [(what, found) for what, found, right in seen if found != right]
    assert len(seen) > 20 and not wrong
